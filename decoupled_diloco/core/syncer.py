"""The syncer's machine: every decision of the protocol, and nothing else.

`handle(event, now)` is the only way in. It books the event, then lets every round go as far as it can (`_advance`), and returns
what the shell shall do. It never waits and never raises for what a peer did. Time is an argument; tensors are version names.
The same machine runs in production, in the simulator and in replay.
"""

from __future__ import annotations

import math

from decoupled_diloco.core import accounts
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.grace import Average
from decoupled_diloco.core.ids import Activity, Fate, LearnerState, Role, RoundState, RunPhase, Version
from decoupled_diloco.core.membership import LearnerRecord, Membership
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.quorum import View
from decoupled_diloco.core.round import AnswerState, Round, RoundAnswer
from decoupled_diloco.core.round_steps import RoundSteps
from decoupled_diloco.core.rounds import Rounds
from decoupled_diloco.core.schedule import due_local_step, last_round_of
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
        self.interval_average = Average(policy.average_gain / 4)
        self.evaluation: dict[str, float] = {}
        self.evaluation_global_step = 0
        self.participating_count = 0
        self.no_slack_rounds = 0
        self._initial_asked: tuple[str, int] | None = None
        self._initial_until = math.inf
        self._initial_digests: dict[int, str] = {}
        self._wake_at: float | None = None
        self._observed_at: float | None = None
        self._advancing = False
        self._steps = RoundSteps(self)

    # ---- the only way in ---------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[fx.Effect]:
        """Takes one event in; returns the effects in the order in which the shell carries them out."""
        self._observe(now)
        effects = self._dispatch(event, now)
        effects += self._advance(now)
        return effects

    def next_deadline(self) -> float | None:
        """The instant at which TimerFired is due, if nothing happens before; None: nothing to wait for."""
        return self._wake_at

    def _dispatch(self, event: ev.Event, now: float) -> list[fx.Effect]:
        match event:
            case ev.TimerFired():
                return []
            case ev.JoinRequested():
                return self._on_join(event, now)
            case ev.PauseRequested():
                return self._on_pause(event)
            case ev.ResumeRequested():
                return self._on_resume(event)
            case ev.FinishRequested():
                return self._on_finish(event, now)
            case ev.ContributionStarted():
                return self._on_started(event, now)
            case ev.ContributionReceived():
                return self._on_received(event, now)
            case ev.InitialFragmentReceived():
                return self._on_initial_fragment(event, now)
            case ev.InitialParametersCommitted():
                return self._on_initial_committed(event)
            case ev.MergeFinished() | ev.MergeFailed() | ev.CommitFinished() | ev.CommitFailed():
                return self._steps.on_merge_event(event, now)
            case ev.LearnerLeft():
                return self._on_left(event, now)
        record = self.membership.get(event.learner, event.incarnation)
        return [] if record is None else self._on_learner_event(event, record, now)

    def _on_learner_event(self, event: ev.Event, record: LearnerRecord, now: float) -> list[fx.Effect]:
        """Events of a known incarnation that need no answer. Anything it says is a sign of life."""
        match event:
            case ev.LearnerAttached():
                return self._on_attached(event, record, now)
            case ev.LearnerDetached(reason=reason):
                record.attached = False
                return [fx.Note("learner_detached", f"{record.learner} lost its control stream: {reason}")]
        effects = self._hear(record, now)
        match event:
            case ev.ProgressReported(progress=progress):
                self._take_progress(record, progress, now)
            case ev.BytesMoved(round=round_number):
                self._on_bytes_moved(record, round_number, now)
            case ev.FragmentApplied():
                effects += self._on_applied(event, record)
            case ev.ContributionDeclined():
                self._on_declined(event, record)
            case ev.ContributionFailed():
                self._on_failed(event, record)
            case ev.LeavingAnnounced(reason=reason):
                record.draining, record.drain_reason = True, reason or "it is leaving"
            case ev.EvaluationReported(figures=figures):
                self.evaluation = dict(figures)
                self.evaluation_global_step = event.global_step
        return effects

    # ---- joining, life, leaving --------------------------------------------------------------------------------------

    def admits(self, learner: str, incarnation: int) -> fx.Refusal | None:
        """Whether a call of this incarnation is welcome; the reason if it is not."""
        record = self.membership.learners.get(learner)
        if record is None or record.left:
            return fx.Refusal("NOT_JOINED", f"{learner} is not registered in this run; join (again)")
        if record.incarnation != incarnation:
            text = f"incarnation {incarnation} of {learner} was replaced by incarnation {record.incarnation}"
            return fx.Refusal("STALE_INCARNATION", text)
        return None

    def _on_join(self, event: ev.JoinRequested, now: float) -> list[fx.Effect]:
        refusal = self._refuse_join(event)
        if refusal is not None:
            return [fx.Answer(event.request, refusal)]
        effects: list[fx.Effect] = []
        old = self.membership.learners.get(event.learner)
        if old is not None and not old.left:
            effects += self._replace(old, now)
        record = self.membership.admit(event.learner, event.role, now)
        if old is not None and not old.left and old.role is Role.LEARNER:
            record.gap_seconds = max(0.0, now - old.heard_at)
        record.peer_address, record.software_version = event.peer_address, event.software_version
        record.based_on_global_step = self.rounds.newest_closed_step
        record.cursor = max(record.cursor, self._cursor_in_merge(record.slot))
        answer = fx.Admitted(
            learner=record.learner,
            incarnation=record.incarnation,
            role=record.role,
            slot=record.slot,
            cursor=record.cursor,
            global_step=self.global_step,
            versions=self.published(),
            paused=self.pause_reason is not None,
            initialized=bool(self.versions),
        )
        text = f"{record.learner} joined as incarnation {record.incarnation}, slot {record.slot}, cursor {record.cursor}"
        return [*effects, fx.Answer(event.request, answer), fx.Note("learner_joined", text)]

    def _refuse_join(self, event: ev.JoinRequested) -> fx.Refusal | None:
        if self.phase is RunPhase.FINISHED or (self.phase is RunPhase.FINISHING and event.role is Role.LEARNER):
            return fx.Refusal("RUN_FINISHED", f"the run has finished: {self.finish_reason}")
        known = self.membership.learners.get(event.learner)
        new = known is None or known.left
        if new and event.role is Role.LEARNER and self.membership.registered_count() >= self.policy.learners_max:
            return fx.Refusal("TOO_MANY_LEARNERS", f"the run takes at most {self.policy.learners_max} learners")
        return None

    def _replace(self, old: LearnerRecord, now: float) -> list[fx.Effect]:
        """A new incarnation fences the old one at once; its steps will be redone from the committed cursor."""
        reason = "replaced by a new incarnation"
        effects = self._cut_uploads(old, keep_complete=False, reason=reason)
        if old.role is Role.LEARNER:
            accounts.settle_gone(self.ledger, old, self._tokens_in_merge(old), "died")
        effects.append(fx.ExpireLearner(old.learner, old.incarnation, reason))
        return effects + self._discard_initial(old, reason)

    def _cut_uploads(self, record: LearnerRecord, keep_complete: bool, reason: str) -> list[fx.Effect]:
        cut = self.rounds.drop_incarnation(record.learner, record.incarnation, keep_complete, reason)
        return [fx.AbortUpload(record.learner, record.incarnation, item.number, reason) for item in cut]

    def _in_merge(self, learner: str, incarnation: int) -> list[RoundAnswer]:
        rounds = [item for item in self.rounds.in_order() if item.state is RoundState.MERGING]
        answers = [item.answers[learner] for item in rounds if learner in item.answers]
        return [a for a in answers if a.incarnation == incarnation and a.state is AnswerState.COMPLETE and a.header]

    def _tokens_in_merge(self, record: LearnerRecord) -> dict[int, int]:
        answers = self._in_merge(record.learner, record.incarnation)
        return {a.header.fragment: a.header.total_token_count for a in answers if a.header}

    def _cursor_in_merge(self, slot: int) -> int:
        """Newest cursor of the slot in a merge under way: steps up to it will not be made again."""
        cursors = [0]
        for item in self.rounds.in_order():
            if item.state is RoundState.MERGING:
                for answer in item.complete():
                    record = self.membership.learners.get(answer.learner)
                    if answer.header and record is not None and record.slot == slot:
                        cursors.append(answer.header.cursor)
        return max(cursors)

    def _hear(self, record: LearnerRecord, now: float) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        if record.lost:
            record.lost = False
            text = f"{record.learner} is back after {now - record.heard_at:.1f} s"
            effects.append(fx.Note("learner_back", text))
        silence = now - record.heard_at
        if silence > self.policy.deadlines.stall_seconds:
            record.gap_seconds += silence
        record.heard_at, record.deaf = now, False
        return effects

    def _on_attached(self, event: ev.LearnerAttached, record: LearnerRecord, now: float) -> list[fx.Effect]:
        effects = self._hear(record, now)
        record.attached = True
        record.applied = dict(event.applied)
        record.recovering = record.role is Role.LEARNER and len(record.applied) < self.policy.fragment_count
        self._take_progress(record, event.progress, now)
        record.based_on_global_step = self.rounds.newest_closed_step
        record.based_on_local_step = record.progress.local_step
        return effects + self._repeat(record)

    def _repeat(self, record: LearnerRecord) -> list[fx.Effect]:
        """Everything that still holds, for a stream that has just come up."""
        name, incarnation = record.learner, record.incarnation
        effects: list[fx.Effect] = []
        for fragment, version, step in self.published():
            if record.applied.get(fragment) != version:
                effects.append(fx.AnnounceFragment(name, incarnation, fragment, version, step))
        if self.phase is RunPhase.FINISHED:
            effects.append(fx.FinishLearner(name, incarnation, self.finish_reason or "", self.global_step))
            return effects
        if self._initial_asked == (name, incarnation):
            effects.append(fx.AskInitialParameters(name, incarnation))
        if self.pause_reason is not None:
            effects.append(fx.PauseLearner(name, incarnation, self.pause_reason))
        if self.phase is RunPhase.FINISHING and record.role is Role.LEARNER:
            effects.append(fx.DrainLearner(name, incarnation, self.finish_reason or "", leave=False))
        for item in self.rounds.in_order():
            effects += self.ask(item, record)
        return effects

    def _take_progress(self, record: LearnerRecord, progress: ev.Progress, now: float) -> None:
        accounts.book_progress(self.ledger, record, progress)
        made = progress.token_count - record.progress.token_count
        elapsed = now - record.progress_at
        if made > 0 and elapsed > 0:
            record.tokens_per_second += 0.2 * (made / elapsed - record.tokens_per_second)
        record.progress, record.progress_at = progress, now
        if progress.activity is Activity.DRAINING and not record.draining:
            record.draining, record.drain_reason = True, "it is leaving"
        if progress.loss is not None:
            record.loss = progress.loss

    def _on_bytes_moved(self, record: LearnerRecord, round_number: int | None, now: float) -> None:
        item = self.rounds.under_way.get(round_number or 0)
        answer = item.answers.get(record.learner) if item else None
        if answer is not None and answer.incarnation == record.incarnation:
            answer.moved_at = now

    def _on_left(self, event: ev.LearnerLeft, now: float) -> list[fx.Effect]:
        record = self.membership.get(event.learner, event.incarnation)
        if record is None:
            return [fx.Answer(event.request, None)]
        effects = self._cut_uploads(record, keep_complete=True, reason="the learner left")
        if record.role is Role.LEARNER:
            accounts.settle_gone(self.ledger, record, self._tokens_unmerged(record), "left")
        record.left, record.left_reason, record.attached = True, event.reason, False
        effects += self._discard_initial(record, "the learner left")
        effects.append(fx.Answer(event.request, None))
        effects.append(fx.ExpireLearner(record.learner, record.incarnation, event.reason))
        return [*effects, fx.Note("learner_left", f"{record.learner} left: {event.reason}")]

    def _tokens_unmerged(self, record: LearnerRecord) -> dict[int, int]:
        """By fragment, tokens at the copy of every whole contribution that may still be merged."""
        tokens: dict[int, int] = {}
        for item in self.rounds.in_order():
            for answer in item.complete():
                if (answer.learner, answer.incarnation) == (record.learner, record.incarnation) and answer.header:
                    tokens[item.fragment] = answer.header.total_token_count
        return tokens

    # ---- contributions -----------------------------------------------------------------------------------------------

    def _on_started(self, event: ev.ContributionStarted, now: float) -> list[fx.Effect]:
        header = event.header
        refusal = self.admits(header.learner, header.incarnation)
        if refusal is not None:
            return [fx.Answer(event.request, fx.Admission(Fate.STALE_INCARNATION, refusal.text))]
        record = self.membership.learners[header.learner]
        effects = self._hear(record, now)
        admission = self.rounds.admit(header, now)
        effects.append(fx.Answer(event.request, admission))
        if admission.fate is Fate.ACCEPTED and not admission.known:
            step = self.rounds.under_way[header.round].global_step
            if step > record.based_on_global_step:
                record.based_on_global_step, record.based_on_local_step = step, header.local_step
        if admission.fate is Fate.NONFINITE and not admission.known:
            effects += self._recover(record, admission.text)
        return effects

    def _on_received(self, event: ev.ContributionReceived, now: float) -> list[fx.Effect]:
        record = self.membership.get(event.learner, event.incarnation)
        if record is None:
            return [fx.Answer(event.request, Fate.STALE_INCARNATION)]
        effects = self._hear(record, now)
        item = self.rounds.under_way.get(event.round)
        average = self.norm_averages[item.fragment] if item else None
        limit = self.policy.norm_outlier_factor * average.get() if average else 0.0
        known = (event.learner, event.incarnation, event.round) in self.rounds.fates
        fate = self.rounds.receive(event, limit, now)
        effects.append(fx.Answer(event.request, fate))
        if fate is Fate.ACCEPTED and item is not None and average is not None and not known:
            average.add(event.norm)
            answer = item.answers[event.learner]
            record.upload_seconds = [*record.upload_seconds[-8:], answer.received_at - answer.started_at]
        if fate is Fate.NONFINITE and not known:
            effects += self._recover(record, f"round {event.round}: values that are not finite")
        return effects

    def _recover(self, record: LearnerRecord, reason: str) -> list[fx.Effect]:
        record.recovering, record.applied = True, {}
        text = f"{record.learner} recovers: {reason}"
        return [fx.RecoverLearner(record.learner, record.incarnation, reason), fx.Note("learner_recovers", text, "warning")]

    def _on_failed(self, event: ev.ContributionFailed, record: LearnerRecord) -> None:
        item = self.rounds.under_way.get(event.round)
        answer = item.answers.get(record.learner) if item else None
        if answer is not None and answer.incarnation == record.incarnation and answer.state is AnswerState.STARTED:
            answer.state, answer.text, answer.fate = AnswerState.FAILED, event.reason, event.fate

    def _on_declined(self, event: ev.ContributionDeclined, record: LearnerRecord) -> None:
        item = self.rounds.under_way.get(event.round)
        if item is None or item.has_answered(record.learner, record.incarnation):
            return
        text = {
            "no_copy": "it has no copy of the round's base version yet",
            "zero_steps": "it made no step since it received the fragment",
            "nonfinite": "its own values are not finite",
        }[event.reason.value]
        item.answers[record.learner] = RoundAnswer(record.learner, record.incarnation, AnswerState.DECLINED, text)

    def _on_applied(self, event: ev.FragmentApplied, record: LearnerRecord) -> list[fx.Effect]:
        if not 0 <= event.fragment < self.policy.fragment_count:
            return []
        record.applied[event.fragment] = event.version
        if record.role is Role.LEARNER:
            cause = self.newest_results[event.fragment].get(record.learner, "absent")
            accounts.settle_applied(self.ledger, record, event, cause)
        if event.download_seconds is not None:
            self.download_average.add(event.download_seconds)
        if record.recovering and len(record.applied) == self.policy.fragment_count:
            record.recovering = False
            record.based_on_global_step = self.rounds.newest_closed_step
            record.based_on_local_step = event.local_step
            return [effect for item in self.rounds.in_order() for effect in self.ask(item, record)]
        return []

    def ask(self, item: Round, record: LearnerRecord) -> list[fx.Effect]:
        """The ask for a round, if the learner can answer it and has not."""
        if item.state not in (RoundState.OPEN, RoundState.GRACE) or not record.can_answer():
            return []
        if item.has_answered(record.learner, record.incarnation):
            return []
        item.asked.add(record.learner)
        fastest, own = self.fastest_step, record.step_seconds()
        ratio = min(1.0, fastest / own) if fastest and own else 1.0
        base_step, base_local = record.based_on_global_step, record.based_on_local_step
        due = 0 if item.final else due_local_step(base_local, item.global_step, base_step, ratio)
        ask = fx.AskContribution(
            record.learner,
            record.incarnation,
            item.number,
            item.fragment,
            item.base,
            item.global_step,
            due,
            ratio,
            self.rounds_in_flight_max(),
        )
        return [ask]

    # ---- initial parameters ------------------------------------------------------------------------------------------

    def _on_initial_fragment(self, event: ev.InitialFragmentReceived, now: float) -> list[fx.Effect]:
        if self._initial_asked != (event.learner, event.incarnation) or self.versions:
            text = f"{event.learner} was not asked for the initial parameters, or no longer is"
            return [fx.Answer(event.request, fx.Refusal("WRONG_STATE", text))]
        record = self.membership.learners[event.learner]
        effects: list[fx.Effect] = [*self._hear(record, now), fx.Answer(event.request, None)]
        self._initial_digests[event.fragment] = event.digest
        if len(self._initial_digests) == self.policy.fragment_count:
            self._initial_until = math.inf
            effects.append(fx.CommitInitialParameters(event.learner, event.incarnation))
        return effects

    def _on_initial_committed(self, event: ev.InitialParametersCommitted) -> list[fx.Effect]:
        self._initial_asked, self._initial_until = None, math.inf
        self.versions = [Version(1, 1, digest) for digest in event.digests]
        self.phase = RunPhase.RUNNING
        published = [fx.PublishFragment(p, version, step) for p, version, step in self.published()]
        return [*published, fx.Note("run_initialized", "the run has its initial parameters")]

    def _discard_initial(self, record: LearnerRecord, reason: str) -> list[fx.Effect]:
        if self._initial_asked != (record.learner, record.incarnation):
            return []
        if len(self._initial_digests) == self.policy.fragment_count:
            return []  # whole already; the commit is under way and needs the learner no more
        self._initial_asked, self._initial_until, self._initial_digests = None, math.inf, {}
        return [fx.DiscardInitialParameters(record.learner, record.incarnation, reason)]

    def _seek_initial(self, now: float) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        if self._initial_asked is not None and now >= self._initial_until:
            record = self.membership.learners[self._initial_asked[0]]
            effects += self._discard_initial(record, "it took too long to upload the initial parameters")
            record.draining, record.drain_reason = False, ""
            candidates = [r for r in self.membership.live() if r.attached and r is not record] or [record]
        else:
            candidates = [r for r in self.membership.live() if r.attached and not r.draining]
        if self._initial_asked is None and candidates:
            chosen = candidates[0]
            self._initial_asked = (chosen.learner, chosen.incarnation)
            self._initial_until = now + self.policy.deadlines.initial_parameters_seconds
            effects.append(fx.AskInitialParameters(chosen.learner, chosen.incarnation))
            effects.append(fx.Note("initial_parameters_asked", f"{chosen.learner} is asked for the initial parameters"))
        return effects

    # ---- pause, resume, finish ---------------------------------------------------------------------------------------

    def _on_pause(self, event: ev.PauseRequested) -> list[fx.Effect]:
        if self.phase in (RunPhase.FINISHING, RunPhase.FINISHED):
            return [fx.Answer(event.request, fx.Refusal("WRONG_STATE", f"the run is {self.phase}; it cannot pause"))]
        effects: list[fx.Effect] = [fx.Answer(event.request, None)]
        if self.pause_reason is not None:
            return effects
        self.pause_reason = event.reason or "an operator paused the run"
        for record in self.membership.live():
            effects.append(fx.PauseLearner(record.learner, record.incarnation, self.pause_reason))
        return [*effects, fx.Note("run_paused", self.pause_reason)]

    def _on_resume(self, event: ev.ResumeRequested) -> list[fx.Effect]:
        if self.phase in (RunPhase.FINISHING, RunPhase.FINISHED):
            return [fx.Answer(event.request, fx.Refusal("WRONG_STATE", f"the run is {self.phase}; it cannot resume"))]
        effects: list[fx.Effect] = [fx.Answer(event.request, None)]
        if self.pause_reason is None:
            return effects
        self.pause_reason = None
        for record in self.membership.live():
            effects.append(fx.ResumeLearner(record.learner, record.incarnation))
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
        for record in self.membership.live():
            effects.append(fx.DrainLearner(record.learner, record.incarnation, reason, leave=False))
        if not initialized:
            return effects
        for item in self.rounds.in_order():
            item.final = item.final or item.state is RoundState.OPEN
        step = max(self.global_step - 1, 0)
        for _ in range(self.policy.fragment_count):
            fragment = self.rounds.newest_opened % self.policy.fragment_count
            if fragment in self.rounds.busy_fragments():
                self.rounds.newest_opened += 1
            else:
                effects += self._open_round(now, final_step=step)
        for item in self.rounds.in_order():
            for record in self.membership.live():
                effects += self.ask(item, record)
        return effects

    # ---- going on ----------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[fx.Effect]:
        """Lets leases run out and every round go as far as it can; arms the timer."""
        effects = self._expire(now)
        self._wake_at = None
        if self.phase is RunPhase.INITIALIZING:
            effects += self._seek_initial(now)
            self.wake(self._initial_until)
        if self.phase is RunPhase.RUNNING:
            effects += self._open_rounds(now)
        if self.versions:
            effects += self._steps.advance_all(now)
        if self.phase is RunPhase.RUNNING:
            effects += self._open_rounds(now)
            effects += self._finish_if_due(now)
        if self.phase is RunPhase.FINISHING:
            effects += self._end_if_done(now)
        self._arm_leases(now)
        view_live = self.membership.live_for_quorum(self.policy, now)
        self._advancing = any(record.progress.activity is Activity.COMPUTE for record in view_live)
        return effects

    def _expire(self, now: float) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        for record in self.membership.everybody():
            if not record.has_lease() or now < record.expires_at(self.policy):
                continue
            record.lost, record.lost_at, record.attached = True, record.heard_at, False
            reason = f"not heard of for {now - record.heard_at:.1f} s"
            effects += self._cut_uploads(record, keep_complete=True, reason="its lease ran out")
            effects += self._discard_initial(record, "its lease ran out")
            effects.append(fx.ExpireLearner(record.learner, record.incarnation, reason))
            effects.append(fx.Note("learner_lost", f"{record.learner}: {reason}", "warning"))
        return effects

    def _arm_leases(self, now: float) -> None:
        for record in self.membership.learners.values():
            if record.has_lease():
                self.wake(record.expires_at(self.policy))
                stalls_at = record.stalls_at(self.policy)
                if stalls_at > now:
                    self.wake(stalls_at)

    def wake(self, at: float | None) -> None:
        if at is not None and at < math.inf and (self._wake_at is None or at < self._wake_at):
            self._wake_at = at

    def rounds_in_flight_max(self) -> int:
        """F, by the averages of now."""
        return self.policy.rounds_in_flight_max(self.sync_average.value, self.fastest_step)

    @property
    def fastest_step(self) -> float | None:
        return self._steps.step_seconds

    def _open_rounds(self, now: float) -> list[fx.Effect]:
        """Opens rounds of the schedule while fewer than F are under way and the next fragment is free."""
        effects: list[fx.Effect] = []
        last = last_round_of(self.policy.total_steps, self.policy) if self.policy.total_steps else math.inf
        self._steps.refresh(now)
        limit = self.rounds_in_flight_max()
        while self.rounds.newest_opened < last and len(self.rounds.under_way) < limit:
            if self.rounds.newest_opened % self.policy.fragment_count in self.rounds.busy_fragments():
                break
            effects += self._open_round(now)
        return effects

    def _open_round(self, now: float, final_step: int | None = None) -> list[fx.Effect]:
        fragment = self.rounds.newest_opened % self.policy.fragment_count
        item = self.rounds.open_next(self.policy, self.versions[fragment], now, final_step)
        return [effect for record in self.membership.live() for effect in self.ask(item, record)]

    def _finish_if_due(self, now: float) -> list[fx.Effect]:
        total = self.policy.total_steps
        if not total or self.rounds.under_way or self.rounds.newest_opened < last_round_of(total, self.policy):
            return []
        self.global_step = total
        effects = self._begin_finish(f"all {total} global steps are made", now)
        return effects + self._steps.advance_all(now)

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
        if self._observed_at is not None and self.phase in (RunPhase.RUNNING, RunPhase.FINISHING) and self.versions:
            self.ledger.observe(max(0.0, now - self._observed_at), self._advancing)
        self._observed_at = now

    # ---- what it shows -----------------------------------------------------------------------------------------------

    def published(self) -> tuple[tuple[int, Version, int], ...]:
        """Per fragment: index, newest version, global steps made when its round was due."""
        return tuple((p, version, self.version_steps[p]) for p, version in enumerate(self.versions))

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
        under_way = [item.status(now) for item in self.rounds.in_order()]
        shown = sorted([*self.rounds.closed, *under_way], key=lambda s: s.round, reverse=True)
        return [status for status in shown if before is None or status.round < before][:limit]

    def view(self, now: float) -> View:
        """What the decisions look at."""
        return View.of(self.policy, now, self.membership, self.pause_reason)
