"""Coming, being heard, and going: joins, attaches, reports, goodbyes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from decoupled_diloco.core import accounts
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity, Role, RoundState, RunPhase
from decoupled_diloco.core.membership import LearnerRecord
from decoupled_diloco.core.round import Round

if TYPE_CHECKING:
    from decoupled_diloco.core.syncer import SyncerMachine

PEERS_MAX = 4
"""Peers named to a recovering learner."""


def _sane(progress: ev.Progress) -> ev.Progress:
    """A report without durations that cannot be."""
    step, running = progress.step_seconds, progress.running_step_seconds
    good_step = step if step is not None and 0.0 < step < math.inf else None
    good_running = running if running is not None and 0.0 <= running < math.inf else None
    if good_step is step and good_running is running and all(0.0 <= s < math.inf for _, s in progress.spans):
        return progress
    spans = tuple((activity, seconds) for activity, seconds in progress.spans if 0.0 <= seconds < math.inf)
    return replace(progress, step_seconds=good_step, running_step_seconds=good_running, spans=spans)


class Admissions:
    """The membership's side of one machine."""

    def __init__(self, machine: SyncerMachine) -> None:
        self.machine = machine

    def admits(self, learner: str, incarnation: int) -> fx.Refusal | None:
        """Whether a call of this incarnation is welcome; the reason if it is not."""
        record = self.machine.membership.learners.get(learner)
        if record is None or record.left:
            return fx.Refusal("NOT_JOINED", f"{learner} is not registered in this run; join (again)")
        if record.must_join_again:
            return fx.Refusal("NOT_JOINED", f"{record.must_join_again}; join again")
        if record.incarnation != incarnation:
            text = f"incarnation {incarnation} of {learner} was replaced by incarnation {record.incarnation}"
            return fx.Refusal("STALE_INCARNATION", text)
        return None

    def on_join(self, event: ev.JoinRequested, now: float) -> list[fx.Effect]:
        """A learner or observer wants in; a known id gets a new incarnation."""
        refusal = self._refuse_join(event)
        if refusal is not None:
            return [fx.Answer(event.request, refusal)]
        effects = self._take_over(event, now)
        if self._is_full(event):
            text = f"the run takes at most {self.machine.policy.learners_max} learners"
            return [*effects, fx.Answer(event.request, fx.Refusal("TOO_MANY_LEARNERS", text))]
        old = self.machine.membership.learners.get(event.learner)
        if old is not None and not old.left:
            effects += self._replace(old, now)
        record = self.machine.membership.admit(event.learner, event.role, now)
        if old is not None and not old.left and old.role is Role.LEARNER:
            record.gap_seconds = max(0.0, now - old.heard_at)
        record.peer_address, record.software_version = event.peer_address, event.software_version
        record.rebase(self.machine.rounds.newest_closed_step, 0)
        redone = 0
        if record.role is Role.LEARNER:
            cursor = max(record.cursor, self.machine.rounds.pending_cursor(record.slot))
            redone = self.machine.membership.begin(record, cursor)
            self.machine.ledger.redone_step_count += redone
        answer = fx.Admitted(
            learner=record.learner,
            incarnation=record.incarnation,
            role=record.role,
            slot=record.slot,
            cursor=record.cursor,
            global_step=self.machine.global_step,
            versions=self.machine.published(),
            paused=self.machine.steering.pause_reason is not None,
            initialized=bool(self.machine.versions),
            peers=self.peers_for(record),
        )
        place = f"slot {record.slot}, cursor {record.cursor}" if record.role is Role.LEARNER else record.role
        text = f"{record.learner} joined as incarnation {record.incarnation}, {place}"
        text += f"; redoes {redone} steps that were not merged" if redone else ""
        return [*effects, fx.Answer(event.request, answer), fx.Note("learner_joined", text)]

    def peers_for(self, record: LearnerRecord) -> tuple[tuple[str, str], ...]:
        """Whom a recovering learner may ask for optimizer state: who is live for quorum and serves peers."""
        if record.role is not Role.LEARNER:
            return ()
        donors = [
            donor
            for donor in self.machine.presence.waitable
            if donor.peer_address and donor.learner != record.learner and donor.has_lease()
        ]
        donors.sort(key=lambda donor: (-donor.newest_merged_round, donor.learner))
        return tuple((donor.learner, donor.peer_address) for donor in donors[:PEERS_MAX])

    def _take_over(self, event: ev.JoinRequested, now: float) -> list[fx.Effect]:
        """Frees the slot of one learner that is gone for good, for a learner that needs one; fences the former."""
        if event.role is not Role.LEARNER or not self._is_new(event.learner):
            return []
        gone = [r for r in self.machine.membership.with_role() if r.is_gone_for_good(self.machine.policy, now)]
        if not gone:
            return []
        record = min(gone, key=lambda r: r.slot)
        return self.depart(record, f"it was gone for good; {event.learner} takes its slot {record.slot} over", "died")

    def _is_new(self, learner: str) -> bool:
        known = self.machine.membership.learners.get(learner)
        return known is None or known.left or known.role is not Role.LEARNER

    def _refuse_join(self, event: ev.JoinRequested) -> fx.Refusal | None:
        evicted = self.machine.membership.evicted.get(event.learner)
        if evicted is not None:
            text = f"an operator evicted {event.learner} ({evicted}); it may join again once it is readmitted"
            return fx.Refusal("EVICTED", text)
        if self.machine.steering.is_rolling_back:
            return fx.Refusal("NOT_READY", "the run is being rolled back; call again")
        if self.machine.phase is RunPhase.FINISHED or (
            self.machine.phase is RunPhase.FINISHING and event.role is Role.LEARNER
        ):
            return fx.Refusal("RUN_FINISHED", f"the run has finished: {self.machine.steering.finish_reason}")
        return None

    def _is_full(self, event: ev.JoinRequested) -> bool:
        count, most = self.machine.membership.registered_count(), self.machine.policy.learners_max
        return self._is_new(event.learner) and event.role is Role.LEARNER and count >= most

    def _replace(self, old: LearnerRecord, now: float) -> list[fx.Effect]:
        """A new incarnation fences the old one at once; its steps will be redone from the committed cursor."""
        reason = "replaced by a new incarnation"
        effects = self.cut_uploads(old, keep_complete=False, reason=reason)
        if old.role is Role.LEARNER:
            pending = self.machine.rounds.pending(old.learner, old.incarnation)
            accounts.settle_gone(self.machine.ledger, old, pending, "died")
        effects.append(fx.ExpireLearner(old.learner, old.incarnation, reason))
        return effects + self.machine.initial.discard(old, reason)

    def cut_uploads(self, record: LearnerRecord, keep_complete: bool, reason: str) -> list[fx.Effect]:
        """Ends what an incarnation has under way (see `Rounds.drop_incarnation`)."""
        dropped = self.machine.rounds.drop_incarnation(record.learner, record.incarnation, keep_complete, reason)
        for item, answer in dropped:
            accounts.settle_unmerged(self.machine.ledger, answer, item.fragment)
        return [fx.AbortUpload(record.learner, record.incarnation, item.number, reason) for item, _ in dropped]

    def hear(self, record: LearnerRecord, now: float) -> list[fx.Effect]:
        """A sign of life."""
        effects: list[fx.Effect] = []
        if record.lost:
            record.lost = False
            text = f"{record.learner} is back after {now - record.heard_at:.1f} s"
            effects.append(fx.Note("learner_back", text))
        silence = now - record.heard_at
        if silence > self.machine.policy.deadlines.stall_seconds:
            record.gap_seconds += silence
        record.heard_at, record.deaf = now, False
        return effects

    def on_attached(self, event: ev.LearnerAttached, record: LearnerRecord, now: float) -> list[fx.Effect]:
        """A control stream is up: repeat what still holds."""
        effects = self.hear(record, now)
        record.attached, record.awaited = True, False
        count = self.machine.policy.fragment_count
        record.applied = {fragment: version for fragment, version in event.applied if 0 <= fragment < count}
        record.recovering = record.role is Role.LEARNER and len(record.applied) < count
        record.rated_from = now
        self.take_progress(record, event.progress, now)
        record.tokens_per_second = 0.0  # what it made while nobody heard it is no rate of now
        record.rebase(self.machine.rounds.newest_closed_step, record.progress.local_step)
        return effects + self._repeat(record, now)

    def _repeat(self, record: LearnerRecord, now: float) -> list[fx.Effect]:
        """Everything that still holds, for a stream that has just come up."""
        name, incarnation = record.learner, record.incarnation
        effects: list[fx.Effect] = []
        for fragment, version, step in self.machine.published():
            if record.applied.get(fragment) != version:
                effects.append(fx.AnnounceFragment(name, incarnation, fragment, version, step))
        if self.machine.phase is RunPhase.FINISHED:
            effects.append(
                fx.FinishLearner(name, incarnation, self.machine.steering.finish_reason or "", self.machine.global_step)
            )
            return effects
        if self.machine.initial.asked == (name, incarnation):
            effects.append(fx.AskInitialParameters(name, incarnation))
        if self.machine.steering.pause_reason is not None:
            effects.append(fx.PauseLearner(name, incarnation, self.machine.steering.pause_reason))
        if self.machine.phase is RunPhase.FINISHING and record.role is Role.LEARNER:
            effects.append(fx.DrainLearner(name, incarnation, self.machine.steering.finish_reason or "", leave=False))
        elif record.draining and record.role is Role.LEARNER:
            effects.append(fx.DrainLearner(name, incarnation, record.drain_reason, leave=True))
        for item in self.machine.rounds.in_order():
            item.forget_declines(name)
            effects += self.machine.contributions.ask(item, record)
            effects += self._call_again(item, record, now)
        return effects

    def _call_again(self, item: Round, record: LearnerRecord, now: float) -> list[fx.Effect]:
        """The last call of a round that is still waiting for answers to it."""
        name, incarnation = record.learner, record.incarnation
        waiting = item.state is RoundState.LAST_CALL and now < item.last_call_until
        if not waiting or not record.can_answer() or item.has_answered(name, incarnation):
            return []
        item.called.add((name, incarnation))
        ask = self.machine.contributions.ask_effect(item, record, self.machine.rounds_in_flight_max())
        return [ask, fx.SendLastCall(name, incarnation, item.number)]

    def take_progress(self, record: LearnerRecord, progress: ev.Progress, now: float) -> None:
        """Takes a report in."""
        progress = _sane(progress)
        accounts.book_progress(self.machine.ledger, record, progress, now - self.machine.started_at)
        record.rate(progress.token_count - record.progress.token_count, now)
        record.progress, record.progress_at = progress, now
        if record.role is Role.LEARNER:
            self.machine.membership.reach(record)
        if progress.activity is Activity.DRAINING and not record.draining:
            record.draining, record.drain_reason = True, "it is leaving"
        if progress.loss is not None and math.isfinite(progress.loss):
            record.loss = progress.loss

    def on_left(self, event: ev.LearnerLeft, now: float) -> list[fx.Effect]:
        """A learner is gone for good; its whole contributions stay."""
        record = self.machine.membership.get(event.learner, event.incarnation)
        if record is None:
            return [fx.Answer(event.request, None)]
        return [fx.Answer(event.request, None), *self.depart(record, event.reason, "left")]

    def depart(self, record: LearnerRecord, reason: str, cause: str) -> list[fx.Effect]:
        """Takes a learner off the run; `cause` says what its open tokens are booked under."""
        effects = self.cut_uploads(record, keep_complete=True, reason="the learner left")
        if record.role is Role.LEARNER:
            pending = self.machine.rounds.pending(record.learner, record.incarnation)
            accounts.settle_gone(self.machine.ledger, record, pending, cause)
        record.left, record.left_reason, record.attached = True, reason, False
        effects += self.machine.initial.discard(record, "the learner left")
        effects.append(fx.ExpireLearner(record.learner, record.incarnation, reason))
        return [*effects, fx.Note("learner_left", f"{record.learner} left: {reason}")]
