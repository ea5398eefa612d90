"""Keeps the run's state durable: saves before answers that must hold, and what to do when the store cannot write.

While the store cannot write, no round goes on and nobody new gets an incarnation; learners train on. The store is tried
again until it can. A syncer whose store was taken over by another one stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest, TaskSupervisor
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.serving import Serving
from syncer_service.store.interface import FencedError, RunModel, StorageError, Store

PROBE_SECONDS: Final = 1.0
"""Between two attempts to write to a store that could not."""

Result = TypeVar("Result")

log = get_logger(__name__)


class Persistence:
    """The way into the store. For the event loop's thread.

    Args:
        serving: The parts that it works with.
        tasks: Runs what takes time.
        stop: Requested when the store belongs to another syncer.
    """

    def __init__(self, serving: Serving, tasks: TaskSupervisor, stop: StopRequest) -> None:
        self._serving = serving
        self._store: Store = serving.store
        self._tasks = tasks
        self._stop = stop
        self._can_write = asyncio.Event()
        self._can_write.set()

    async def save(self) -> None:
        """Makes the run's state of now durable, for an answer that must hold.

        Raises:
            PeerError: OVERLOADED, when the store cannot write now; SHUTTING_DOWN, when it is another syncer's.
        """
        steering = self._serving.machine.steering
        await self._serving.driver.wait_until(lambda: not steering.is_rolling_back)
        state = self._serving.machine.run_state()
        await self._answerable(lambda: self._store.save_state(state))

    async def save_model(self) -> None:
        """Makes durable what the learners have agreed on.

        Raises:
            PeerError: As `save` does.
        """
        agreement = self._serving.agreement
        model = RunModel(agreement.known().schema.to_dict(), agreement.fingerprint, agreement.first_learner)
        await self._answerable(lambda: self._store.save_model(model))

    async def write(self, work: Callable[[], Result]) -> Result:
        """Has the store write something.

        Raises:
            StorageError: It cannot write now; the machine has been told.
            FencedError: The store is not this syncer's any more; the process stops.
        """
        return await self.settled(self.begin(work))

    def begin(self, work: Callable[[], Result]) -> asyncio.Future[Result]:
        """Hands work to the store; `settled` has to follow."""
        return asyncio.get_running_loop().run_in_executor(self._serving.executors.store, work)

    async def settled(self, writing: asyncio.Future[Result]) -> Result:
        """What came of work that was begun.

        Raises:
            StorageError: As `write` does.
            FencedError: As `write` does.
        """
        try:
            return await writing
        except StorageError as error:
            self._failed(error)
            raise
        except FencedError as error:
            self._stop.request(str(error), ExitCode.FAILED)
            raise

    async def write_when_possible(self, work: Callable[[], Result]) -> Result:
        """Has the store write something, again and again while there is no room.

        Raises:
            FencedError: As `write` does.
        """
        while True:
            try:
                return await self.write(work)
            except StorageError:
                await self._can_write.wait()

    async def _answerable(self, work: Callable[[], None]) -> None:
        try:
            await self.write(work)
        except StorageError as error:
            text = f"the syncer cannot write to its store: {error}; call again"
            raise PeerError(Reason.OVERLOADED, text, retry_seconds=PROBE_SECONDS) from error
        except FencedError as error:
            raise PeerError(Reason.SHUTTING_DOWN, str(error)) from error

    def _failed(self, error: StorageError) -> None:
        self._serving.driver.report(ev.StorageFailed(str(error)))
        if self._can_write.is_set():
            self._can_write.clear()
            self._tasks.start(self._probe(), "waiting until the store can write", may_finish=True)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            try:
                await self._serving.in_store(self._store.probe)
            except StorageError as error:
                self._serving.driver.report(ev.StorageFailed(str(error)))
            except FencedError as error:
                self._stop.request(str(error), ExitCode.FAILED)
                return
            else:
                self._serving.driver.report(ev.StorageRecovered())
                self._can_write.set()
                return
