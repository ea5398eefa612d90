"""Moves the rounds of a machine along their table of states and says what the shell shall do.

The decisions are in `quorum.py` and `grace.py`; this is where they take effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoupled_diloco.core import accounts, commits, quorum
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.grace import grace_seconds, median
from decoupled_diloco.core.ids import RoundState, RunPhase, Version
from decoupled_diloco.core.membership import LearnerRecord
from decoupled_diloco.core.quorum import Abandoned, Pending, Ready, View
from decoupled_diloco.core.round import AnswerState, Round

if TYPE_CHECKING:
    from decoupled_diloco.core.syncer import SyncerMachine


class RoundSteps:
    """The rounds' side of one machine."""

    def __init__(self, machine: SyncerMachine) -> None:
        self.machine = machine
        self.step_seconds: float | None = None
        """xi_step: step time of the fastest learner that is live for quorum; the newest known one while nobody is."""

    def refresh(self, view: View) -> None:
        """Takes in who is fastest now."""
        if view.step_seconds is not None:
            self.step_seconds = view.step_seconds

    def advance_all(self, view: View) -> list[fx.Effect]:
        """Lets every round under way go as far as it can, oldest first."""
        effects: list[fx.Effect] = []
        for item in self.machine.rounds.in_order():
            effects += self._advance(item, view)
        return effects

    def _advance(self, item: Round, view: View) -> list[fx.Effect]:
        effects = self._end_stuck_uploads(item, view)
        while True:
            before = item.state
            match item.state:
                case RoundState.OPEN:
                    effects += self._from_open(item, view)
                case RoundState.GRACE:
                    effects += self._from_grace(item, view)
                case RoundState.LAST_CALL:
                    effects += self._from_last_call(item, view)
            if item.state is before or item.state.is_closed:
                return effects

    def explain(self, item: Round, view: View) -> str:
        """Why a round stands where it stands, now. Changes nothing."""
        match item.state:
            case RoundState.OPEN:
                pace_at = self.machine.rounds.pace_at(item, self.step_seconds)
                decision = quorum.leave_open(item, view, self.machine.rounds.previous_left(item), pace_at)
            case RoundState.GRACE:
                decision = quorum.leave_grace(item, view)
            case RoundState.LAST_CALL:
                decision = quorum.leave_last_call(item, view)
            case _:
                return item.reason
        return decision.reason if isinstance(decision, Pending) else item.reason

    def _hold(self, pending: Pending) -> list[fx.Effect]:
        self.machine.wake(pending.wake_at)
        return []

    def _from_open(self, item: Round, view: View) -> list[fx.Effect]:
        rounds = self.machine.rounds
        pace_at = rounds.pace_at(item, self.step_seconds)
        decision = quorum.leave_open(item, view, rounds.previous_left(item), pace_at)
        item.was_held_up = item.was_held_up or view.held is not None or len(view.waitable) < view.quorum()
        if isinstance(decision, Pending):
            return self._hold(decision)
        if isinstance(decision, Abandoned):
            return self._close(item, RoundState.ABANDONED, decision.reason, view.now)
        starts = sorted(answer.started_at for answer in item.started())
        item.quorum_seconds = starts[min(view.quorum(), len(starts)) - 1] - starts[0]
        if item.left_open_at is None:
            self._note_pace(item, view, pace_at)
        item.move(RoundState.GRACE, decision.reason)
        machine = self.machine
        machine.quorum_average.add(item.quorum_seconds)
        item.grace_started_at = view.now
        window = grace_seconds(
            machine.policy, self.step_seconds, machine.quorum_average.get(), machine.sync_average.get()
        )
        item.grace_until = view.now + (0.0 if item.final else window)
        machine.no_slack_rounds = 0 if window > 0.0 or self.step_seconds is None else machine.no_slack_rounds + 1
        return []

    def _note_pace(self, item: Round, view: View, pace_at: float) -> None:
        """Books when the round left OPEN, and what sync interval that amounts to."""
        rounds, policy = self.machine.rounds, self.machine.policy
        steps = item.global_step - rounds.pace_step
        expected = item.final or item.was_held_up
        if self.step_seconds and rounds.pace_target is not None and steps > 0 and not expected:
            took = (view.now - rounds.left_open_at) / self.step_seconds
            self.machine.interval_average.add(policy.interval_steps * took / steps)
        rounds.leave_open(item, pace_at, self.step_seconds, view.now)
        for record in view.live:
            record.paced_on_global_step = item.global_step
            # With the barrier on a learner that has answered makes no step meanwhile.
            running = 0.0 if policy.barrier else record.running_step_share(view.now)
            record.paced_on_local_step = record.progress.local_step + running

    def _from_grace(self, item: Round, view: View) -> list[fx.Effect]:
        decision = quorum.leave_grace(item, view)
        if isinstance(decision, Pending):
            return self._hold(decision)
        policy = self.machine.policy
        item.move(RoundState.LAST_CALL, decision.reason)
        item.grace_end_reason = decision.reason
        item.last_call_at = item.last_call_until = view.now
        silent = list(quorum.silent_learners(item, view))
        if not (policy.last_call or item.final) or not silent:
            return []
        deadlines = policy.deadlines
        # The last rounds of a run have no successor that an answer could be in time for, so they wait longer.
        step = None if item.final else self.step_seconds
        window = min(step or deadlines.last_call_seconds_max, deadlines.last_call_seconds_max)
        item.last_call_until = view.now + max(window, deadlines.last_call_seconds_min)
        item.called = {(record.learner, record.incarnation) for record in silent}
        return [fx.SendLastCall(record.learner, record.incarnation, item.number) for record in silent]

    def _from_last_call(self, item: Round, view: View) -> list[fx.Effect]:
        decision = quorum.leave_last_call(item, view)
        if isinstance(decision, Pending):
            return self._hold(decision)
        for record in quorum.deaf_learners(item, view):
            record.deaf = True
            self.machine.presence.touch()
        heard = [
            learner for learner, _ in sorted(item.called) if learner in item.answers and item.answers[learner].counts
        ]
        if heard:
            item.grace_end_reason = f"the grace window is over; {', '.join(heard[:4])} answered the last call"
        item.called.clear()
        if isinstance(decision, Ready):
            return self._start_merge(item, decision, view.now)
        item.move(RoundState.OPEN, decision.reason)
        item.final = item.final or self.machine.phase is RunPhase.FINISHING
        item.forget_declines()
        return self.machine.contributions.ask_everybody(item)

    def _end_stuck_uploads(self, item: Round, view: View) -> list[fx.Effect]:
        """Ends uploads that stand still or take far too long; until then they count for the quorum."""
        effects: list[fx.Effect] = []
        policy = self.machine.policy
        while (until := quorum.uploads_until(item, policy)) <= view.now:
            moving = [answer for answer in item.started() if answer.state is AnswerState.STARTED]
            answer = next(answer for answer in moving if quorum.upload_deadline(answer, policy) == until)
            answer.state, answer.until, answer.text = AnswerState.FAILED, view.now, "its upload passed its deadline"
            effects.append(fx.AbortUpload(answer.learner, answer.incarnation, item.number, answer.text))
        self.machine.wake(until)
        return effects

    def _start_merge(self, item: Round, decision: Ready, now: float) -> list[fx.Effect]:
        item.move(RoundState.MERGING, f"{item.grace_end_reason}; {decision.reason}")
        item.merging_at = now
        members = item.complete()
        item.upload_seconds = median([answer.received_at - answer.started_at for answer in members])
        policy = self.machine.policy
        merge = fx.StartMerge(
            item.number,
            item.fragment,
            item.base,
            tuple((answer.learner, answer.incarnation, answer.weight) for answer in members),
            policy.outer_learning_rate,
            policy.outer_momentum,
        )
        return [merge]

    # ---- merge and commit --------------------------------------------------------------------------------------------

    def on_merge_event(
        self, event: ev.MergeFinished | ev.MergeFailed | ev.CommitFinished | ev.CommitFailed, now: float
    ) -> list[fx.Effect]:
        """Takes in how a merge or commit ended."""
        item = self.machine.rounds.under_way.get(event.round)
        if item is None or item.state is not RoundState.MERGING:
            return []
        match event:
            case ev.MergeFinished():
                return self._on_merged(item, event, now)
            case ev.CommitFinished(seconds=seconds):
                item.commit_seconds = seconds
                return self._commit(item, now)
            case ev.MergeFailed(reason=reason) | ev.CommitFailed(reason=reason):
                return self._close(item, RoundState.ABANDONED, reason, now)

    def _on_merged(self, item: Round, event: ev.MergeFinished, now: float) -> list[fx.Effect]:
        item.merge_seconds, item.rda_over_avg = event.seconds, event.rda_over_avg
        if not event.finite:
            return self._close(item, RoundState.ABANDONED, "the merged values are not finite; nothing was changed", now)
        version = Version(item.base.timeline, item.base.number + 1, event.digest)
        live = self.machine.membership.live()
        members = {answer.learner for answer in item.complete()}
        item.commit = commits.propose(item, version, self._absentees(item, live, members, now), len(live))
        return [item.commit]

    def _commit(self, item: Round, now: float) -> list[fx.Effect]:
        machine = self.machine
        assert item.commit is not None
        members = item.complete()
        reserved = {answer.learner: answer.reserved_token_count for answer in members}
        step = commits.book(machine, item.commit, reserved)
        for answer in members:
            answer.reserved_token_count = 0
        machine.sync_average.add(item.upload_seconds + (now - item.merging_at) + machine.download_average.get())
        publish = fx.PublishFragment(item.fragment, item.commit.version, step)
        return [publish, *self._close(item, RoundState.COMMITTED, item.reason, now)]

    def _close(self, item: Round, state: RoundState, reason: str, now: float) -> list[fx.Effect]:
        machine = self.machine
        item.move(state, reason)
        live = machine.membership.live()
        item.live_count = len(live)
        committed = item.commit if state is RoundState.COMMITTED else None
        members = committed.members if committed is not None else ()
        absentees = self._absentees(item, live, set(members), now)
        item.absentees = tuple((absentee.learner, absentee.reason) for absentee in absentees)
        machine.rounds.close(item, now)
        if state is RoundState.ABANDONED:
            for answer in item.answers.values():
                accounts.settle_unmerged(machine.ledger, answer, item.fragment)
        for record in live:
            own = item.answers.get(record.learner)
            answered = own is not None and own.counts and own.incarnation == record.incarnation
            if not answered and item.global_step > record.based_on_global_step:
                record.based_on_global_step = item.global_step
                record.based_on_local_step = record.progress.local_step
        is_committed = committed is not None
        return [fx.CloseRound(item.number, item.fragment, is_committed, members, item.global_step, reason, absentees)]

    def _absentees(
        self, item: Round, live: list[LearnerRecord], members: set[str], now: float
    ) -> tuple[fx.Absentee, ...]:
        """Live learners whose contributions are not merged, and those that were refused, with the reason."""
        names = {record.learner for record in live} | {
            answer.learner for answer in item.answers.values() if answer.state is AnswerState.REJECTED
        }
        return tuple(self._absentee(item, name, now) for name in sorted(names - members))

    def _absentee(self, item: Round, learner: str, now: float) -> fx.Absentee:
        answer = item.answers.get(learner)
        refused = answer is not None and answer.state is AnswerState.REJECTED
        return fx.Absentee(learner, self._why_absent(item, learner, now), answer.fate if refused and answer else None)

    def _why_absent(self, item: Round, learner: str, now: float) -> str:
        answer = item.answers.get(learner)
        if answer is not None and (answer.text or answer.counts):
            return answer.text or "its contribution was not merged"
        record = self.machine.membership.learners[learner]
        state, text = record.state(self.machine.policy, now)
        if not record.attached:
            return "its control stream is down"
        if learner not in item.asked:
            return f"it was not asked ({state.value})"
        return f"it had not answered ({text or state.value})"

    def abandon_all(self, reason: str, now: float) -> list[fx.Effect]:
        """Ends every round that is not merging."""
        effects: list[fx.Effect] = []
        for item in self.machine.rounds.in_order():
            if item.state is not RoundState.MERGING:
                item.state = RoundState.OPEN
                effects += [
                    fx.AbortUpload(answer.learner, answer.incarnation, item.number, reason)
                    for answer in item.started()
                    if answer.state is AnswerState.STARTED
                ]
                effects += self._close(item, RoundState.ABANDONED, reason, now)
        return effects
