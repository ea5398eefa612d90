"""What is seen of a chaos run from outside while it goes on, and how long recoveries took by that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from decoupled_diloco.core.errors import PeerError, UnreachableError
from syncerctl.admin_client import AdminClient
from syncerctl.settings import ConnectionSettings

LOOK_SECONDS: Final = 0.2
"""Between two looks: what follows from them is known to this much."""
AWAY: Final = {"lost", "stalled", "left"}
"""States of a learner that its syncer does not count on."""


@dataclass(frozen=True, slots=True)
class LearnerSeen:
    """One learner at one look."""

    incarnation: int
    state: str
    merged_count: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the run; `t` on the machine's monotonic clock."""

    t: float
    phase: str
    committed_count: int
    versions: tuple[tuple[int, int], ...]
    """By fragment: timeline, number."""
    learners: dict[str, LearnerSeen]
    figures: dict[str, Any]


@dataclass(slots=True)
class Watch:
    """Looks at the run from a thread of its own, as long as the context lasts.

    Attributes:
        address: asked before every look, because the syncer may move.
        samples: what was seen; looks that got no answer are left out.
    """

    address: Callable[[], str]
    samples: list[Sample] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look_for_ever, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def newest(self) -> Sample | None:
        """The last successful look."""
        return self.samples[-1] if self.samples else None

    def _look_for_ever(self) -> None:
        client: AdminClient | None = None
        address = ""
        while not self._stop.wait(LOOK_SECONDS):
            if client is None or address != self.address():
                address = self.address()
                client = AdminClient(ConnectionSettings(address=address, timeout_seconds=1.0))
            try:
                self.samples.append(_sample(client))
            except (UnreachableError, PeerError):
                client.__exit__()  # a connection that waits out its backoff would see the next syncer late
                client = None


def _sample(client: AdminClient) -> Sample:
    run: Any = client.run()
    learners: Any = client.learners()
    return Sample(
        t=time.monotonic(),
        phase=run["phase"],
        committed_count=int(run["rounds_committed_count"]),
        versions=tuple((int(f["version"]["timeline"]), int(f["version"]["number"])) for f in run["fragments"]),
        learners={
            item["learner_id"]: LearnerSeen(
                int(item["incarnation"]), item["state"], int(item["rounds_merged_count"] or 0)
            )
            for item in learners
        },
        figures=run["goodput"],
    )


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a run took one fault; seconds, None where there is nothing to say.

    Attributes:
        detect: from the fault until the syncer no longer counted on its victim (a learner), if it was not over before.
        next_commit: from the fault until the next round was committed.
        back: from the end of the fault (the new start, the healing) until a contribution of the victim was merged
            again; of a syncer: until the next round was committed.
    """

    detect: float | None
    next_commit: float | None
    back: float | None


def recovery(samples: Iterable[Sample], victim: str, began: float, ended: float | None) -> Recovery:
    """What the samples say of one fault.

    Args:
        samples: in order.
        victim: a learner's id, or another name for what is no learner.
        began: when the fault began.
        ended: when it was undone; None: never.
    """
    listed = list(samples)
    before = [sample for sample in listed if sample.t <= began]
    after = [sample for sample in listed if sample.t > began]
    next_commit = next(
        (now.t - began for last, now in pairwise(listed) if now.t > began and _is_later(last, now)), None
    )
    at_end = [pair for pair in pairwise(listed) if ended is not None and pair[1].t > ended]
    known = before[-1].learners.get(victim) if before else None
    if known is None:
        back = None
        if ended is not None and victim not in (listed[-1].learners if listed else {}):
            back = next((now.t - ended for last, now in at_end if _is_later(last, now)), None)
        return Recovery(None, _rounded(next_commit), _rounded(back))
    while_it_lasts = [s for s in after if ended is None or s.t <= ended + LOOK_SECONDS]
    detect = next((s.t - began for s in while_it_lasts if _is_away(s, victim, known.incarnation)), None)
    back = None
    if ended is not None:
        back = next((now.t - ended for last, now in at_end if _has_merged(last, now, victim)), None)
    return Recovery(_rounded(detect), _rounded(next_commit), _rounded(back))


def _is_away(sample: Sample, victim: str, incarnation: int) -> bool:
    seen = sample.learners.get(victim)
    return seen is not None and (seen.state in AWAY or seen.incarnation != incarnation)


def _is_later(last: Sample, now: Sample) -> bool:
    """Whether a round was committed between two looks. A lost disk takes the count back."""
    return now.committed_count > last.committed_count


def _has_merged(last: Sample, now: Sample, victim: str) -> bool:
    before, after = last.learners.get(victim), now.learners.get(victim)
    return after is not None and before is not None and after.merged_count > before.merged_count


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
