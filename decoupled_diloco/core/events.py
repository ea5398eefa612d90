"""What happened: the only input of the syncer's machine. Past tense, plain data, no tensors.

Written down with their instants, the events are the run's tape. `request` is the shell's token for an answer: the
machine answers every request exactly once with an `Answer` effect that carries the same token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decoupled_diloco.core.ids import Activity, Decline, Fate, Role, Version
from decoupled_diloco.core.run_state import RunState


@dataclass(frozen=True, slots=True)
class Progress:
    """A learner's report (see `Progress` in syncer.proto). Durations in seconds, counts of this incarnation."""

    local_step: int
    token_count: int
    activity: Activity = Activity.COMPUTE
    step_seconds: float | None = None
    running_step_seconds: float | None = None
    spans: tuple[tuple[Activity, float], ...] = ()
    loss: float | None = None
    schedule_step: int = 0
    network_wait_seconds: float = 0.0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ContributionHeader:
    """What a contribution says of itself before its bytes. `step_count` and `token_count` are c_steps and c_tokens."""

    learner: str
    incarnation: int
    round: int
    fragment: int
    base: Version
    local_step: int
    total_token_count: int
    step_count: int
    token_count: int
    cursor: int
    payload_bytes: int = 0
    schema_matches: bool = True


@dataclass(frozen=True, slots=True)
class JoinRequested:
    """A learner or observer wants in. Protocol, run, configuration and schema were compared by the shell."""

    request: int
    learner: str
    role: Role = Role.LEARNER
    peer_address: str = ""
    software_version: str = ""


@dataclass(frozen=True, slots=True)
class LearnerAttached:
    """The control stream is up (again). `applied` is what the learner holds, by fragment."""

    learner: str
    incarnation: int
    applied: tuple[tuple[int, Version], ...]
    progress: Progress


@dataclass(frozen=True, slots=True)
class LearnerDetached:
    """The control stream broke. The lease goes on."""

    learner: str
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """A heartbeat with news."""

    learner: str
    incarnation: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """A transfer of this learner moved bytes; at most one event a second and transfer. Counts as life."""

    learner: str
    incarnation: int
    round: int | None = None


@dataclass(frozen=True, slots=True)
class FragmentApplied:
    """A learner applied a version at a step boundary; `kept_token_count` survive in its values (carry, blend)."""

    learner: str
    incarnation: int
    fragment: int
    version: Version
    local_step: int
    token_count: int
    kept_token_count: int = 0
    download_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ContributionStarted:
    """A header arrived. Answered with `Admission`."""

    request: int
    header: ContributionHeader


@dataclass(frozen=True, slots=True)
class ContributionReceived:
    """A whole contribution lies verified in its buffer. Answered with a `Fate`.

    Attributes:
        request: Token of the answer.
        learner: Who sent it.
        incarnation: Of the learner.
        round: That it is for.
        finite: Whether it can be merged: every value finite, and the norm within what a merge may take.
        norm: Of the delta.
        problem: Why it cannot be merged, in words; empty: not told, as on tapes from before there was this field.
    """

    request: int
    learner: str
    incarnation: int
    round: int
    finite: bool
    norm: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ContributionFailed:
    """A started upload broke (ABORTED) or did not hold what it promised (CORRUPT). It may be sent again."""

    learner: str
    incarnation: int
    round: int
    fate: Fate
    reason: str


@dataclass(frozen=True, slots=True)
class ContributionDeclined:
    """A learner has nothing for a round."""

    learner: str
    incarnation: int
    round: int
    reason: Decline


@dataclass(frozen=True, slots=True)
class InitialFragmentReceived:
    """One fragment of the initial parameters is staged by the shell. Answered with None, or a `Refusal`."""

    request: int
    learner: str
    incarnation: int
    fragment: int
    digest: str


@dataclass(frozen=True, slots=True)
class InitialParametersCommitted:
    """The staged fragments became the first versions, in one transaction."""

    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MergeFinished:
    """The merge and outer step are done; the result is held by the shell until the commit. `norms` as contributed."""

    round: int
    digest: str
    finite: bool
    seconds: float
    rda_over_avg: float = 1.0


@dataclass(frozen=True, slots=True)
class MergeFailed:
    """The merge could not be computed; the fragment is untouched."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommitFinished:
    """The new version and its ledger row are durable."""

    round: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """They are not; the fragment is untouched."""

    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class LeavingAnnounced:
    """A learner began to drain of its own will."""

    learner: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class LearnerLeft:
    """A learner said goodbye. Answered with None."""

    request: int
    learner: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvaluationReported:
    """An observer measured published parameters."""

    learner: str
    incarnation: int
    global_step: int
    figures: tuple[tuple[str, float], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """An operator wants the run to pause. Answered with None, or a `Refusal`."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """An operator wants it to go on. Answered with None, or a `Refusal`."""

    request: int


@dataclass(frozen=True, slots=True)
class FinishRequested:
    """An operator wants it to end. Answered with None, or a `Refusal`."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants a learner to leave in good order. Answered with None, or a `Refusal`."""

    request: int
    learner: str
    reason: str


@dataclass(frozen=True, slots=True)
class EvictRequested:
    """An operator wants a learner out at once, and not back before `ReadmitRequested`. Answered like a drain."""

    request: int
    learner: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReadmitRequested:
    """An operator lets an evicted learner join again. Answered with None, or a `Refusal`."""

    request: int
    learner: str


@dataclass(frozen=True, slots=True)
class RollBackRequested:
    """An operator wants the run to go on from a checkpoint. Answered, once it does, with None, or a `Refusal`."""

    request: int
    checkpoint: str
    cut: RunState
    """The run's state in the checkpoint."""
    reason: str


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The checkpoint's versions and the new state are durable."""


@dataclass(frozen=True, slots=True)
class RollBackFailed:
    """They are not; nothing was changed."""

    reason: str


@dataclass(frozen=True, slots=True)
class StorageFailed:
    """The store cannot write (the disk is full): no round goes on until it can. Learners train on."""

    reason: str


@dataclass(frozen=True, slots=True)
class StorageRecovered:
    """The store can write again."""


@dataclass(frozen=True, slots=True)
class ModelAgreed:
    """The first learner brought the model. Shares of the parameters in each fragment; they sum to 1."""

    fragment_shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The instant that `next_deadline` named has come."""


Event = (
    JoinRequested
    | LearnerAttached
    | LearnerDetached
    | ProgressReported
    | BytesMoved
    | FragmentApplied
    | ContributionStarted
    | ContributionReceived
    | ContributionFailed
    | ContributionDeclined
    | InitialFragmentReceived
    | InitialParametersCommitted
    | MergeFinished
    | MergeFailed
    | CommitFinished
    | CommitFailed
    | LeavingAnnounced
    | LearnerLeft
    | EvaluationReported
    | PauseRequested
    | ResumeRequested
    | FinishRequested
    | DrainRequested
    | EvictRequested
    | ReadmitRequested
    | RollBackRequested
    | RolledBack
    | RollBackFailed
    | StorageFailed
    | StorageRecovered
    | ModelAgreed
    | TimerFired
)
