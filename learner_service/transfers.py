"""The transfers of one incarnation: one task each, from what the machine asks for to what it is told in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragmentation, as_held
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Decline
from decoupled_diloco.core.learner_effects import Download
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger
from learner_service.bulk_client import BulkClient
from learner_service.downloader import Downloader, Held, VersionGoneError
from learner_service.handed_over import Action, Arrived, UploadJob
from learner_service.handover import Handover
from learner_service.metrics import LearnerMetrics
from learner_service.uploader import NotFiniteError, Sender, Uploader

log = get_logger(__name__)

VERSION_GONE_SECONDS = 0.2
"""Wait after a version was gone: news of the one that replaced it is on its way."""


@dataclass(frozen=True, slots=True)
class TransferHooks:
    """How transfers speak to their owner, on the network thread.

    Attributes:
        act: carry out what the machine wants next.
        decline: tell the syncer that there is nothing for a round.
        recover: start over from published versions, because what was to be sent is not finite.
        fail: a fault of this program; the network thread ends with it.
        contributed: a contribution was finite, and has its answer.
    """

    act: Callable[[list[Action]], None]
    decline: Callable[[int, Decline], None]
    recover: Callable[[str], None]
    fail: Callable[[BaseException], None]
    contributed: Callable[[], None]


class Transfers:
    """What moves for one incarnation.

    Args:
        client: the calls over the present bulk connection; asked again for each attempt.
        sender: whose uploads they are.
        fragmentation: of the learner's schema.
        device: where versions are staged.
        handover: where copies come from and versions go to.
        hooks: the owner.
        executor: for what takes CPU time.
        metrics: told about every transfer.
        clock: instants.
    """

    def __init__(
        self,
        client: Callable[[], BulkClient],
        sender: Sender,
        fragmentation: Fragmentation,
        device: DeviceFragments,
        handover: Handover,
        hooks: TransferHooks,
        executor: Executor,
        metrics: LearnerMetrics,
        clock: Clock,
    ) -> None:
        source = random.Random()
        self._uploader = Uploader(client, sender, executor, self._count_uploaded, source, log)
        self._downloader = Downloader(client, fragmentation.sizes, executor, self._count_downloaded, source, log)
        self._learner = sender.learner
        self._fragmentation = fragmentation
        self._device = device
        self._handover = handover
        self._hooks = hooks
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        self._generation = handover.generation
        self._tasks: dict[object, asyncio.Task[None]] = {}

    def upload(self, job: UploadJob) -> None:
        """Starts a contribution, unless it belongs to an earlier incarnation.

        The version that its round will bring is asked for beside it.
        """
        if job.generation == self._generation:
            self._downloader.expect(job.slot.copy.fragment, job.slot.copy.base)
            self._start(("upload", job.round), self._upload(job))

    def cancel_upload(self, round_number: int) -> None:
        """The round has ended."""
        self._cancel(("upload", round_number))

    def told(self, event: lev.LearnerEvent) -> None:
        """What happened to the learner; error feedback has to know of ended rounds and of recoveries."""
        if isinstance(event, lev.RoundEnded):
            is_merged = event.committed and self._learner in event.members
            self._uploader.round_closed(event.round, event.fragment, is_merged)
        elif isinstance(event, lev.RecoverAsked):
            self._uploader.forget_errors()

    def download(self, action: Download) -> None:
        """Starts a download."""
        self._start(("download", action.fragment), self._download(action))

    def upload_initial(self, values_of: Callable[[int], FloatVector], seeds: Mapping[int, Arrived]) -> None:
        """Starts the upload of all fragments: `seeds` where there are any, else the learner's own initial values."""
        self._start("initial", self._upload_initial(values_of, seeds))

    def cancel_all(self) -> None:
        """The incarnation is over."""
        for key in list(self._tasks):
            self._cancel(key)
        self._downloader.close()

    # ---- tasks -------------------------------------------------------------------------------------------------------

    def _start(self, key: object, work: Coroutine[object, object, None]) -> None:
        """Runs a transfer; one of the same key that still runs is replaced."""
        self._cancel(key)
        task = asyncio.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._finished(key, done))

    def _finished(self, key: object, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._hooks.fail(error)

    def _cancel(self, key: object) -> None:
        if (task := self._tasks.pop(key, None)) is not None:
            task.cancel()

    async def _upload(self, job: UploadJob) -> None:
        began, fragment = self._clock.now(), job.slot.copy.fragment
        tell = partial(self._handover.journal.fate, job.generation, job.round, fragment)
        self._handover.journal.contribution(job.generation, job.round, job.slot.copy)
        try:
            fate = await self._uploader.contribute(job)
        except asyncio.CancelledError:
            tell("cancelled")
            raise
        except NotFiniteError as error:
            tell("not_sent")
            self._metrics.count_refused()
            self._hooks.decline(job.round, Decline.NONFINITE)
            self._hooks.recover(f"its contribution to round {job.round} was not sent: {error}")
            return
        tell(fate)
        self._hooks.contributed()
        self._metrics.observe_upload(fate, job.base.size, self._clock.now() - began)
        log.debug("contribution_answered", round=job.round, fragment=fragment, fate=str(fate))

    async def _download(self, action: Download) -> None:
        fragment, version = action.fragment, action.version
        arrived = self._handover.version(fragment, version)
        if arrived is None:
            try:
                arrived = await self._fetched(action)
            except VersionGoneError as error:
                log.info("version_gone", fragment=fragment, version=str(version), reason=str(error))
                await asyncio.sleep(VERSION_GONE_SECONDS)
                self._tasks.pop(("download", fragment), None)
                self._hooks.act(self._handover.handle(lev.DownloadFailed(fragment, version)))
                return
        failpoints.hit("download.after_fetch")
        # What comes next may be another download of this fragment; this task is over.
        self._tasks.pop(("download", fragment), None)
        self._hooks.act(self._handover.arrive(fragment, version, action.global_step, arrived))

    async def _fetched(self, action: Download) -> Arrived:
        fragment, held = action.fragment, action.held
        kept = self._handover.version(fragment, held) if held is not None else None
        base = Held(held, kept.staged.flat) if held is not None and kept is not None else None
        began = self._clock.now()
        arrived = await self._downloader.fetch_and(
            fragment, action.version, base, lambda values: self._staged(fragment, values, began)
        )
        self._metrics.observe_download(arrived.base.size, self._clock.now() - began)
        return arrived

    def _staged(self, fragment: int, values: FloatVector, began: float) -> Arrived:
        """Puts a version on the devices. On a transfer thread, or on the network thread where it is little."""
        staged = self._device.stage(fragment, values)
        base = as_held(self._fragmentation.fragments[fragment], values)
        return Arrived(staged, base, self._clock.now() - began)

    async def _upload_initial(self, values_of: Callable[[int], FloatVector], seeds: Mapping[int, Arrived]) -> None:
        if seeds:
            log.warning("seeding_again", reason="the syncer has lost the run's state; it gets the newest held here")
        loop = asyncio.get_running_loop()
        for fragment in range(len(self._fragmentation.fragments)):
            seed = seeds.get(fragment)
            if seed is not None:
                values = seed.staged.flat
            else:
                values = await loop.run_in_executor(self._executor, values_of, fragment)
            if not await self._uploader.send_initial(fragment, values):
                return
        log.info("initial_parameters_sent")

    def _count_uploaded(self, count: int) -> None:
        self._handover.uploaded_bytes += count

    def _count_downloaded(self, count: int) -> None:
        self._handover.downloaded_bytes += count
