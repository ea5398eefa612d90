"""Identities and small values that everything else speaks in.

Learner ids are strings ("us-east1-a"); rounds, fragments, incarnations and slots are integers. A round is numbered
from 1, a fragment from 0, an incarnation and a timeline from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LEARNER_ID_PATTERN = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""What a learner id looks like: a DNS label."""


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """Names one immutable value of one fragment.

    Attributes:
        timeline: from 1; a roll-back or fallback opens a new one, so that no number ever names two values.
        number: position in the fragment's history, from 1 (the initial parameters).
        digest: xxh3-128 of the float32 values in hexadecimal. Two versions match only if all three fields do.
    """

    timeline: int
    number: int
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.timeline}.{self.number}"


class Role(StrEnum):
    """What a participant does in the run."""

    LEARNER = "learner"
    OBSERVER = "observer"


class Activity(StrEnum):
    """What a learner spends a second on. LOST is the syncer's own; the rest are reported."""

    COMPUTE = "compute"
    DATA_WAIT = "data_wait"
    SYNC_STALL = "sync_stall"
    COMPILE = "compile"
    STARTUP = "startup"
    RECOVER = "recover"
    PAUSED = "paused"
    DRAINING = "draining"
    LOST = "lost"


class Fate(StrEnum):
    """What became of a contribution."""

    ACCEPTED = "accepted"
    LATE = "late"
    STALE_BASE = "stale_base"
    STALE_INCARNATION = "stale_incarnation"
    ZERO_STEPS = "zero_steps"
    SCHEMA = "schema"
    NONFINITE = "nonfinite"
    NORM_OUTLIER = "norm_outlier"
    CORRUPT = "corrupt"
    ABORTED = "aborted"

    @property
    def is_terminal(self) -> bool:
        """Whether the same contribution sent again is answered the same; the others may be retried."""
        return self not in (Fate.CORRUPT, Fate.ABORTED)


class Decline(StrEnum):
    """Why a learner has nothing for a round."""

    NO_COPY = "no_copy"
    ZERO_STEPS = "zero_steps"
    NONFINITE = "nonfinite"


class RunPhase(StrEnum):
    """Where the run stands."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHING = "finishing"
    FINISHED = "finished"


class RoundState(StrEnum):
    """The life of a round; `round.py` has the table of transitions."""

    OPEN = "open"
    GRACE = "grace"
    LAST_CALL = "last_call"
    MERGING = "merging"
    COMMITTED = "committed"
    ABANDONED = "abandoned"

    @property
    def is_closed(self) -> bool:
        """Whether nothing can happen to the round any more."""
        return self in (RoundState.COMMITTED, RoundState.ABANDONED)


class LearnerState(StrEnum):
    """A learner as the syncer sees it."""

    LIVE = "live"
    RECOVERING = "recovering"
    COMPILING = "compiling"
    STALLED = "stalled"
    DRAINING = "draining"
    PAUSED = "paused"
    LOST = "lost"
    LEFT = "left"
