"""How much bandwidth a run takes: formulas, no measurements. docs/bandwidth.md derives them and names what they assume.

Three ways to train one model with M learners are compared, each for the link of one learner:

- *Decoupled DiLoCo*, this project: contributions go up to the syncer, published steps come down, each direction once.
- *Streaming DiLoCo*: the learners all-reduce the same fragments among themselves, without a syncer.
- *Data-parallel*: the learners all-reduce the whole gradient at every step.

Every function is pure. Rates are bit/s of payload and for one direction of a full-duplex link, sizes are bits,
durations seconds, steps inner steps of the fastest learner.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from decoupled_diloco.core.encoding_bits import ENCODING_BITS
from decoupled_diloco.core.policy import Policy

SYNC_LATENCIES: Final = 2
"""One-way latencies in a sync: the upload's first byte, the version's first byte. The ask costs none, because it is
there before the copy is due; nor does the request for the version, which goes up along with the contribution."""

ALL_REDUCE_LATENCIES: Final = 2
"""One-way latencies in an all-reduce where everybody sends to everybody at once: scatter, gather."""

INTERVAL_STEPS_MAX: Final = 1 << 40
"""No longer sync interval is looked for."""

_POLICY: Final = Policy()


@dataclass(frozen=True, slots=True)
class Plan:
    """A run to plan for.

    Attributes:
        parameter_count: N, > 0.
        learner_count: M, >= 1, all equally fast.
        fragment_count: P, 1 <= P <= H; fragments are equally large.
        interval_steps: H.
        overlap_steps: tau, 0 <= tau < H.
        step_seconds: of an inner step, > 0.
        upload_bits: per parameter of a contribution, > 0, block scales included.
        download_bits: per parameter of a published step, > 0.
        gradient_bits: per parameter of a gradient, for data-parallel training, > 0.
        latency_seconds: one way, between a learner and the syncer, or between two learners.
        quorum_seconds: from the first learner's start to that of the last one that a round waits for.
        merge_seconds: merge and commit of a fragment at the syncer.
        grace_share: gamma, the share of the slack that the grace window may use.
        grace_cap_steps: the longest grace window.
    """

    parameter_count: float
    learner_count: int
    fragment_count: int = _POLICY.fragment_count
    interval_steps: int = _POLICY.interval_steps
    overlap_steps: int = _POLICY.overlap_steps
    step_seconds: float = 1.0
    upload_bits: float = ENCODING_BITS[_POLICY.upload_encoding]
    download_bits: float = ENCODING_BITS[_POLICY.download_encoding]
    gradient_bits: float = ENCODING_BITS["bf16"]
    latency_seconds: float = 0.0
    quorum_seconds: float = 0.0
    merge_seconds: float = 0.0
    grace_share: float = _POLICY.grace_share
    grace_cap_steps: float = _POLICY.grace_cap_steps

    @property
    def fragment_parameters(self) -> float:
        """Parameters of one fragment, N / P."""
        return self.parameter_count / self.fragment_count

    @property
    def interval_seconds(self) -> float:
        """Time between two syncs of one fragment, H * step."""
        return self.interval_steps * self.step_seconds


@dataclass(frozen=True, slots=True)
class Need:
    """What one way of training takes from the link of one learner.

    Attributes:
        up: average bit/s that a learner sends.
        down: average bit/s that it receives.
        hidden: bit/s that the link must carry, each direction, so that nobody waits for it; infinite where no
            bandwidth is enough.
    """

    up: float
    down: float
    hidden: float

    def fits(self, link: float) -> bool:
        """Whether a link of so many bit/s, each direction, hides it."""
        return self.hidden <= link

    def times(self, count: float) -> Need:
        """The same for so many learners on one link: that of the syncer."""
        return Need(self.up * count, self.down * count, self.hidden * count)


def decoupled(plan: Plan, grace_steps: float = 0.0) -> Need:
    """Decoupled DiLoCo: averages bits * N / (H * step); the bandwidth that hides a sync by `least_rate`.

    A learner copies a fragment at a boundary and applies the merged one tau steps later, so there are
    tau * step - quorum - merge and commit - 2 latencies for the bytes: up by all learners at once, then down to all.

    Args:
        plan: the run.
        grace_steps: length of the grace window that must be left, in steps. The window is at most gamma * slack
            (Eq. 3), so it takes grace_steps / gamma steps out of tau.
    """
    up, down = plan.fragment_parameters * plan.upload_bits, plan.fragment_parameters * plan.download_bits
    window = plan.overlap_steps * plan.step_seconds - plan.quorum_seconds - plan.merge_seconds
    window -= SYNC_LATENCIES * plan.latency_seconds
    if grace_steps > 0:
        window -= grace_steps * plan.step_seconds / plan.grace_share if plan.grace_share > 0 else math.inf
    per_interval = plan.fragment_count / plan.interval_seconds
    return Need(up * per_interval, down * per_interval, least_rate(plan, max(up, down), min(up, down), window))


def streaming(plan: Plan) -> Need:
    """Streaming DiLoCo: every fragment by all-reduce; averages (M-1)/M * (up + down bits) * N / (H * step).

    A learner sends (M-1)/M of the fragment in `upload_bits` (scatter) and as much in `download_bits` (gather), and
    receives as much. The window is tau * step - quorum - 2 latencies; all learners must take part.
    """
    share = (plan.learner_count - 1) / plan.learner_count
    size = share * plan.fragment_parameters * (plan.upload_bits + plan.download_bits)
    window = plan.overlap_steps * plan.step_seconds - plan.quorum_seconds - ALL_REDUCE_LATENCIES * plan.latency_seconds
    average = size * plan.fragment_count / plan.interval_seconds
    return Need(average, average, least_rate(plan, size, 0.0, window) if size else 0.0)


def data_parallel(plan: Plan) -> Need:
    """Data-parallel training: 2 * (M-1)/M * gradient bits * N per step and direction, within that step.

    That it may overlap with the whole step is more than a backward pass allows: a lower bound.
    """
    size = 2 * (plan.learner_count - 1) / plan.learner_count * plan.parameter_count * plan.gradient_bits
    window = plan.step_seconds - plan.quorum_seconds - ALL_REDUCE_LATENCIES * plan.latency_seconds
    average = size / plan.step_seconds
    hidden = math.inf if size and window <= 0 else size / window if size else 0.0
    return Need(average, average, hidden)


def least_rate(plan: Plan, larger: float, smaller: float, window: float) -> float:
    """The slowest link on which every fragment is through before its window ends; infinite where none is.

    Fragments follow each other at floor(p*H/P) steps. Each direction serves them in that order, one at a time, and a
    fragment goes down after it has gone up. The worst that can happen to one is that it queues behind the n - 1 before
    it, in the direction that has more to carry. It is through in time if

        n * larger + smaller <= rate * (window + time from the first copy of these n to the last one),

    for every n; that time is at least floor((n-1)*H/P) steps. With n beyond P the rate that this asks for goes
    towards larger * P / (H * step), the average.

    Args:
        plan: P, H and the step.
        larger: bits of a fragment in the direction that has more.
        smaller: bits of it in the other direction.
        window: seconds for the bytes of one fragment.
    """
    if window <= 0:
        return math.inf
    rate = larger * plan.fragment_count / plan.interval_seconds
    for count in range(1, plan.fragment_count + 1):
        span = (count - 1) * plan.interval_steps // plan.fragment_count * plan.step_seconds
        rate = max(rate, (count * larger + smaller) / (window + span))
    return rate


# --- what would fit a link ---


def largest_model(plan: Plan, link: float) -> float:
    """The most parameters that a link of so many bit/s hides, all else equal; 0 where none would be hidden."""
    return plan.parameter_count * link / decoupled(plan).hidden


def smallest_interval(plan: Plan, link: float) -> int | None:
    """The smallest H with which a link hides the syncs, all else equal; None: a longer interval does not help."""

    def fits(steps: int) -> bool:
        return decoupled(replace(plan, interval_steps=steps)).fits(link)

    return _least(fits, max(plan.fragment_count, plan.overlap_steps + 1), INTERVAL_STEPS_MAX)


def smallest_overlap(plan: Plan, link: float) -> int | None:
    """The smallest tau below H with which a link hides the syncs, all else equal; None: not even H - 1 does."""

    def fits(steps: int) -> bool:
        return decoupled(replace(plan, overlap_steps=steps)).fits(link)

    return _least(fits, 0, plan.interval_steps - 1)


def fitting_encodings(plan: Plan, link: float) -> tuple[str, ...]:
    """Names of the upload encodings with which a link hides the syncs, most exact first, all else equal."""
    return tuple(name for name, bits in ENCODING_BITS.items() if decoupled(replace(plan, upload_bits=bits)).fits(link))


def most_learners(plan: Plan, syncer_link: float) -> int:
    """How many learners the syncer's own link serves so that their syncs are hidden, all else equal."""
    need = decoupled(plan).hidden
    return int(syncer_link / need * (1 + 1e-12)) if need < math.inf else 0


def _least(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number from low to high that fits, where with every number all larger ones do."""
    if high < low or not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low
