"""What reaches a learner's machine from its network thread. Past tense, plain data."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.core.ids import Version


@dataclass(frozen=True, slots=True)
class Asked:
    """The syncer wants a contribution; the newest ask for a round wins."""

    round: int
    fragment: int
    base: Version
    global_step: int
    due_local_step: int
    pace_ratio: float = 1.0
    rounds_in_flight: int = 1


@dataclass(frozen=True, slots=True)
class LastCalled:
    """The syncer wants the copy of the latest boundary, now."""

    round: int


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round has closed."""

    round: int
    fragment: int
    committed: bool
    members: tuple[str, ...]
    global_step: int


@dataclass(frozen=True, slots=True)
class Published:
    """A version can be downloaded. `global_step` counts the run's steps when it was due (0: initial)."""

    fragment: int
    version: Version
    global_step: int


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A version lies complete and verified in host memory."""

    fragment: int
    version: Version
    global_step: int


@dataclass(frozen=True, slots=True)
class DownloadFailed:
    """A download broke or its version is gone; the newest wanted version is tried next."""

    fragment: int
    version: Version


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """Stop stepping."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """Step again."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Stop stepping, answer each fragment's next round at once; `leaves`: then go."""

    reason: str = ""
    leaves: bool = True


@dataclass(frozen=True, slots=True)
class RecoverAsked:
    """Start over from published versions with fresh optimizer state."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class InitialAsked:
    """Upload the initial parameters."""


@dataclass(frozen=True, slots=True)
class DetachedTooLong:
    """The syncer has been unreachable for longer than the learner may train alone."""


@dataclass(frozen=True, slots=True)
class AttachedAgain:
    """The control stream is up (again). The syncer repeats what still holds: open asks, a pause, newer versions."""


@dataclass(frozen=True, slots=True)
class SyncerSeen:
    """Which start of the syncer the control stream is of; the first word on it.

    A syncer that was started again has the committed rounds and nothing of the others: what was answered before is
    asked for again.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The run has finished."""

    reason: str = ""
    global_step: int = 0


LearnerEvent = (
    Asked
    | LastCalled
    | RoundEnded
    | Published
    | Downloaded
    | DownloadFailed
    | PauseAsked
    | ResumeAsked
    | DrainAsked
    | RecoverAsked
    | InitialAsked
    | DetachedTooLong
    | AttachedAgain
    | SyncerSeen
    | Ended
)
