"""The syncer's machine: every decision of the protocol, and nothing else.

`handle(event, now)` is the only way in. It books the event, then lets every round go as far as it can (`_advance`),
and returns what the shell shall do. It never waits and never raises for what a peer did. Time is an argument; tensors
are version names. The same machine runs in production, in the simulator and in replay.
"""

from __future__ import annotations

import math

from decoupled_diloco.core import accounts
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.admissions import Admissions
from decoupled_diloco.core.contributions import Contributions
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.grace import Average
from decoupled_diloco.core.ids import LearnerState, RoundState, RunPhase, Version
from decoupled_diloco.core.initial import InitialParameters
from decoupled_diloco.core.membership import LearnerRecord, Membership
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.presence import Presence
from decoupled_diloco.core.quorum import View
from decoupled_diloco.core.round import Round
from decoupled_diloco.core.round_steps import RoundSteps
from decoupled_diloco.core.rounds import Rounds
from decoupled_diloco.core.schedule import last_round_of
from decoupled_diloco.core.status import LearnerStatus, RoundStatus, RunStatus
from decoupled_diloco.core.syncer_status import learner_status, run_status


class SyncerMachine:
    """One run.

    Args:
        policy: the run's policy.
        fragment_shares: share of the parameters in each fragment (sums to 1); equal shares if not known.
    """

    def __init__(self, policy: Policy, fragment_shares: tuple[float, ...] | None = None) -> None:
        count = policy.fragment_count
        self.policy = policy
        self.phase = RunPhase.INITIALIZING
        self.pause_reason: str | None = None
        self.finish_reason: str | None = None
        self.finish_until = math.inf
        self.membership = Membership(count)
        self.presence = Presence(self.membership)
        self.rounds = Rounds()
        self.versions: list[Version] = []
        self.version_steps: list[int] = [0] * count
        self.global_step = 0
        self.ledger = GoodputLedger(fragment_shares or (1.0 / count,) * count)
        self.newest_results: list[dict[str, str]] = [{} for _ in range(count)]
        """Per fragment: what the newest committed round did with each learner, "overlap" (merged) or "rejected"."""
        self.quorum_average = Average(policy.average_gain)
        self.sync_average = Average(policy.average_gain)
        self.download_average = Average(policy.average_gain)
        self.norm_averages = [Average(policy.average_gain) for _ in range(count)]
        self.interval_average = Average(policy.average_gain / 4, float(policy.interval_steps))
        self.evaluation: dict[str, float] = {}
        self.evaluation_global_step = 0
        self.participating_count = 0
        self.no_slack_rounds = 0
        self.started_at = math.inf
        """When the run's first event came."""
        self._wake_at: float | None = None
        self._rounds_wake_at: float | None = None
        self._observed_at: float | None = None
        self.admissions = Admissions(self)
        self.contributions = Contributions(self)
        self.initial = InitialParameters(self)
        self._steps = RoundSteps(self)

    # ---- the only way in ---------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Takes one event in; returns the effects in the order in which the shell carries them out."""
        self._observe(now)
        self._forgive_standstill(now)
        effects = self._dispatch(event, now)
        if self._leaves_rounds_alone(event, now):
            return effects
        return effects + self._advance(now)

    def next_deadline(self) -> float | None:
        """The instant at which TimerFired is due, if nothing happens before; None: nothing to wait for."""
        return self._wake_at

    def _dispatch(self, event: ev.Event, now: float) -> list[fx.Effect]:
        match event:
            case ev.TimerFired():
                return []
            case ev.JoinRequested():
                return self.admissions.on_join(event, now)
            case ev.PauseRequested():
                return self._on_pause(event)
            case ev.ResumeRequested():
                return self._on_resume(event)
            case ev.FinishRequested():
                return self._on_finish(event, now)
            case ev.ContributionStarted():
                return self.contributions.on_started(event, now)
            case ev.ContributionReceived():
                return self.contributions.on_received(event, now)
            case ev.InitialFragmentReceived():
                return self.initial.on_fragment(event, now)
            case ev.InitialParametersCommitted():
                return self.initial.on_committed(event)
            case ev.MergeFinished() | ev.MergeFailed() | ev.CommitFinished() | ev.CommitFailed():
                return self._steps.on_merge_event(event, now)
            case ev.LearnerLeft():
                return self.admissions.on_left(event, now)
        record = self.membership.get(event.learner, event.incarnation)
        return [] if record is None else self._on_learner_event(event, record, now)

    def _on_learner_event(self, event: ev.Event, record: LearnerRecord, now: float) -> list[fx.Effect]:
        """Events of a known incarnation that need no answer. Anything it says is a sign of life."""
        match event:
            case ev.LearnerAttached():
                return self.admissions.on_attached(event, record, now)
            case ev.LearnerDetached(reason=reason):
                record.attached = False
                return [fx.Note("learner_detached", f"{record.learner} lost its control stream: {reason}")]
        effects = self.admissions.hear(record, now)
        match event:
            case ev.ProgressReported(progress=progress):
                self.admissions.take_progress(record, progress, now)
            case ev.BytesMoved(round=round_number):
                self.contributions.on_bytes_moved(record, round_number, now)
            case ev.FragmentApplied():
                effects += self.contributions.on_applied(event, record)
            case ev.ContributionDeclined():
                self.contributions.on_declined(event, record)
            case ev.ContributionFailed():
                self.contributions.on_failed(event, record)
            case ev.LeavingAnnounced(reason=reason):
                record.draining, record.drain_reason = True, reason or "it is leaving"
            case ev.EvaluationReported(figures=figures):
                self.evaluation = dict(figures)
                self.evaluation_global_step = event.global_step
        return effects

    # ---- pause, resume, finish ---------------------------------------------------------------------------------------

    def _on_pause(self, event: ev.PauseRequested) -> list[fx.Effect]:
        if self.phase in (RunPhase.FINISHING, RunPhase.FINISHED):
            return [fx.Answer(event.request, fx.Refusal("WRONG_STATE", f"the run is {self.phase}; it cannot pause"))]
        effects: list[fx.Effect] = [fx.Answer(event.request, None)]
        if self.pause_reason is not None:
            return effects
        self.pause_reason = event.reason or "an operator paused the run"
        reason, live = self.pause_reason, self.membership.live()
        effects += [fx.PauseLearner(record.learner, record.incarnation, reason) for record in live]
        return [*effects, fx.Note("run_paused", self.pause_reason)]

    def _on_resume(self, event: ev.ResumeRequested) -> list[fx.Effect]:
        if self.phase in (RunPhase.FINISHING, RunPhase.FINISHED):
            return [fx.Answer(event.request, fx.Refusal("WRONG_STATE", f"the run is {self.phase}; it cannot resume"))]
        effects: list[fx.Effect] = [fx.Answer(event.request, None)]
        if self.pause_reason is None:
            return effects
        self.pause_reason = None
        live = self.membership.live()
        effects += [fx.ResumeLearner(record.learner, record.incarnation) for record in live]
        return [*effects, fx.Note("run_resumed", "the run goes on")]

    def _on_finish(self, event: ev.FinishRequested, now: float) -> list[fx.Effect]:
        answer = fx.Answer(event.request, None)
        if self.phase in (RunPhase.FINISHING, RunPhase.FINISHED):
            return [answer]
        return [answer, *self._begin_finish(event.reason or "an operator finished the run", now)]

    def _begin_finish(self, reason: str, now: float) -> list[fx.Effect]:
        """One last round per fragment, at once: learners stop stepping and answer with what they have."""
        self.finish_reason, self.pause_reason = reason, None
        self.finish_until = now + self.policy.deadlines.drain_seconds_max
        effects: list[fx.Effect] = [fx.Note("run_finishing", reason)]
        initialized = bool(self.versions)
        self.phase = RunPhase.FINISHING
        live = self.membership.live()
        effects += [fx.DrainLearner(record.learner, record.incarnation, reason, leave=False) for record in live]
        if not initialized:
            return effects
        for item in self.rounds.in_order():
            item.final = item.final or item.state is RoundState.OPEN
            effects += [effect for record in live for effect in self.contributions.ask(item, record)]
        step = max(self.global_step - 1, 0)
        busy = self.rounds.busy_fragments()
        for _ in range(self.policy.fragment_count - len(busy)):
            while self.rounds.newest_opened % self.policy.fragment_count in busy:
                self.rounds.newest_opened += 1
            effects += self._open_round(now, final_step=step)
        return effects

    # ---- going on ----------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[fx.Effect]:
        """Lets leases run out and every round go as far as it can; arms the timer."""
        effects = self._expire(now) if now >= self.presence.due_at else []
        effects += self._let_rounds_go_on(now)
        while self.presence.is_stale:  # a learner turned out to be deaf: other rounds need not wait for it either
            effects += self._let_rounds_go_on(now)
        self._rounds_wake_at = self._wake_at
        self.wake(self.presence.due_at)
        return effects

    def _let_rounds_go_on(self, now: float) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        self._wake_at = None
        self.presence.refresh(self.policy, now)
        view = View.of(self.policy, now, self.presence, self.pause_reason)
        self._steps.refresh(view)
        match self.phase:
            case RunPhase.INITIALIZING:
                effects += self.initial.seek(now)
                self.wake(self.initial.until)
            case RunPhase.RUNNING:
                effects += self._open_rounds(now)
                effects += self._steps.advance_all(view)
                effects += self._open_rounds(now)
                effects += self._finish_if_due(view)
            case RunPhase.FINISHING:
                effects += self._steps.advance_all(view)
        if self.phase is RunPhase.FINISHING:
            effects += self._end_if_done(now)
        return effects

    def _leaves_rounds_alone(self, event: ev.Event, now: float) -> bool:
        """Whether nothing that a round looks at has changed: then the decisions are those of the last event."""
        match event:
            case ev.ProgressReported() | ev.BytesMoved() | ev.FragmentApplied() | ev.EvaluationReported():
                record = self.membership.get(event.learner, event.incarnation)
                changed = record is not None and self.presence.note(record, self.policy, now)
            case ev.ContributionStarted(header=header):
                changed = True
                record = self.membership.get(header.learner, header.incarnation)
                if record is not None:
                    self.presence.note(record, self.policy, now)
            case ev.ContributionReceived() | ev.ContributionFailed() | ev.ContributionDeclined():
                changed = True
                record = self.membership.get(event.learner, event.incarnation)
                if record is not None:
                    self.presence.note(record, self.policy, now)
            case ev.TimerFired() | ev.MergeFinished() | ev.MergeFailed() | ev.CommitFinished() | ev.CommitFailed():
                changed = True
            case _:
                changed = True
                self.presence.touch()
        if changed or now >= self.presence.due_at or (self._rounds_wake_at or math.inf) <= now:
            return False
        self._wake_at = self._rounds_wake_at
        self.wake(self.presence.due_at)
        return True

    def _expire(self, now: float) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        for record in self.membership.everybody():
            if not record.has_lease() or now < record.expires_at(self.policy):
                continue
            record.lost, record.lost_at, record.attached = True, record.heard_at, False
            reason = f"not heard of for {now - record.heard_at:.1f} s"
            effects += self.admissions.cut_uploads(record, keep_complete=True, reason="its lease ran out")
            effects += self.initial.discard(record, "its lease ran out")
            effects.append(fx.ExpireLearner(record.learner, record.incarnation, reason))
            effects.append(fx.Note("learner_lost", f"{record.learner}: {reason}", "warning"))
            self.presence.touch()
        return effects

    def wake(self, at: float | None) -> None:
        """Arms the timer for an instant, unless it is armed for an earlier one."""
        if at is not None and at < math.inf and (self._wake_at is None or at < self._wake_at):
            self._wake_at = at

    def rounds_in_flight_max(self) -> int:
        """F, by the averages of now."""
        return self.policy.rounds_in_flight_max(self.sync_average.value, self.fastest_step)

    @property
    def fastest_step(self) -> float | None:
        """xi_step: step time of the fastest learner that is live for quorum, in seconds."""
        return self._steps.step_seconds

    def _open_rounds(self, now: float) -> list[fx.Effect]:
        """Opens rounds of the schedule while fewer than F are under way and the next fragment is free."""
        effects: list[fx.Effect] = []
        last = last_round_of(self.policy.total_steps, self.policy) if self.policy.total_steps else math.inf
        limit = self.rounds_in_flight_max()
        while self.rounds.newest_opened < last and len(self.rounds.under_way) < limit:
            if self.rounds.newest_opened % self.policy.fragment_count in self.rounds.busy_fragments():
                break
            effects += self._open_round(now)
        return effects

    def _open_round(self, now: float, final_step: int | None = None) -> list[fx.Effect]:
        fragment = self.rounds.newest_opened % self.policy.fragment_count
        item = self.rounds.open_next(self.policy, self.versions[fragment], now, final_step)
        return [effect for record in self.membership.live() for effect in self.contributions.ask(item, record)]

    def _finish_if_due(self, view: View) -> list[fx.Effect]:
        total = self.policy.total_steps
        if not total or self.rounds.under_way or self.rounds.newest_opened < last_round_of(total, self.policy):
            return []
        self.global_step = total
        effects = self._begin_finish(f"all {total} global steps are made", view.now)
        return effects + self._steps.advance_all(view)

    def _end_if_done(self, now: float) -> list[fx.Effect]:
        if self.rounds.under_way and now < self.finish_until:
            self.wake(self.finish_until)
            return []
        effects = self._steps.abandon_all("the run's time to finish is over", now)
        if self.rounds.under_way:
            return effects  # a merge is under way; its end brings us back here
        for record in self.membership.with_role():
            if not record.left:
                accounts.settle_gone(self.ledger, record, {}, "died" if record.lost else "left")
        self.phase = RunPhase.FINISHED
        reason = self.finish_reason or ""
        effects.append(fx.EndRun(reason, self.global_step))
        for record in self.membership.everybody():
            if record.has_lease():
                effects.append(fx.FinishLearner(record.learner, record.incarnation, reason, self.global_step))
        return [*effects, fx.Note("run_finished", reason)]

    def _observe(self, now: float) -> None:
        """Books the time since the last event for uptime."""
        self.started_at = min(self.started_at, now)
        if self._observed_at is not None and self.phase in (RunPhase.RUNNING, RunPhase.FINISHING) and self.versions:
            self.ledger.observe(max(0.0, now - self._observed_at), self.presence.is_advancing)
        self._observed_at = now

    def _forgive_standstill(self, now: float) -> None:
        """A timer that comes late means that this syncer stood still; silence meanwhile is nobody else's."""
        late = now - self._wake_at if self._wake_at is not None else 0.0
        if late <= self.policy.deadlines.heartbeat_seconds:
            return
        for record in self.membership.learners.values():
            record.heard_at += late
            record.progress_at += late
        for item in self.rounds.under_way.values():
            item.last_call_until += late
            for answer in item.answers.values():
                answer.moved_at += late
                answer.until += late
        self.presence.touch()

    def admits(self, learner: str, incarnation: int) -> fx.Refusal | None:
        """Whether a call of this incarnation is welcome; the reason if it is not. Changes nothing."""
        return self.admissions.admits(learner, incarnation)

    def set_fragment_shares(self, shares: tuple[float, ...]) -> None:
        """Says how the parameters are spread over the fragments, once the schema is known; shares sum to 1."""
        self.ledger.fragment_shares = shares

    # ---- what it shows -----------------------------------------------------------------------------------------------

    def published(self) -> tuple[tuple[int, Version, int], ...]:
        """Per fragment: index, newest version, global steps made when its round was due."""
        return tuple((p, version, self.version_steps[p]) for p, version in enumerate(self.versions))

    def reason_of(self, item: Round, now: float) -> str:
        """Why a round under way stands where it stands, in the words of now. Reads afresh and changes nothing."""
        if self._observed_at is None or now < self._observed_at:
            return item.reason
        presence = Presence(self.membership)
        presence.refresh(self.policy, now)
        return self._steps.explain(item, View.of(self.policy, now, presence, self.pause_reason))

    def status(self, now: float) -> RunStatus:
        """The run as a whole."""
        return run_status(self, now)

    def learners(self, now: float) -> list[LearnerStatus]:
        """Every learner and observer that has not left, worst first, then those that have left."""
        order = list(LearnerState)
        shown = [learner_status(self, record, now) for record in self.membership.everybody()]
        return sorted(shown, key=lambda s: (s.state is LearnerState.LEFT, -order.index(s.state), s.learner))

    def list_rounds(self, limit: int, before: int | None = None, now: float = 0.0) -> list[RoundStatus]:
        """At most `limit` rounds with a number below `before`, newest first."""
        under_way = [item.status(now, self.reason_of(item, now)) for item in self.rounds.in_order()]
        shown = sorted([*self.rounds.closed, *under_way], key=lambda s: s.round, reverse=True)
        return [status for status in shown if before is None or status.round < before][:limit]
