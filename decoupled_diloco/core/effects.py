"""What is to be done: the only output of the syncer's machine. Imperative, plain data, no tensors.

The shell carries effects out in the order given. Effects that name a learner go to that incarnation's control stream;
if the stream is down they are dropped, because a re-attach repeats what still holds. Effects without a learner go to
everybody.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.core.ids import Fate, Role, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState


@dataclass(frozen=True, slots=True)
class Admitted:
    """Answer to `JoinRequested`. The incarnation and slot must be durable before the learner sees this."""

    learner: str
    incarnation: int
    role: Role
    slot: int
    cursor: int
    global_step: int
    versions: tuple[tuple[int, Version, int], ...]
    """Per fragment: index, newest version, global step; empty before the run has parameters."""
    paused: bool
    initialized: bool
    peers: tuple[tuple[str, str], ...] = ()
    """Learners to fetch the inner optimizer's state from (id, address), those that have merged most recently first."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Answer to a request that cannot be granted; `reason` is a name of ErrorReason without its prefix."""

    reason: str
    text: str


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer to `ContributionStarted`: ACCEPTED (send the bytes) or why not.

    `known`: this very contribution was answered before; the answer stands and no bytes are wanted.
    """

    fate: Fate
    text: str = ""
    known: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """Completes a request."""

    request: int
    value: Admitted | Refusal | Admission | Fate | None


@dataclass(frozen=True, slots=True)
class AskContribution:
    """Ask one learner (see `AskContribution` in syncer.proto)."""

    learner: str
    incarnation: int
    round: int
    fragment: int
    base: Version
    global_step: int
    due_local_step: int
    pace_ratio: float
    rounds_in_flight: int


@dataclass(frozen=True, slots=True)
class SendLastCall:
    """Ask one learner to answer with the copy of its latest step boundary."""

    learner: str
    incarnation: int
    round: int


@dataclass(frozen=True, slots=True)
class AbortUpload:
    """Break one upload off and free its buffer; its learner has been told nothing yet."""

    learner: str
    incarnation: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartMerge:
    """Merge the named buffers in this order (by learner id) and take the outer step, without publishing."""

    round: int
    fragment: int
    base: Version
    contributions: tuple[tuple[str, int, float], ...]
    """Learner, incarnation, weight."""
    outer_learning_rate: float
    outer_momentum: float


@dataclass(frozen=True, slots=True)
class MergedContribution:
    """A member of a committed round, as the ledger keeps it. Counts as in `ContributionHeader`; `weight` is w_m."""

    learner: str
    incarnation: int
    slot: int
    weight: float
    step_count: int
    token_count: int
    total_token_count: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Absentee:
    """A learner that is not a member of a round; `fate` says what became of its contribution, if there was one."""

    learner: str
    reason: str
    fate: Fate | None = None


@dataclass(frozen=True, slots=True)
class CommitRound:
    """Make the merge's result durable as `version`, with this as its ledger row; then report CommitFinished.

    The row says all that the commit changes in the run's books, so that a restart can book it again.
    """

    round: int
    fragment: int
    version: Version
    global_step: int
    """t(r)."""
    contributions: tuple[MergedContribution, ...]
    """By learner id."""
    absentees: tuple[Absentee, ...]
    live_count: int
    final: bool
    """One of the last rounds of a finishing run."""
    reason: str

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of the learners whose contributions are merged."""
        return tuple(contribution.learner for contribution in self.contributions)


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Tell everybody how a round ended and free its buffers. Comes after the PublishFragment of the same round."""

    round: int
    fragment: int
    committed: bool
    members: tuple[str, ...]
    global_step: int
    reason: str
    absentees: tuple[Absentee, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishFragment:
    """Serve a committed version and tell everybody."""

    fragment: int
    version: Version
    global_step: int


@dataclass(frozen=True, slots=True)
class AnnounceFragment:
    """Tell one learner of a version it does not hold."""

    learner: str
    incarnation: int
    fragment: int
    version: Version
    global_step: int


@dataclass(frozen=True, slots=True)
class AskInitialParameters:
    """Ask one learner for the run's first parameters."""

    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class CommitInitialParameters:
    """Make all staged fragments durable in one transaction; then report InitialParametersCommitted."""

    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class DiscardInitialParameters:
    """Drop what is staged; its learner is gone."""

    learner: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RecoverLearner:
    """Make one learner start over from published versions, and from a peer's optimizer state."""

    learner: str
    incarnation: int
    reason: str
    peers: tuple[tuple[str, str], ...] = ()
    """As in `Admitted`."""


@dataclass(frozen=True, slots=True)
class ExpireLearner:
    """Cut an incarnation off: close its streams, free its buffers. It was replaced, lost or has left."""

    learner: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class DrainLearner:
    """Make one learner stop stepping and answer the next round of each fragment at once; `leave`: then go."""

    learner: str
    incarnation: int
    reason: str
    leave: bool


@dataclass(frozen=True, slots=True)
class PauseLearner:
    """Make one learner stop stepping."""

    learner: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResumeLearner:
    """Make one learner step again."""

    learner: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class FinishLearner:
    """Tell one learner or observer that the run has ended."""

    learner: str
    incarnation: int
    reason: str
    global_step: int


@dataclass(frozen=True, slots=True)
class LoadInitialParameters:
    """Read the run's first parameters from where the run file says, in place of asking a learner."""


@dataclass(frozen=True, slots=True)
class RollBack:
    """Make the versions of a checkpoint the newest ones, under these names, and `state` the run's state; then report.

    All in one transaction. Answered by `RolledBack` or `RollBackFailed`.
    """

    checkpoint: str
    state: RunState


@dataclass(frozen=True, slots=True)
class EndRun:
    """The run is over: export the model. FinishLearner effects come with it."""

    reason: str
    global_step: int


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """The policy in force has changed."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class Note:
    """For the log: a stable event name and words. `level` is "info", "warning" or "error"."""

    name: str
    text: str
    level: str = "info"


Effect = (
    Answer
    | AskContribution
    | SendLastCall
    | AbortUpload
    | StartMerge
    | CommitRound
    | CloseRound
    | PublishFragment
    | AnnounceFragment
    | AskInitialParameters
    | CommitInitialParameters
    | DiscardInitialParameters
    | RecoverLearner
    | ExpireLearner
    | DrainLearner
    | PauseLearner
    | ResumeLearner
    | FinishLearner
    | LoadInitialParameters
    | RollBack
    | EndRun
    | ChangePolicy
    | Note
)
