"""A training loop's way into a run: library mode, and the engine of the learner service.

    with decoupled_diloco.learner("run.toml", params, learner_id="eu-1") as d:
        params, state = d.start(params, optimizer_state=state)    # the run's parameters
        while not d.finished:
            params, state, loss = step(params, state, next(batches), schedule(d.schedule_step))
            params, state = d.step_boundary(params, tokens=batch_tokens, loss=loss, optimizer_state=state)
            if d.restart_optimizer:
                state = optimizer.init(params)

`step_boundary` never waits for the network, except while a hold lasts: the run is paused or finishes, this learner has
to recover, or the barrier is on. Parameters may be any pytree; its floating-point arrays are exchanged, all else stays.

The optimizer's state may be left out; both calls then return the parameters alone. With it, a learner that recovers
gets the state of a peer (`optimizer_recovered`), and others get this one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from decoupled_diloco.arrays.device import DeviceCopy, DeviceFragments, OpenParams
from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragmentation
from decoupled_diloco.arrays.optimizer_fragments import OptimizerState
from decoupled_diloco.arrays.tree import Params
from decoupled_diloco.core.errors import DecoupledDilocoError
from decoupled_diloco.core.ids import Activity
from decoupled_diloco.core.learner_effects import Hold
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.wire.peer import CopyName
from learner_service.driver import LearnerDriver
from learner_service.handed_over import Arrived, Plan
from learner_service.handover import Handover
from learner_service.losses import LossMeter, wait_on_cpu
from learner_service.metrics import LearnerMetrics
from learner_service.network_plan import NetworkPlan
from learner_service.optimizer_copies import Boundary, OptimizerCopies
from learner_service.optimizer_exchange import OptimizerExchange
from learner_service.recoveries import FINITE_STEPS_MIN, RECOVERIES_IN_A_ROW_MAX, DivergedError, RecoveryWatch

log = get_logger(__name__)

_ACTIVITY_OF_HOLD = {
    Hold.RECOVERING: Activity.RECOVER,
    Hold.PAUSED: Activity.PAUSED,
    Hold.DETACHED: Activity.PAUSED,
    Hold.BARRIER: Activity.SYNC_STALL,
    Hold.DRAINING: Activity.DRAINING,
    Hold.FINISHED: Activity.DRAINING,
}


class LearnerStoppedError(DecoupledDilocoError):
    """The learner cannot go on: the syncer refused it, or the network thread has died. `cause` says why."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What a session is put together from; `app` and `library` do that.

    Attributes:
        network: what the network thread is built from.
        device: copies and applies.
        fragmentation: of the parameters.
        policy: the run's, by the learner's own run file.
        handover: what the two threads share.
        metrics: the learner's.
        clock: instants.
        verifies_applied: reads every applied version back and compares it; for tests, it doubles the copies.
    """

    network: NetworkPlan
    device: DeviceFragments
    fragmentation: Fragmentation
    policy: Policy
    handover: Handover
    metrics: LearnerMetrics
    clock: Clock
    verifies_applied: bool = False


class Session:
    """One learner in one run, as its training loop sees it. Used by one thread, as a context manager.

    Args:
        params: initial parameters; used only if this learner is the one that is asked for them.
        parts: see there.

    Attributes:
        restart_optimizer: true after a boundary at which the parameters were taken anew from the run, so that the
            optimizer's state belongs to values that are gone, and no other one was found.
        optimizer_recovered: true after a boundary (or `start`) that returned the state of a peer or of a snapshot.
    """

    def __init__(self, params: Params, parts: SessionParts) -> None:
        self._parts = parts
        self._handover = parts.handover
        self._losses = LossMeter(parts.handover.add_loss)
        self._initial: dict[int, DeviceCopy] = parts.device.copy(params, range(len(parts.fragmentation.fragments)))
        copies = OptimizerCopies()
        self._driver = LearnerDriver(
            parts.network, parts.handover, copies, self._initial_values, parts.metrics, parts.clock
        )
        self._optimizer = OptimizerExchange(
            parts.fragmentation,
            copies,
            self._driver.recover_optimizer,
            parts.handover.wake_device,
            parts.network.peers.serves,
        )
        self._watch = RecoveryWatch("the training loss is not finite", FINITE_STEPS_MIN, parts.clock)
        self._params: Params | None = params
        self._is_open = False
        self._is_started = False
        self._finished = False
        self._hold: Hold | None = None
        self.restart_optimizer = False
        self.optimizer_recovered = False

    # ---- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self._driver.start()
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._driver.close(f"the learner stops{'' if kind is None else f' after a {kind.__name__}'}")
        self._handover.journal.close()

    def start(self, params: Params | None = None, *, optimizer_state: OptimizerState | None = None) -> Any:
        """Waits for the run's parameters and returns them in place of `params`; with a state, (parameters, state).

        May be left out: the first `step_boundary` does the same, and the step before it is lost.

        Args:
            params: what to write them into (donated); default: the parameters that the session was made with.
            optimizer_state: fresh state for them (donated), which that of a peer is written into if the run has begun.

        Raises:
            LearnerStoppedError: the syncer refuses this learner.
        """
        return self._boundary(self._parts.device.open(self._params if params is None else params), optimizer_state)

    @property
    def params(self) -> Params:
        """The run's parameters, to begin with: what `start()` returns. Only before the first step."""
        if not self._is_started:
            self._params = self.start()
        if self._params is None:
            raise RuntimeError("params are those to begin with; go on with what step_boundary returned")
        return self._params

    def step_boundary(
        self, params: Params, *, tokens: int, loss: Any = None, optimizer_state: OptimizerState | None = None
    ) -> Any:
        """To be called after every inner step, with its parameters; returns those to go on with.

        Leaves that a new version was written to are donated: use the returned parameters, never the old ones. The same
        holds for the optimizer's state; with it, (parameters, state) is returned.

        Args:
            params: the parameters after the step.
            optimizer_state: the inner optimizer's state after the step, any pytree. Give it at every boundary or never.
            tokens: tokens (or examples) of the step's batch, at least 1.
            loss: the step's mean training loss, a number or a scalar array; None: not known. What is not finite makes
                this learner start over from published versions.

        Raises:
            LearnerStoppedError: the syncer refuses this learner, or the network thread has died.
            DivergedError: this learner started over again and again, and its loss did not become finite.
            SchemaError: a parameter's shape or type is not what it was.
            RuntimeError: there are no more steps to make: `finished` is true, or the `with` block was left.
        """
        if self._finished or not self._is_open:
            raise RuntimeError(
                f"step_boundary was called although this learner has finished ({self.end_reason}); make steps only "
                "while `finished` is false"
                if self._finished
                else "step_boundary was called outside of the session's `with` block; make all steps inside of it"
            )
        if tokens < 1:
            raise ValueError(f"tokens = {tokens}: a step has at least 1")
        self._handover.wake_if_due()
        opened = self._parts.device.open(params)
        opened.copy_ahead(self._handover.likely_copies)
        self._params = None
        if loss is None:
            wait_on_cpu(params)
        elif self._losses.settle(loss, self._handover.cursor):
            self._watch.finite()
        else:
            self._recover()
        self._handover.finish_step(tokens)
        return self._boundary(opened, optimizer_state)

    def step_under_way(self) -> None:
        """May be called in every step, once its computation is enqueued on the devices.

        The network thread then takes up what the last boundary left for it while this one waits for the devices, and
        not while it prepares the step. Whoever calls it once has to call it in every step.
        """
        self._handover.step_under_way()

    def drain(self, reason: str) -> None:
        """Leaves the run in good order: the next boundary makes no more steps possible. May be called by any thread."""
        self._driver.drain(reason)

    @contextmanager
    def activity(self, activity: Activity) -> Iterator[None]:
        """Books the time inside to an activity, for example `Activity.DATA_WAIT`."""
        before = self._handover.enter(activity)
        try:
            yield
        finally:
            self._handover.enter(before)

    # ---- what it shows -----------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether no more steps are to be made: the run has finished, or this learner has left."""
        return self._finished

    @property
    def end_reason(self) -> str:
        """Why it is finished, in words."""
        return self._driver.end_reason or ""

    @property
    def schedule_step(self) -> int:
        """The global step that this learner has reached, for learning-rate schedules; never goes back."""
        return self._handover.schedule_step

    @property
    def slot(self) -> int:
        """The data slot to train on; known after `start`."""
        return self._joined().slot

    @property
    def cursor(self) -> int:
        """The number of the next batch of that slot. May jump when the learner had to join again."""
        return self._handover.cursor

    @property
    def incarnation(self) -> int:
        """The fencing token of this start; known after `start`."""
        return self._joined().incarnation

    @property
    def paused(self) -> bool:
        """Whether the newest boundary was held by a pause."""
        return self._hold in (Hold.PAUSED, Hold.DETACHED)

    @property
    def policy(self) -> Policy:
        """The run's policy."""
        return self._driver.joined.policy if self._driver.joined is not None else self._parts.policy

    @property
    def step_seconds(self) -> float | None:
        """Smoothed duration of a step."""
        return self._handover.snapshot().progress.step_seconds

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def _boundary(self, opened: OpenParams, state: OptimizerState | None) -> Any:
        self.restart_optimizer = self.optimizer_recovered = False
        while True:
            plan = self._handover.plan()
            self._carry_out(plan, opened)
            plan = self._look_for_optimizer(plan, opened, state)
            seconds = self._handover.publish(plan)
            if seconds is not None:
                self._parts.metrics.step_seconds.observe(seconds)
            self._note_hold(plan.hold)
            self._finished = self._driver.end_reason is not None
            if not self._finished:
                self._raise_failure()
            if self._finished:
                break
            if plan.hold is None:
                state = self._begin_step(state)
                break
            self._optimizer.serve(state, self._here)
            self._handover.enter(_ACTIVITY_OF_HOLD[plan.hold])
            self._handover.wait_for_news(plan)
        return opened.params if state is None else (opened.params, state)

    def _begin_step(self, state: OptimizerState | None) -> OptimizerState | None:
        """The last thing before a step; returns the optimizer's state to make it with."""
        if not self._is_started:
            self._is_started = True
            self._initial.clear()
        state, self.optimizer_recovered = self._optimizer.settle(state)
        self.restart_optimizer = self.restart_optimizer and not self.optimizer_recovered
        self._optimizer.serve(state, self._here)
        self._handover.begin_step()
        return state

    def _look_for_optimizer(self, plan: Plan, opened: OpenParams, state: OptimizerState | None) -> Plan:
        """Begins a recovery of the optimizer's state where one is due, and holds while it lasts."""
        if self._driver.joined is None:
            return plan
        self._optimizer.look(opened.params, state, self._driver.joined)
        if plan.restart_optimizer:
            self._optimizer.recover(state, "its parameters were taken anew", self._handover.snapshot().applied)
        waits = plan.hold is None and self._optimizer.is_waiting
        return replace(plan, hold=Hold.RECOVERING) if waits else plan

    def _here(self) -> Boundary:
        snapshot = self._handover.snapshot()
        return Boundary(CopyName(self.incarnation, snapshot.progress.local_step), snapshot.applied)

    def _recover(self) -> None:
        if self._watch.recovering():
            self._driver.recover("the training loss is not finite")
            return
        last = "there was no finite one" if self._losses.newest is None else f"the last one was {self._losses.newest:g}"
        raise DivergedError(
            f"the training loss was not finite {RECOVERIES_IN_A_ROW_MAX} times in a row, each time at most "
            f"{FINITE_STEPS_MIN} steps with a finite loss after this learner had started over from the run's "
            f"parameters; at slot {self.slot}, cursor {self._losses.judged} ({last}). Lower the inner learning rate "
            "or look at the data of this batch"
        )

    def _carry_out(self, plan: Plan, opened: OpenParams) -> None:
        for apply, arrived, since in plan.applies:
            if apply.rule == "carry" and since is not None:
                opened.carry(arrived.staged, since)
            elif apply.rule == "blend":
                opened.blend(arrived.staged, self._parts.policy.blend_alpha)
            else:
                opened.overwrite(arrived.staged)
                if self._parts.verifies_applied:
                    self._verify(opened, apply.fragment, arrived)
                if self._hold is Hold.RECOVERING or not self._is_started:
                    failpoints.hit("recovery.after_fragment")
        if plan.slots:
            copies = opened.copy([slot.copy.fragment for slot in plan.slots])
            for slot in plan.slots:
                slot.fill(copies[slot.copy.fragment])
            for upload in plan.uploads:  # what is only kept for a last call stays on the devices
                upload.slot.arrays().send_to_host()
        if plan.restart_optimizer:
            self.restart_optimizer = True
            self._losses.forget()
            self._parts.metrics.recoveries.inc()

    def _verify(self, opened: OpenParams, fragment: int, arrived: Arrived) -> None:
        """Compares what the devices hold with what the syncer published."""
        found = vector_digest(opened.copy((fragment,))[fragment].to_host())
        wanted = vector_digest(arrived.base)
        self._parts.metrics.verified_versions.inc()
        if found != wanted:
            self._parts.metrics.digest_mismatches.inc()
            log.error("digest_mismatch", fragment=fragment, found=found, wanted=wanted)

    def _note_hold(self, hold: Hold | None) -> None:
        is_news = hold is not self._hold and self._driver.joined is not None
        if is_news and Hold.BARRIER not in (hold, self._hold):
            log.info("holding" if hold is not None else "stepping", hold=hold.value if hold is not None else "")
        self._hold = hold

    def _raise_failure(self) -> None:
        if isinstance(self._driver.failure, DivergedError):
            raise self._driver.failure
        if self._driver.failure is not None:
            raise LearnerStoppedError(self._driver.failure) from self._driver.failure

    def _initial_values(self, fragment: int) -> FloatVector:
        return self._initial[fragment].to_host()

    def _joined(self) -> Any:
        if self._driver.joined is None:
            raise RuntimeError("this learner has not joined the run yet; call start first")
        return self._driver.joined
