"""When a round goes on: pure functions from what is known to a decision with its reason ("not yet" is one too)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from decoupled_diloco.core.grace import median
from decoupled_diloco.core.membership import LearnerRecord
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.presence import Presence
from decoupled_diloco.core.round import AnswerState, Round, RoundAnswer


@dataclass(frozen=True, slots=True)
class Pending:
    """Not yet.

    `wake_at`: the instant at which to ask again even if nothing happens; None: only an event can change it.
    `words` gives the reason; decisions are made far more often than anybody reads why nothing happens yet.
    """

    words: Callable[[], str]
    wake_at: float | None = None

    @property
    def reason(self) -> str:
        """Why not yet."""
        return self.words()


@dataclass(frozen=True, slots=True)
class Ready:
    """Go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reopen:
    """Back to OPEN: more contributions are needed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """It cannot come to anything."""

    reason: str


Decision = Pending | Ready | Reopen | Abandoned


@dataclass(frozen=True, slots=True)
class View:
    """What the decisions look at: one instant of the run."""

    policy: Policy
    now: float
    live: tuple[LearnerRecord, ...]
    """Learners with a lease."""
    waitable: tuple[LearnerRecord, ...]
    """Learners that are live for quorum."""
    waitable_names: frozenset[str]
    step_seconds: float | None
    """xi_step."""
    held: str | None = None
    """Why no round leaves OPEN, whoever has started."""

    @staticmethod
    def of(policy: Policy, now: float, presence: Presence, held: str | None = None) -> View:
        """One view for all rounds."""
        return View(policy, now, presence.live, presence.waitable, presence.waitable_names, presence.step_seconds, held)

    def quorum(self) -> int:
        """K in force: the policy's, or less where it may degrade."""
        if self.policy.below_quorum == "degrade":
            return max(1, min(self.policy.quorum_minimum, len(self.waitable)))
        return self.policy.quorum_minimum

    def degraded(self) -> str:
        """Words that say so while the quorum is lower than the policy's; else empty."""
        if self.quorum() == self.policy.quorum_minimum:
            return ""
        return f" (quorum degraded from {self.policy.quorum_minimum} to {self.quorum()}: too few are live)"


def leave_open(item: Round, view: View, previous_left: bool, pace_at: float) -> Decision:
    """OPEN -> GRACE: quorum has started, and the pace (`pace_at`) allows it."""
    held = view.held
    if held is not None:
        return Pending(lambda: held)
    wanted, started = view.quorum(), item.started_count()
    if started < wanted:
        return _below_quorum(item, view, started, wanted)
    if not previous_left:
        return Pending(lambda: f"{started} have started; the round before it goes first")
    if view.now < pace_at and not item.final:
        wait = f"the pace of the fastest learner allows it in {pace_at - view.now:.3f} s"
        return Pending(lambda: f"{started} have started; {wait}", pace_at)
    return Ready(f"{started} of {wanted} required learners have started{view.degraded()}")


def _below_quorum(item: Round, view: View, started: int, wanted: int) -> Decision:
    if (item.final or item.is_spoiled()) and not any(_may_still_answer(item, record) for record in view.live):
        if item.final:
            text = "the run finishes and only {} of {} required learners have anything for this fragment"
        else:
            text = f"only {{}} of {{}} required contributions can be merged; refused: {_refused(item)}"
        return Abandoned(text.format(started, wanted))
    return Pending(lambda: _why_below_quorum(item, view, started, wanted))


def _why_below_quorum(item: Round, view: View, started: int, wanted: int) -> str:
    if not view.live:
        return f"no learners: waiting for {wanted} to join"
    if len(view.waitable) < wanted and not item.final:
        return f"only {len(view.waitable)} of {wanted} required learners are live{_names_of_others(view)}"
    missing = [record for record in view.waitable if not item.has_answered(record.learner, record.incarnation)]
    waiting = ", ".join(_describe(record, view.now) for record in missing[:4]) or "a learner that can answer"
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    return f"{started} of {wanted} required learners have started; waiting for {waiting}{more}"


def _may_still_answer(item: Round, record: LearnerRecord) -> bool:
    if record.recovering or not record.has_lease():
        return False
    return not item.has_answered(record.learner, record.incarnation)


def _refused(item: Round) -> str:
    refused = [answer for _, answer in sorted(item.answers.items()) if answer.state is AnswerState.REJECTED]
    return ", ".join(f"{answer.learner} ({answer.text})" for answer in refused[:4])


def _names_of_others(view: View) -> str:
    others = [record for record in view.live if record.learner not in view.waitable_names][:4]
    described = ", ".join(f"{record.learner} {record.state(view.policy, view.now)[0].value}" for record in others)
    return f" ({described})" if described else ""


def _describe(record: LearnerRecord, now: float) -> str:
    step = record.step_seconds()
    age = record.running_step_seconds(now)
    if not step or not age:
        return record.learner
    return f"{record.learner}, step {min(99, int(100 * age / step))} % done"


def leave_grace(item: Round, view: View) -> Decision:
    """GRACE -> LAST_CALL: the window is over, or everybody who may be waited for has answered."""
    first = next(silent_learners(item, view), None)
    if first is None:
        return Ready("every live learner has answered")
    if view.now >= item.grace_until:
        names = ", ".join(record.learner for record in islice(silent_learners(item, view), 4))
        return Ready(f"the grace window is over; without an answer: {names}")
    return Pending(lambda: _why_grace(item, view), item.grace_until)


def _why_grace(item: Round, view: View) -> str:
    names = ", ".join(_describe(record, view.now) for record in islice(silent_learners(item, view), 4))
    return f"grace window for {names}, {item.grace_until - view.now:.3f} s left"


def silent_learners(item: Round, view: View) -> Iterator[LearnerRecord]:
    """Learners that may be waited for and have neither started, declined nor been refused; by id."""
    for record in view.live:
        may_be_waited_for = record.learner in view.waitable_names or (item.final and record.can_answer())
        if may_be_waited_for and not item.has_answered(record.learner, record.incarnation):
            yield record


def deaf_learners(item: Round, view: View) -> list[LearnerRecord]:
    """Learners that were sent the last call and have not answered it."""
    if not item.called:
        return []
    return [record for record in silent_learners(item, view) if (record.learner, record.incarnation) in item.called]


def leave_last_call(item: Round, view: View) -> Decision:
    """LAST_CALL -> MERGING: the call was answered or ran out, and no started upload is still moving."""
    if view.now < item.last_call_until and (silent := deaf_learners(item, view)):
        return Pending(lambda: f"last call to {', '.join(r.learner for r in silent[:4])}", item.last_call_until)
    if (until := uploads_until(item, view.policy)) < math.inf:
        return Pending(lambda: f"uploads under way: {', '.join(_moving(item)[:4])}", until)
    complete = item.started_count()
    if complete < view.quorum():
        return Reopen(f"only {complete} of {view.quorum()} required contributions are complete")
    return Ready(f"{complete} complete{view.degraded()}")


def _moving(item: Round) -> list[str]:
    return [answer.learner for answer in item.started() if answer.state is AnswerState.STARTED]


def upload_deadline(answer: RoundAnswer, policy: Policy) -> float:
    """The instant at which a started upload has failed: no bytes for some seconds, or far too long in all."""
    return min(answer.moved_at + policy.deadlines.upload_idle_seconds, answer.until)


def uploads_until(item: Round, policy: Policy) -> float:
    """The instant at which the first of the uploads under way will have failed; infinite if there are none."""
    moving = [answer for answer in item.answers.values() if answer.state is AnswerState.STARTED]
    return min((upload_deadline(answer, policy) for answer in moving), default=math.inf)


def upload_seconds_max(record: LearnerRecord, policy: Policy, step_seconds: float | None) -> float:
    """How long a learner's whole upload may take: some seconds, tau steps, or four times its median upload."""
    return max(
        policy.deadlines.upload_seconds_min,
        policy.overlap_steps * (step_seconds or 0.0),
        4.0 * median(record.upload_seconds),
    )
