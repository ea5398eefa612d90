"""The run's policy: the values that every decision of the core reads, and the one table of deadlines.

Both are plain frozen data. The run file (`decoupled_diloco.config`) is validated and turned into these; the machine
never reads a file. Durations are seconds, instants never appear here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

BelowQuorum = Literal["wait", "degrade"]
ApplyRule = Literal["overwrite", "carry", "blend"]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The one table of deadlines, owned by the syncer and handed to every learner at the join."""

    heartbeat_seconds: float = 1.0
    """A learner reports progress at least this often, from its network thread, also while a step is running."""
    lease_seconds: float = 10.0
    """A learner that the syncer has not heard from for this long is lost. Moving bytes count as life."""
    stall_seconds: float = 3.0
    """A live learner that has been silent, or inside one step, for longer than this (and than `stall_step_factor` of
    its own steps) is stalled: nobody waits for it, it keeps its lease."""
    last_call_seconds_max: float = 1.0
    """Longest wait for answers to a last call; the wait is one step of the fastest learner where that is shorter."""
    last_call_seconds_min: float = 0.1
    """Shortest wait for answers to a last call: a round trip on a slow link, so that fast steps do not cut it off."""
    upload_idle_seconds: float = 5.0
    """A started upload that moves no bytes for this long has failed."""
    upload_seconds_min: float = 30.0
    """A started upload may take at least this long (and tau steps, and four times the learner's median upload)."""
    initial_parameters_seconds: float = 600.0
    """The learner that was asked for the initial parameters has this long before another one is asked."""
    drain_seconds_max: float = 60.0
    """A draining learner leaves after this long even if some fragments had no round for it; so does a finishing run."""
    rpc_seconds: float = 20.0
    """Deadline of a unary call (join, leave). The caller never waits less than the syncer may take."""
    attach_idle_seconds: float = 30.0
    """The syncer sends something on the Attach stream at least this often; a learner that hears nothing reconnects."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the core decides by. Symbols of the paper in brackets."""

    fragment_count: int = 8
    """[P] Disjoint subsets of the parameter tensors; 1 <= P <= H."""
    interval_steps: int = 24
    """[H] Every fragment is synchronised once in this many global steps."""
    overlap_steps: int = 2
    """[tau] Inner steps over which one sync is overlapped; 0 <= tau < H."""
    total_steps: int = 0
    """The run finishes after this global step; 0 means it runs until FinishRun."""
    quorum_minimum: int = 1
    """[K] Contributions that must have started before a round may leave OPEN."""
    grace_share: float = 0.8
    """[gamma] Share of the slack that the grace window may use, 0 <= gamma < 1."""
    grace_cap_steps: float = 1.0
    """The grace window is never longer than this many steps of the fastest learner."""
    last_call: bool = True
    """Learners in the middle of a step answer with the copy of their latest step boundary."""
    below_quorum: BelowQuorum = "wait"
    """With fewer than K live learners: `wait` keeps the round open, `degrade` lets K fall to max(1, live)."""
    norm_outlier_factor: float = 0.0
    """Contributions with a norm above this many times the fragment's moving average are rejected; 0 = off."""
    learners_max: int = 64
    """Most learners registered at once; one more join is refused."""
    outer_learning_rate: float = 0.6
    outer_momentum: float = 0.5
    upload_encoding: str = "bf16"
    download_encoding: str = "bf16"
    apply_rule: ApplyRule = "overwrite"
    """What a learner does with the steps between its copy and the arrival of the merged fragment."""
    blend_alpha: float = 0.5
    """Share of the learner's own value that `blend` keeps, 0 < alpha < 1."""
    barrier: bool = False
    """For equivalence tests and ablation: a learner that has answered a round waits until that round closed."""
    average_gain: float = 0.125
    """Gain of the moving averages of step time, quorum wait and sync time."""
    stall_step_factor: float = 10.0
    """A running step older than this many of the learner's own step times counts as a stall."""
    deadlines: Deadlines = field(default_factory=Deadlines)

    @property
    def fragment_offsets(self) -> tuple[int, ...]:
        """t_p = floor(p*H/P), distinct because P <= H."""
        return tuple(p * self.interval_steps // self.fragment_count for p in range(self.fragment_count))

    def rounds_in_flight_max(self, sync_seconds: float | None, step_seconds: float | None) -> int:
        """F = min(P, 1 + ceil(max(tau, xi_sync/xi_step) * P/H)); at most one round per fragment is ever open."""
        steps = float(self.overlap_steps)
        if sync_seconds is not None and step_seconds:
            steps = max(steps, sync_seconds / step_seconds)
        # A hair under the ceiling, so that 2*8/24 does not become 1.0000000001 rounds.
        wanted = 1 + math.ceil(steps * self.fragment_count / self.interval_steps - 1e-9)
        return min(self.fragment_count, wanted)

    def changed(self, **values: object) -> Policy:
        """A copy with some values replaced."""
        return replace(self, **values)  # type: ignore[arg-type]
