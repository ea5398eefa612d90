"""What operators, and the store, make a run do: pause, finish, drain, evict, roll back, wait for the disk."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from decoupled_diloco.core import accounts
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Role, RoundState, RunPhase
from decoupled_diloco.core.restoring import in_new_timeline, load, run_state
from decoupled_diloco.core.run_state import RunState

if TYPE_CHECKING:
    from decoupled_diloco.core.syncer import SyncerMachine

Command = (
    ev.PauseRequested
    | ev.ResumeRequested
    | ev.FinishRequested
    | ev.DrainRequested
    | ev.EvictRequested
    | ev.ReadmitRequested
    | ev.RollBackRequested
)


class Steering:
    """The operator's side of one machine."""

    def __init__(self, machine: SyncerMachine) -> None:
        self.machine = machine
        self.pause_reason: str | None = None
        self.finish_reason: str | None = None
        self.finish_until = math.inf
        self.storage_problem: str | None = None
        """Why the store cannot write."""
        self.attach_until = -math.inf
        """Until then a syncer that was started again waits for those that were live before."""
        self.rolling_back: ev.RollBackRequested | None = None
        self._rolled_to: RunState | None = None
        """The state that is being made durable in place of the present one."""

    @property
    def is_rolling_back(self) -> bool:
        """Whether another state is being made durable in place of the present one, which then ends."""
        return self._rolled_to is not None

    def hold(self, now: float) -> str | None:
        """Why no round leaves OPEN, whoever has started; None: nothing is in the way."""
        if self.pause_reason is not None:
            return f"the run is paused: {self.pause_reason}"
        if self.storage_problem is not None:
            return f"the syncer cannot write to its store: {self.storage_problem}"
        awaited = self.awaited(now)
        if awaited:
            more = f" and {len(awaited) - 4} more" if len(awaited) > 4 else ""
            return f"the syncer was started again; waiting for {', '.join(awaited[:4])}{more} to attach again"
        return None

    def awaited(self, now: float) -> tuple[str, ...]:
        """Learners that were live when the syncer was stopped, are not here yet, and are still waited for."""
        if now >= self.attach_until:
            return ()
        live = self.machine.membership.live()
        return tuple(record.learner for record in live if record.awaited and not record.attached)

    def on_command(self, event: Command, now: float) -> list[fx.Effect]:
        """Takes a command; every one of them is answered."""
        if self.is_rolling_back:
            text = "the run is being rolled back; call again"
            return [fx.Answer(event.request, fx.Refusal("NOT_READY", text))]
        match event:
            case ev.PauseRequested():
                return self._on_pause(event)
            case ev.ResumeRequested():
                return self._on_resume(event)
            case ev.FinishRequested():
                return self._on_finish(event, now)
            case ev.DrainRequested():
                return self._on_drain(event)
            case ev.EvictRequested():
                return self._on_evict(event)
            case ev.ReadmitRequested():
                return self._on_readmit(event)
            case ev.RollBackRequested():
                return self._on_roll_back(event, now)

    def _refusal_at_end(self, request: int, verb: str) -> list[fx.Effect]:
        text = f"the run is {self.machine.phase}; it cannot {verb}"
        return [fx.Answer(request, fx.Refusal("WRONG_STATE", text))]

    @property
    def _is_ending(self) -> bool:
        return self.machine.phase in (RunPhase.FINISHING, RunPhase.FINISHED)

    # ---- pause and resume --------------------------------------------------------------------------------------------

    def _on_pause(self, event: ev.PauseRequested) -> list[fx.Effect]:
        if self._is_ending:
            return self._refusal_at_end(event.request, "pause")
        effects: list[fx.Effect] = [fx.Answer(event.request, None)]
        if self.pause_reason is not None:
            return effects
        self.pause_reason = event.reason or "an operator paused the run"
        reason, live = self.pause_reason, self.machine.membership.live()
        effects += [fx.PauseLearner(record.learner, record.incarnation, reason) for record in live]
        return [*effects, fx.Note("run_paused", self.pause_reason)]

    def _on_resume(self, event: ev.ResumeRequested) -> list[fx.Effect]:
        if self._is_ending:
            return self._refusal_at_end(event.request, "resume")
        effects: list[fx.Effect] = [fx.Answer(event.request, None)]
        if self.pause_reason is None:
            return effects
        self.pause_reason = None
        live = self.machine.membership.live()
        effects += [fx.ResumeLearner(record.learner, record.incarnation) for record in live]
        return [*effects, fx.Note("run_resumed", "the run goes on")]

    # ---- finish ------------------------------------------------------------------------------------------------------

    def _on_finish(self, event: ev.FinishRequested, now: float) -> list[fx.Effect]:
        answer = fx.Answer(event.request, None)
        if self._is_ending:
            return [answer]
        if self.rolling_back is not None:  # its last rounds would be those of the state that is given up
            text = f"the run is being rolled back to {self.rolling_back.checkpoint}; call again"
            return [fx.Answer(event.request, fx.Refusal("NOT_READY", text))]
        return [answer, *self.begin_finish(event.reason or "an operator finished the run", now)]

    def begin_finish(self, reason: str, now: float) -> list[fx.Effect]:
        """One last round per fragment, at once: learners stop stepping and answer with what they have."""
        machine = self.machine
        self.finish_reason, self.pause_reason = reason, None
        self.finish_until = now + machine.policy.deadlines.drain_seconds_max
        effects: list[fx.Effect] = [fx.Note("run_finishing", reason)]
        initialized = bool(machine.versions)
        machine.phase = RunPhase.FINISHING
        live = machine.membership.live()
        effects += [fx.DrainLearner(record.learner, record.incarnation, reason, leave=False) for record in live]
        if not initialized:
            return effects
        for item in machine.rounds.in_order():
            item.final = item.final or item.state is RoundState.OPEN
            effects += [effect for record in live for effect in machine.contributions.ask(item, record)]
        step = max(machine.global_step - 1, 0)
        busy = machine.rounds.busy_fragments()
        for _ in range(machine.policy.fragment_count - len(busy)):
            while machine.rounds.newest_opened % machine.policy.fragment_count in busy:
                machine.rounds.newest_opened += 1
            effects += machine.open_round(now, final_step=step)
        return effects

    def end_if_done(self, now: float) -> list[fx.Effect]:
        """The run is over once its last rounds are, or their time is; a store that cannot write is waited for."""
        machine = self.machine
        if machine.rounds.under_way and (now < self.finish_until or self.storage_problem is not None):
            machine.wake(self.finish_until if now < self.finish_until else None)
            return []
        effects = machine.abandon_rounds("the run's time to finish is over", now)
        if machine.rounds.under_way:
            return effects  # a merge is under way; its end brings us back here
        for record in machine.membership.with_role():
            if not record.left and not record.must_join_again:
                accounts.settle_gone(machine.ledger, record, {}, "died" if record.lost else "left")
        machine.phase = RunPhase.FINISHED
        reason = self.finish_reason or ""
        effects.append(fx.EndRun(reason, machine.global_step))
        for record in machine.membership.everybody():
            if record.has_lease():
                effects.append(fx.FinishLearner(record.learner, record.incarnation, reason, machine.global_step))
        return [*effects, fx.Note("run_finished", reason)]

    # ---- learners ----------------------------------------------------------------------------------------------------

    def _unknown(self, request: int, learner: str) -> list[fx.Effect]:
        known = ", ".join(r.learner for r in self.machine.membership.everybody() if not r.left) or "nobody"
        return [fx.Answer(request, fx.Refusal("NOT_FOUND", f"{learner!r} is not registered; registered: {known}"))]

    def _on_drain(self, event: ev.DrainRequested) -> list[fx.Effect]:
        record = self.machine.membership.learners.get(event.learner)
        if record is None or record.left:
            return self._unknown(event.request, event.learner)
        reason = event.reason or "an operator drains it"
        answer = fx.Answer(event.request, None)
        if record.draining:
            return [answer]
        if record.role is Role.LEARNER and record.has_lease():
            record.draining, record.drain_reason = True, reason
            drain = fx.DrainLearner(record.learner, record.incarnation, reason, leave=True)
            return [answer, drain, fx.Note("learner_draining", f"{record.learner}: {reason}")]
        return [answer, *self.machine.admissions.depart(record, reason, "left")]

    def _on_evict(self, event: ev.EvictRequested) -> list[fx.Effect]:
        reason = event.reason or "no reason was given"
        record = self.machine.membership.learners.get(event.learner)
        if record is None and event.learner not in self.machine.membership.evicted:
            return self._unknown(event.request, event.learner)
        self.machine.membership.evicted.setdefault(event.learner, reason)
        effects: list[fx.Effect] = [fx.Answer(event.request, None)]
        if record is not None and not record.left:
            effects += self.machine.admissions.depart(record, f"an operator evicted it: {reason}", "left")
        return effects

    def _on_readmit(self, event: ev.ReadmitRequested) -> list[fx.Effect]:
        if self.machine.membership.evicted.pop(event.learner, None) is None:
            evicted = ", ".join(sorted(self.machine.membership.evicted)) or "nobody"
            text = f"{event.learner!r} is not evicted; evicted: {evicted}"
            return [fx.Answer(event.request, fx.Refusal("NOT_FOUND", text))]
        return [fx.Answer(event.request, None), fx.Note("learner_readmitted", f"{event.learner} may join again")]

    # ---- roll back ---------------------------------------------------------------------------------------------------

    def _on_roll_back(self, event: ev.RollBackRequested, now: float) -> list[fx.Effect]:
        machine = self.machine
        if self._is_ending:
            return self._refusal_at_end(event.request, "roll back")
        if not machine.versions or len(event.cut.versions) != len(machine.versions):
            counts = f"{len(event.cut.versions)} fragments, the run {len(machine.versions)}"
            text = f"checkpoint {event.checkpoint} has {counts}"
            return [fx.Answer(event.request, fx.Refusal("WRONG_STATE", text))]
        if self.rolling_back is not None:
            text = f"the run is being rolled back to {self.rolling_back.checkpoint} already"
            return [fx.Answer(event.request, fx.Refusal("WRONG_STATE", text))]
        self.rolling_back = event
        return machine.abandon_rounds(f"the run is rolled back to checkpoint {event.checkpoint}", now)

    def roll_back_if_quiet(self) -> list[fx.Effect]:
        """Begins once no merge or commit is under way any more; no round opens meanwhile."""
        event, machine = self.rolling_back, self.machine
        if event is None or self._rolled_to is not None or machine.rounds.under_way:
            return []
        reason = f"the run was rolled back to checkpoint {event.checkpoint}"
        state = in_new_timeline(event.cut, run_state(machine), machine.policy, reason)
        self._rolled_to = replace(state, phase=RunPhase.RUNNING, finish_reason=None)
        return [fx.RollBack(event.checkpoint, self._rolled_to)]

    def on_rolled_back(self, now: float) -> list[fx.Effect]:
        """The old state has gone: everybody joins again."""
        machine, event, state = self.machine, self.rolling_back, self._rolled_to
        assert event is not None
        assert state is not None
        leased = [record for record in machine.membership.everybody() if record.has_lease()]
        self.rolling_back = self._rolled_to = None
        load(machine, state, now)
        reason = f"the run was rolled back to checkpoint {event.checkpoint}"
        effects: list[fx.Effect] = [fx.Answer(event.request, None)]
        effects += [fx.PublishFragment(p, version, step) for p, version, step in machine.published()]
        effects += [fx.ExpireLearner(record.learner, record.incarnation, reason) for record in leased]
        text = f"{reason}: global step {machine.global_step}, timeline {machine.timeline}; {event.reason}"
        return [*effects, fx.Note("run_rolled_back", text, "warning")]

    def on_roll_back_failed(self, event: ev.RollBackFailed) -> list[fx.Effect]:
        """The present state stays."""
        request, self.rolling_back, self._rolled_to = self.rolling_back, None, None
        assert request is not None
        text = f"the run could not be rolled back to {request.checkpoint}: {event.reason}; it goes on as it was"
        return [fx.Answer(request.request, fx.Refusal("INTERNAL", text)), fx.Note("roll_back_failed", text, "warning")]

    # ---- the store ---------------------------------------------------------------------------------------------------

    def on_storage(self, event: ev.StorageFailed | ev.StorageRecovered) -> list[fx.Effect]:
        """Rounds wait while the store cannot write; learners train on."""
        before = self.storage_problem
        self.storage_problem = event.reason if isinstance(event, ev.StorageFailed) else None
        if self.storage_problem is not None and before is None:
            text = f"{self.storage_problem}; no round is committed until the store can write, learners train on"
            return [fx.Note("storage_failed", text, "error")]
        if self.storage_problem is None and before is not None:
            return [fx.Note("storage_recovered", "the store can write again; rounds go on")]
        return []
