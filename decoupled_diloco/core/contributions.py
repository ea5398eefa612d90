"""Asks and answers: what learners are asked for, and what becomes of each contribution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from decoupled_diloco.core import accounts
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Decline, Fate, Role, RoundState
from decoupled_diloco.core.membership import LearnerRecord
from decoupled_diloco.core.quorum import upload_seconds_max
from decoupled_diloco.core.round import AnswerState, Round, RoundAnswer
from decoupled_diloco.core.schedule import due_local_step

if TYPE_CHECKING:
    from decoupled_diloco.core.syncer import SyncerMachine


class Contributions:
    """The contributions' side of one machine."""

    def __init__(self, machine: SyncerMachine) -> None:
        self.machine = machine

    def on_bytes_moved(self, record: LearnerRecord, round_number: int | None, now: float) -> None:
        """A transfer is alive."""
        item = self.machine.rounds.under_way.get(round_number or 0)
        answer = item.answers.get(record.learner) if item else None
        if answer is not None and answer.incarnation == record.incarnation:
            answer.moved_at = now

    def on_started(self, event: ev.ContributionStarted, now: float) -> list[fx.Effect]:
        """A header arrived: admit or refuse it."""
        header = event.header
        refusal = self.machine.admissions.admits(header.learner, header.incarnation)
        if refusal is not None:
            return [fx.Answer(event.request, fx.Admission(Fate.STALE_INCARNATION, refusal.text))]
        record = self.machine.membership.learners[header.learner]
        if record.role is not Role.LEARNER:
            text = f"{header.learner} is an {record.role}; it contributes nothing"
            return [fx.Answer(event.request, fx.Admission(Fate.STALE_INCARNATION, text))]
        effects = self.machine.admissions.hear(record, now)
        policy, step_seconds = self.machine.policy, self.machine.fastest_step
        longest = upload_seconds_max(record, policy, step_seconds)
        admission = self.machine.rounds.admit(header, record.slot, longest, now)
        effects.append(fx.Answer(event.request, admission))
        if admission.fate is Fate.ACCEPTED and not admission.known:
            accounts.see_tokens(self.machine.ledger, record, header.total_token_count)
            step = self.machine.rounds.under_way[header.round].global_step
            if step > record.based_on_global_step:
                record.based_on_global_step, record.based_on_local_step = step, header.local_step
        if admission.fate is Fate.NONFINITE and not admission.known:
            effects += self._recover(record, admission.text)
        return effects

    def on_received(self, event: ev.ContributionReceived, now: float) -> list[fx.Effect]:
        """A whole contribution arrived: accept or refuse it."""
        record = self.machine.membership.get(event.learner, event.incarnation)
        if record is None:
            return [fx.Answer(event.request, Fate.STALE_INCARNATION)]
        effects = self.machine.admissions.hear(record, now)
        item = self.machine.rounds.under_way.get(event.round)
        average = self.machine.norm_averages[item.fragment] if item else None
        limit = self.machine.policy.norm_outlier_factor * average.get() if average else 0.0
        known = (event.learner, event.incarnation, event.round) in self.machine.rounds.fates
        fate = self.machine.rounds.receive(event, limit, now)
        effects.append(fx.Answer(event.request, fate))
        if fate is Fate.ACCEPTED and item is not None and average is not None and not known:
            average.add(event.norm)
            answer = item.answers[event.learner]
            record.upload_seconds = [*record.upload_seconds[-8:], answer.received_at - answer.started_at]
        if fate is Fate.NONFINITE and not known:
            effects += self._recover(record, f"round {event.round}: {event.problem or 'values that are not finite'}")
        return effects

    def _recover(self, record: LearnerRecord, reason: str) -> list[fx.Effect]:
        if record.recovering:
            return []
        record.recovering, record.applied = True, {}
        peers = self.machine.admissions.peers_for(record)
        effects: list[fx.Effect] = [fx.RecoverLearner(record.learner, record.incarnation, reason, peers)]
        effects += self.machine.admissions.cut_uploads(record, keep_complete=True, reason="its learner recovers")
        return [*effects, fx.Note("learner_recovers", f"{record.learner} recovers: {reason}", "warning")]

    def on_failed(self, event: ev.ContributionFailed, record: LearnerRecord) -> list[fx.Effect]:
        """An upload broke; it may come again.

        The learner is asked again: it may have given the upload up, because it has seen that this syncer was started
        anew. To one that goes on uploading the ask says nothing new.
        """
        item = self.machine.rounds.under_way.get(event.round)
        answer = item.answers.get(record.learner) if item else None
        if item is None or answer is None or answer.incarnation != record.incarnation:
            return []
        if answer.state is not AnswerState.STARTED:
            return []
        answer.state, answer.text, answer.fate = AnswerState.FAILED, event.reason, event.fate
        return self.ask(item, record)

    def on_declined(self, event: ev.ContributionDeclined, record: LearnerRecord) -> None:
        """A learner has nothing for a round. One whose own values cannot be merged recovers without being told."""
        if event.reason is Decline.NONFINITE:
            record.recovering, record.applied = True, {}
        item = self.machine.rounds.under_way.get(event.round)
        if item is None or item.has_answered(record.learner, record.incarnation):
            return
        text = {
            "no_copy": "it has no copy of the round's base version yet",
            "zero_steps": "it made no step since it received the fragment",
            "nonfinite": "its own values are not finite, or too large",
        }[event.reason.value]
        answer = RoundAnswer(record.learner, record.incarnation, AnswerState.DECLINED, text)
        if event.reason is Decline.NONFINITE:
            answer.state, answer.fate = AnswerState.REJECTED, Fate.NONFINITE
        item.answers[record.learner] = answer

    def on_applied(self, event: ev.FragmentApplied, record: LearnerRecord) -> list[fx.Effect]:
        """A learner holds a new version; the last one ends its recovery.

        What it declined for want of a copy of this version it may answer now. It says so itself where it recovers by
        itself, from versions that it holds, which takes no longer than a step.
        """
        if not 0 <= event.fragment < self.machine.policy.fragment_count:
            return []
        record.applied[event.fragment] = event.version
        if record.role is Role.LEARNER:
            cause = self.machine.newest_results[event.fragment].get(record.learner, "absent")
            pending = self.machine.rounds.pending(record.learner, record.incarnation).get(event.fragment)
            cause = "rejected" if record.recovering else cause
            accounts.settle_applied(self.machine.ledger, record, event, cause, pending)
        if event.download_seconds is not None and 0.0 <= event.download_seconds < math.inf:
            self.machine.download_average.add(event.download_seconds)
        if record.recovering and len(record.applied) == self.machine.policy.fragment_count:
            record.recovering = False
            record.rebase(self.machine.rounds.newest_closed_step, event.local_step)
            for item in self.machine.rounds.in_order():
                item.forget_declines(record.learner)
            return [effect for item in self.machine.rounds.in_order() for effect in self.ask(item, record)]
        effects: list[fx.Effect] = []
        for item in self.machine.rounds.in_order():
            is_base = (item.fragment, item.base) == (event.fragment, event.version)
            if is_base and item.state in (RoundState.OPEN, RoundState.GRACE) and item.has_declined(record.learner):
                item.forget_declines(record.learner)
                effects += self.ask(item, record)
        return effects

    def ask_everybody(self, item: Round) -> list[fx.Effect]:
        """The asks for a round to all who can answer it and have not, by id."""
        in_flight = self.machine.rounds_in_flight_max()
        return [effect for record in self.machine.membership.live() for effect in self.ask(item, record, in_flight)]

    def ask(self, item: Round, record: LearnerRecord, in_flight: int | None = None) -> list[fx.Effect]:
        """The ask for a round, if the learner can answer it and has not. `in_flight`: F, where it is known already."""
        if item.state not in (RoundState.OPEN, RoundState.GRACE) or not record.can_answer():
            return []
        if item.has_answered(record.learner, record.incarnation):
            return []
        return [self.ask_effect(item, record, self.machine.rounds_in_flight_max() if in_flight is None else in_flight)]

    def ask_effect(self, item: Round, record: LearnerRecord, in_flight: int) -> fx.AskContribution:
        """The ask for a round, with the local step at which it is due.

        That counts from the round that the learner answered last, but not from before the newest round left OPEN: who
        answers early is not due early again, or its lead, and with it what the overlap costs, would grow for ever.
        """
        item.asked.add(record.learner)
        fastest = self.machine.fastest_step
        # Behind a barrier everybody makes the same steps, whatever they take.
        own = None if self.machine.policy.barrier else record.step_seconds()
        ratio = min(1.0, fastest / own) if fastest and own else 1.0
        answered = due_local_step(record.based_on_local_step, item.global_step, record.based_on_global_step, ratio)
        paced = due_local_step(record.paced_on_local_step, item.global_step, record.paced_on_global_step, ratio)
        due = 0 if item.final else max(answered, paced)
        return fx.AskContribution(
            record.learner,
            record.incarnation,
            item.number,
            item.fragment,
            item.base,
            item.global_step,
            due,
            ratio,
            in_flight,
        )
