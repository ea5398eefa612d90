"""What the handlers of the data port share: the driver, the tables, and the small checks that every call needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc.aio

from decoupled_diloco.arrays.fragments import Fragmentation
from decoupled_diloco.arrays.stripes import LoopThreads
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.wire import status
from syncer_service.agreement import Agreement
from syncer_service.driver import Driver
from syncer_service.metrics import SyncerMetrics
from syncer_service.publications import Publications
from syncer_service.sessions import Sessions
from syncer_service.store.interface import Store
from syncer_service.uploads import Uploads

BYTES_MOVED_SECONDS: Final = 1.0
"""A transfer tells the machine that it moves at most this often."""

END_OF_STREAM: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # not in the stubs
"""What reading from a stream gives when the caller has ended it."""

Result = TypeVar("Result")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Executors:
    """Threads by what they do, so that one kind of work cannot starve another.

    Attributes:
        bulk: Encoding and checksums of what is published, looks at what has arrived.
        merge: Merges and outer steps, one at a time.
        merge_loops: The threads that share the loops of the present one.
        store: The one thread that may call the store.
    """

    bulk: Executor
    merge: Executor
    merge_loops: LoopThreads
    store: Executor


@dataclass(frozen=True, slots=True)
class Serving:
    """Everything that the handlers need."""

    machine: SyncerMachine
    driver: Driver
    clock: Clock
    agreement: Agreement
    store: Store
    executors: Executors
    uploads: Uploads
    publications: Publications
    sessions: Sessions
    metrics: SyncerMetrics
    epoch: int = 1
    """Which start of the syncer on this run's state it is."""

    def require_joined(self, learner: str, incarnation: int) -> None:
        """Refuses calls of incarnations that are not, or no longer, part of the run.

        Raises:
            PeerError: NOT_JOINED or STALE_INCARNATION.
        """
        refusal = self.machine.admits(learner, incarnation)
        if refusal is not None:
            raise status.error_of(refusal)

    def model_agreed(self, fragmentation: Fragmentation) -> None:
        """The first learner has brought the model: the accounts can weigh fragments by their size."""
        size = fragmentation.schema.size
        self.driver.report(ev.ModelAgreed(tuple(count / size for count in fragmentation.sizes)))
        log.info(
            "model_agreed",
            tensors=len(fragmentation.schema.tensors),
            parameters=size,
            fragments=len(fragmentation.fragments),
            imbalance=round(fragmentation.imbalance, 3),
        )

    def movement(self, learner: str, incarnation: int, round_number: int | None) -> Movement:
        """A stop-watch for one transfer."""
        return Movement(self, learner, incarnation, round_number)

    async def in_store(self, work: Callable[[], Result]) -> Result:
        """Runs work in the store's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executors.store, work)


class Movement:
    """Tells the machine that a transfer moves, and times it."""

    def __init__(self, serving: Serving, learner: str, incarnation: int, round_number: int | None) -> None:
        self._serving = serving
        self._learner = learner
        self._incarnation = incarnation
        self._round = round_number
        self._started_at = self._told_at = serving.clock.now()

    def moved(self) -> None:
        """Bytes moved."""
        now = self._serving.clock.now()
        if now - self._told_at >= BYTES_MOVED_SECONDS:
            self._told_at = now
            self._serving.driver.offer_now(ev.BytesMoved(self._learner, self._incarnation, self._round))

    def ended(self, direction: str, size_bytes: int) -> None:
        """The transfer is whole."""
        seconds = self._serving.clock.now() - self._started_at
        self._serving.metrics.transferred(direction, size_bytes, seconds)
        log.debug(
            f"{direction}_ended",
            learner=self._learner,
            round=self._round,
            bytes=size_bytes,
            seconds=round(seconds, 4),
            megabytes_per_second=round(size_bytes / 1e6 / seconds, 1) if seconds > 0 else None,
        )


async def carried_out(executor: Executor, work: Callable[[], Result]) -> Result:
    """The result of work in an executor; as `completed`."""
    return await completed(asyncio.get_running_loop().run_in_executor(executor, work))


async def completed(work: asyncio.Future[Result]) -> Result:
    """The result of work that an executor does.

    A cancelled caller still waits until the work has ended, so that its buffer is not reused under it.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        if not work.done():
            await asyncio.wait([work])
        raise
