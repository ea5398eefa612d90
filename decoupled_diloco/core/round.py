"""The life of a round.

    state       leaves when                                               to
    ---------   -------------------------------------------------------   ---------------------------------
    OPEN        K contributions have started, and the pace allows it      GRACE
                fewer than K can be merged: contributions were refused,   ABANDONED
                or the run finishes, and nobody else can contribute
    GRACE       the grace window is over, or every learner that is live   LAST_CALL
                for quorum has answered
    LAST_CALL   every started contribution is complete, failed or past    MERGING, or OPEN with fewer than K
                its deadline, and the call was answered or ran out
    MERGING     merge and commit are done                                 COMMITTED
                they failed, or the result is not finite                  ABANDONED, nothing changed

K counts *started* contributions, so that quorum is not a race of uploads. What a learner did for a round is its
`Answer`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.events import ContributionHeader
from decoupled_diloco.core.ids import Fate, RoundState, Version
from decoupled_diloco.core.status import MemberStatus, RoundStatus
from decoupled_diloco.core.weights import contribution_weight

TRANSITIONS: dict[RoundState, frozenset[RoundState]] = {
    RoundState.OPEN: frozenset({RoundState.GRACE, RoundState.ABANDONED}),
    RoundState.GRACE: frozenset({RoundState.LAST_CALL}),
    RoundState.LAST_CALL: frozenset({RoundState.MERGING, RoundState.OPEN}),
    RoundState.MERGING: frozenset({RoundState.COMMITTED, RoundState.ABANDONED}),
    RoundState.COMMITTED: frozenset(),
    RoundState.ABANDONED: frozenset(),
}
"""The table above, enforced on every change of state."""


class AnswerState(StrEnum):
    """Where one learner's answer to a round stands."""

    STARTED = "started"
    COMPLETE = "complete"
    FAILED = "failed"
    """The upload broke; the same contribution may come again while the round takes any."""
    DECLINED = "declined"
    REJECTED = "rejected"


@dataclass(slots=True)
class RoundAnswer:
    """What one learner did for a round."""

    learner: str
    incarnation: int
    state: AnswerState
    text: str = ""
    header: ContributionHeader | None = None
    started_at: float = 0.0
    moved_at: float = 0.0
    """When its bytes last moved."""
    received_at: float = 0.0
    until: float = math.inf
    """When the whole upload has failed, however its bytes move."""
    norm: float = 0.0
    fate: Fate = Fate.ACCEPTED
    slot: int = -1
    """Data slot of the learner when it sent the header."""
    reserved_token_count: int = 0
    """Tokens that are merged if the round commits and discarded if it does not, because the learner's own account of
    them is closed: the incarnation is over, or it has started over from published versions."""
    reserved_cause: str = ""

    @property
    def counts(self) -> bool:
        """Whether it counts for quorum: started and not failed."""
        return self.state in (AnswerState.STARTED, AnswerState.COMPLETE)

    @property
    def weight(self) -> float:
        """w_m of the contribution."""
        assert self.header is not None
        return contribution_weight(self.header.token_count, self.header.step_count)


@dataclass(slots=True)
class Round:
    """One round under way."""

    number: int
    fragment: int
    base: Version
    global_step: int
    opened_at: float
    final: bool = False
    """One of the last rounds of a finishing run: no pace, everybody answers at once."""
    state: RoundState = RoundState.OPEN
    reason: str = ""
    answers: dict[str, RoundAnswer] = field(default_factory=dict)
    """By learner; the newest incarnation's."""
    asked: set[str] = field(default_factory=set)
    called: set[tuple[str, int]] = field(default_factory=set)
    """Learners and incarnations that were sent the last call."""
    grace_end_reason: str = ""
    left_open_at: float | None = None
    quorum_seconds: float = 0.0
    grace_started_at: float = 0.0
    grace_until: float = 0.0
    last_call_at: float = 0.0
    last_call_until: float = 0.0
    merging_at: float = 0.0
    merge_seconds: float = 0.0
    commit_seconds: float = 0.0
    upload_seconds: float = 0.0
    rda_over_avg: float = 0.0
    commit: CommitRound | None = None
    """What is being made durable, once the merge is done."""
    closed_at: float = 0.0
    absentees: tuple[tuple[str, str], ...] = ()
    live_count: int = 0
    was_held_up: bool = False
    """It waited because too few learners were live, or the run was paused: its interval says nothing of the pace."""

    def move(self, state: RoundState, reason: str) -> None:
        """Changes state along the table.

        Raises:
            ValueError: the table has no such change; a fault of this program.
        """
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"round {self.number} cannot go from {self.state} to {state}")
        self.state, self.reason = state, reason

    def started(self) -> list[RoundAnswer]:
        """Answers that count for quorum, by learner id."""
        return [self.answers[name] for name in sorted(self.answers) if self.answers[name].counts]

    def started_count(self) -> int:
        """How many they are."""
        counting = (AnswerState.STARTED, AnswerState.COMPLETE)
        return sum(answer.state in counting for answer in self.answers.values())

    def complete(self) -> list[RoundAnswer]:
        """Whole and verified contributions, by learner id: the fixed order of the merge."""
        answers = self.answers
        return [answers[name] for name in sorted(answers) if answers[name].state is AnswerState.COMPLETE]

    def has_answered(self, learner: str, incarnation: int) -> bool:
        """Whether nothing more is to be expected of this learner.

        A failed upload may come again: not answered. A whole contribution stays the learner's answer when a later
        incarnation has taken over.
        """
        answer = self.answers.get(learner)
        if answer is None or answer.state is AnswerState.FAILED:
            return False
        return answer.incarnation == incarnation or answer.state is AnswerState.COMPLETE

    def takes_contributions(self, now: float) -> bool:
        """Whether a contribution may start."""
        if self.state is RoundState.LAST_CALL:
            return now <= self.last_call_until
        return self.state in (RoundState.OPEN, RoundState.GRACE)

    def is_spoiled(self) -> bool:
        """Whether a contribution was refused for what it held, so that fewer may be left than the quorum needs."""
        return any(answer.state is AnswerState.REJECTED for answer in self.answers.values())

    def has_declined(self, learner: str) -> bool:
        """Whether a learner has said that it has nothing."""
        answer = self.answers.get(learner)
        return answer is not None and answer.state is AnswerState.DECLINED

    def forget_declines(self, learner: str | None = None) -> None:
        """Lets those that had nothing be asked again: the one learner, or all."""
        for name in [name for name, answer in self.answers.items() if answer.state is AnswerState.DECLINED]:
            if learner is None or name == learner:
                del self.answers[name]

    def status(self, now: float, reason: str | None = None) -> RoundStatus:
        """A read-only snapshot. `reason`: why it stands where it stands, if that is known better by now."""
        members = self.complete() if self.state in (RoundState.MERGING, RoundState.COMMITTED) else self.started()
        weights = [answer.weight for answer in members]
        total = sum(weights) or 1.0
        shown = []
        for answer, weight in zip(members, weights, strict=True):
            header = answer.header
            assert header is not None
            shown.append(MemberStatus(answer.learner, weight / total, header.token_count, header.step_count))
        grace_end = self.last_call_at or (now if self.state is RoundState.GRACE else self.grace_started_at)
        last_call_end = self.merging_at or (now if self.state is RoundState.LAST_CALL else self.last_call_at)
        return RoundStatus(
            round=self.number,
            fragment=self.fragment,
            global_step=self.global_step,
            state=self.state,
            reason=self.reason if reason is None else reason,
            members=tuple(shown),
            absentees=self.absentees,
            live_count=self.live_count,
            quorum_seconds=self.quorum_seconds,
            grace_seconds=max(0.0, grace_end - self.grace_started_at),
            last_call_seconds=max(0.0, last_call_end - self.last_call_at),
            merge_seconds=self.merge_seconds,
            commit_seconds=self.commit_seconds,
            rda_over_avg=self.rda_over_avg,
            version=self.commit.version if self.commit is not None else None,
            opened_at=self.opened_at,
            closed_at=self.closed_at,
        )
