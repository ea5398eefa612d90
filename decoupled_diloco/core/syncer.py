"""The syncer's machine: every decision of the protocol, and nothing else.

`handle(event, now)` is the only way in. It books the event, then lets every round go as far as it can (`_advance`),
and returns what the shell shall do. It never waits and never raises for what a peer did. Time is an argument; tensors
are version names. The same machine runs in production, in the simulator and in replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import restoring
from decoupled_diloco.core.admissions import Admissions
from decoupled_diloco.core.contributions import Contributions
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.grace import Average
from decoupled_diloco.core.ids import LearnerState, RunPhase, Version
from decoupled_diloco.core.initial import InitialParameters
from decoupled_diloco.core.membership import LearnerRecord, Membership
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.presence import Presence
from decoupled_diloco.core.quorum import View
from decoupled_diloco.core.round import Round
from decoupled_diloco.core.round_steps import RoundSteps
from decoupled_diloco.core.rounds import Rounds
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.schedule import last_round_of
from decoupled_diloco.core.status import LearnerStatus, RoundStatus, RunStatus
from decoupled_diloco.core.steering import Command, Steering
from decoupled_diloco.core.syncer_status import learner_status, run_status


class SyncerMachine:
    """One run.

    Args:
        policy: the run's policy.
        fragment_shares: share of the parameters in each fragment (sums to 1); equal shares if not known.
        initial_from_file: the run's first parameters are read by the shell; no learner is asked for them.
    """

    def __init__(
        self, policy: Policy, fragment_shares: tuple[float, ...] | None = None, *, initial_from_file: bool = False
    ) -> None:
        count = policy.fragment_count
        self.policy = policy
        self.phase = RunPhase.INITIALIZING
        self.timeline = 1
        """The newest timeline that a version was named in."""
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
        self.initial = InitialParameters(self, initial_from_file)
        self.steering = Steering(self)
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
            case ev.RolledBack():
                return self.steering.on_rolled_back(now)
            case ev.RollBackFailed():
                return self.steering.on_roll_back_failed(event)
            case ev.StorageFailed() | ev.StorageRecovered():
                return self.steering.on_storage(event)
            case ev.ModelAgreed(fragment_shares=shares):
                self.ledger.fragment_shares = shares
                return self.initial.on_model_agreed()
        if isinstance(event, Command):
            return self.steering.on_command(event, now)
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
                effects += self.contributions.on_failed(event, record)
            case ev.LeavingAnnounced(reason=reason):
                record.draining, record.drain_reason = True, reason or "it is leaving"
            case ev.EvaluationReported(figures=figures):
                self.evaluation = dict(figures)
                self.evaluation_global_step = event.global_step
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
        view = View.of(self.policy, now, self.presence, self.steering.hold(now))
        self.wake(self.steering.attach_until if now < self.steering.attach_until else None)
        self._steps.refresh(view)
        match self.phase:
            case RunPhase.INITIALIZING:
                effects += self.initial.seek(now)
                self.wake(self.initial.until)
            case RunPhase.RUNNING if self.steering.rolling_back is not None:
                effects += self._steps.advance_all(view)
                effects += self.steering.roll_back_if_quiet()
            case RunPhase.RUNNING:
                effects += self._open_rounds(now)
                effects += self._steps.advance_all(view)
                effects += self._open_rounds(now)
                effects += self._finish_if_due(view)
            case RunPhase.FINISHING:
                effects += self._steps.advance_all(view)
        if self.phase is RunPhase.FINISHING:
            effects += self.steering.end_if_done(now)
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
        last = self._last_round()
        limit = self.rounds_in_flight_max()
        while self.rounds.newest_opened < last and len(self.rounds.under_way) < limit:
            if self.rounds.newest_opened % self.policy.fragment_count in self.rounds.busy_fragments():
                break
            effects += self.open_round(now)
        return effects

    def open_round(self, now: float, final_step: int | None = None) -> list[fx.Effect]:
        """Opens the next round and asks everybody; `final_step` stands in for t(r) in the last rounds of a run."""
        fragment = self.rounds.newest_opened % self.policy.fragment_count
        item = self.rounds.open_next(self.policy, self.versions[fragment], now, final_step)
        return self.contributions.ask_everybody(item)

    def _last_round(self) -> float:
        """The run's last round before it finishes; infinite if it has an open end."""
        total = self.policy.total_steps
        return last_round_of(total, self.policy) + self.rounds.offset if total else math.inf

    def _finish_if_due(self, view: View) -> list[fx.Effect]:
        total = self.policy.total_steps
        if not total or self.rounds.under_way or self.rounds.newest_opened < self._last_round():
            return []
        self.global_step = total
        effects = self.steering.begin_finish(f"all {total} global steps are made", view.now)
        return effects + self._steps.advance_all(view)

    def abandon_rounds(self, reason: str, now: float) -> list[fx.Effect]:
        """Ends every round that is not merging."""
        return self._steps.abandon_all(reason, now)

    def _observe(self, now: float) -> None:
        """Books the time since the last event for uptime, but while it is not known yet whether anybody trains."""
        self.started_at = min(self.started_at, now)
        before, self._observed_at = self._observed_at, now
        if before is None or not self.versions or self.phase not in (RunPhase.RUNNING, RunPhase.FINISHING):
            return
        if self.presence.is_advancing or not self.steering.awaited(before):
            self.ledger.observe(max(0.0, now - before), self.presence.is_advancing)

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

    # ---- what survives it --------------------------------------------------------------------------------------------

    def run_state(self) -> RunState:
        """All that must be durable, but for payloads, as of the newest event."""
        return restoring.run_state(self)

    def restore(self, state: RunState, newer: Iterable[fx.CommitRound], now: float) -> list[fx.Effect]:
        """Takes a run up where its syncer was stopped; for a new machine, before its first event.

        Args:
            state: The newest state that was written down.
            newer: Durable rounds, in the order of their commits; those that the state knows already are left out.
            now: The instant.

        Returns:
            What the shell has to do before anything else.
        """
        restoring.restore(self, state, newer, now)
        self.wake(now)  # leases run out and the run ends even if nobody comes back
        if self.phase is not RunPhase.FINISHED:
            return []
        return [fx.EndRun(self.steering.finish_reason or "", self.global_step)]

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
        return self._steps.explain(item, View.of(self.policy, now, presence, self.steering.hold(now)))

    def status(self, now: float) -> RunStatus:
        """The run as a whole."""
        return run_status(self, now)

    def learners(self, now: float) -> list[LearnerStatus]:
        """Every learner and observer that has not left, worst first, then those that have left."""
        order = list(LearnerState)
        shown = [learner_status(self, record, now) for record in self.membership.everybody()]
        return sorted(shown, key=lambda s: (s.state is LearnerState.LEFT, -order.index(s.state), s.learner))

    def closed_round(self, number: int) -> RoundStatus | None:
        """A round that has ended; None: it has not, or it ended too long ago."""
        return next((status for status in reversed(self.rounds.closed) if status.round == number), None)

    def list_rounds(self, limit: int, before: int | None = None, now: float = 0.0) -> list[RoundStatus]:
        """At most `limit` rounds with a number below `before`, newest first."""
        under_way = [item.status(now, self.reason_of(item, now)) for item in self.rounds.in_order()]
        shown = sorted([*self.rounds.closed, *under_way], key=lambda s: s.round, reverse=True)
        return [status for status in shown if before is None or status.round < before][:limit]
