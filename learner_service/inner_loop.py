"""The learner service's own training loop, the first caller of `session`: steps on its data, and nothing else."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator

import jax

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.tree import Params
from decoupled_diloco.core.ids import Activity
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger
from learner_service.session import Session
from learner_service.step import InnerStep, OptimizerState
from learner_service.workload import Batch, Workload

log = get_logger(__name__)


class WarmUp:
    """The ramp of the learning rate after the optimizer's state was made anew in the middle of a run.

    Args:
        step_count: length of the ramp, >= 0.
    """

    def __init__(self, step_count: int) -> None:
        self._step_count = step_count
        self._left_count = 0

    def begin(self) -> None:
        """The state is fresh."""
        self._left_count = self._step_count

    def next_share(self) -> float:
        """What the rate of the next step is multiplied by, above 0 and at most 1."""
        if self._left_count <= 0:
            return 1.0
        share = (self._step_count - self._left_count + 1) / self._step_count
        self._left_count -= 1
        return share


class InnerLoop:
    """Trains one workload within one session.

    Args:
        workload: what is trained.
        step: its compiled step.
        session: the way into the run; entered already.
        warm_up: ramp after a recovery.
        step_seconds_min: every step is made to last at least this long.
        clock: instants.
        wait: lets time pass.
    """

    def __init__(
        self,
        workload: Workload,
        step: InnerStep,
        session: Session,
        warm_up: WarmUp,
        step_seconds_min: float,
        clock: Clock,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._workload = workload
        self._step = step
        self._session = session
        self._warm_up = warm_up
        self._step_seconds_min = step_seconds_min
        self._clock = clock
        self._wait = wait
        self._batches: Iterator[Batch] = iter(())
        self._position: tuple[int, int] | None = None

    def prepare(self, params: Params, device: DeviceFragments) -> tuple[Params, OptimizerState]:
        """Compiles everything while the network thread joins and downloads; donates `params`."""
        with self._session.activity(Activity.COMPILE):
            state = self._step.fresh_state(params)
            self._step.compile(params, state, next(self._workload.data(0, 0)))
            params = device.warm(params)
            # What start-up made stays; without this the collector would go through all of it between steps.
            gc.collect()
            gc.freeze()
            gc.enable()
        log.info("programs_ready")
        return params, state

    def run(self, params: Params, state: OptimizerState) -> Params:
        """Trains until the run has finished or this learner has left; returns the newest parameters."""
        session = self._session
        params, state = session.start(params, optimizer_state=state)
        if session.schedule_step > 0 and not session.optimizer_recovered:
            self._warm_up.begin()
        while not session.finished:
            batch = self._next_batch()
            began = self._clock.now()
            if not self._step.is_compiled_for(batch):
                with session.activity(Activity.COMPILE):
                    self._step.compile(params, state, batch)
            rate = self._workload.learning_rate(session.schedule_step) * self._warm_up.next_share()
            params, state, loss = self._step(params, state, batch, rate)
            session.step_under_way()
            self._pad(began, loss)
            tokens = self._workload.batch_tokens(batch)
            params, state = session.step_boundary(params, tokens=tokens, loss=loss, optimizer_state=state)
            if session.restart_optimizer:
                state = self._step.fresh_state(params)
                self._warm_up.begin()
        return params

    def _next_batch(self) -> Batch:
        """The batch that the session's slot and cursor name."""
        position = (self._session.slot, self._session.cursor)
        with self._session.activity(Activity.DATA_WAIT):
            if position != self._position:
                log.info("data_opened", slot=position[0], cursor=position[1])
                self._batches = iter(self._workload.data(*position))
            batch = next(self._batches)
        self._position = (position[0], position[1] + 1)
        return batch

    def _pad(self, began: float, loss: jax.Array) -> None:
        """Makes the step last as long as that of slower hardware would, without using the processor."""
        if self._step_seconds_min <= 0.0:
            return
        jax.block_until_ready(loss)
        while (left := began + self._step_seconds_min - self._clock.now()) > 0.0:
            self._wait(left)
