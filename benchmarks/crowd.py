"""Many learners without a model in one process, each a whole learner to the syncer.

    async with Crowd(syncer, 64, schema, step_seconds=1.0) as crowd:
        await crowd.committed(24)                    # the run has so many committed rounds

Each has its own connections, its own incarnation and the core's learner machine; a "step" is a wait. What it sends is
one payload per fragment, encoded once for all of them, and what it receives is verified and thrown away.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, Final, Self

import numpy as np

from benchmarks.syncer_rig import SyncerProcess
from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_effects as le
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.core.ids import Activity, Role
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.channel import open_channels
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.wire.control import Report
from learner_service.bulk_client import BulkClient, Receipt
from learner_service.downloader import DOWNLOADS_MAX
from learner_service.syncer_client import ControlStream, JoinRequest, SyncerClient

TOKENS_PER_STEP: Final = 100
WAIT_SECONDS: Final = 120.0
"""A round that is not committed after this long will not be."""


class CrowdLearner:
    """One incarnation of a learner.

    Args:
        crowd: What all of them share.
        name: Its id.
        phase: Where in a step it begins, 0 to 1, so that they do not all step at the same instant.
    """

    def __init__(self, crowd: Crowd, name: str, phase: float) -> None:
        self._crowd = crowd
        self._name = name
        self._phase = phase
        self._wake = asyncio.Event()
        self._reports: asyncio.Queue[Report] = asyncio.Queue()
        self._work: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(DOWNLOADS_MAX)

    async def run(self) -> None:
        """From the join until it is cancelled, or the run ends."""
        crowd, config = self._crowd, self._crowd.syncer.config
        channels = open_channels(parse_address(crowd.syncer.address), None)
        try:
            client = SyncerClient(channels.control, self._name)
            policy = config.to_policy()
            joined = await client.join(
                JoinRequest(
                    config.run.id,
                    self._name,
                    Role.LEARNER,
                    crowd.schema,
                    config.digest(),
                    config.agreed_values(),
                    policy,
                    "benchmark",
                )
            )
            self._incarnation = joined.incarnation
            self._machine = LearnerMachine(joined.policy, cursor=joined.cursor)
            self._bulk = BulkClient(
                channels.bulk, self._name, joined.incarnation, crowd.schema.digest, joined.policy.deadlines
            )
            hello = ev.LearnerAttached(self._name, joined.incarnation, (), self._progress())
            async with client.attach(hello, joined.policy) as stream, asyncio.TaskGroup() as group:
                group.create_task(self._read(stream))
                group.create_task(self._write(stream))
                group.create_task(self._heartbeat(joined.policy.deadlines.heartbeat_seconds))
                for version in joined.versions:
                    self._handle(version)
                await self._step_for_ever()
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            await channels.close()

    # --- the "device" ---

    async def _step_for_ever(self) -> None:
        loop, seconds = asyncio.get_running_loop(), self._crowd.step_seconds
        due = 0.0
        while True:
            boundary = self._machine.at_boundary()
            self._carry_out(boundary)
            if boundary.hold is not None:
                self._wake.clear()
                await self._wake.wait()
                continue
            # Steps keep their pace even where this process comes late to one of them.
            due = max(due + seconds, loop.time()) if due else loop.time() + seconds * self._phase
            await asyncio.sleep(due - loop.time())
            self._machine.step_finished(TOKENS_PER_STEP)

    def _carry_out(self, boundary: le.Boundary) -> None:
        for apply in boundary.applies:
            applied = ev.FragmentApplied(
                self._name,
                self._incarnation,
                apply.fragment,
                apply.version,
                self._machine.local_step,
                self._machine.token_count,
                apply.kept_token_count,
            )
            self._reports.put_nowait(applied)
        self._perform(boundary.uploads)

    def _progress(self) -> ev.Progress:
        machine = getattr(self, "_machine", None)
        if machine is None:
            return ev.Progress(0, 0, Activity.RECOVER)
        activity = Activity.COMPUTE if machine.applied_versions else Activity.RECOVER
        return ev.Progress(machine.local_step, machine.token_count, activity, self._crowd.step_seconds)

    # --- the network ---

    def _handle(self, event: lev.LearnerEvent) -> None:
        self._crowd.saw(event)
        self._perform(self._machine.handle(event))
        self._wake.set()

    def _perform(self, effects: Iterable[le.LearnerEffect]) -> None:
        for effect in effects:
            match effect:
                case le.Upload():
                    self._start(self._upload(effect))
                case le.Download():
                    self._start(self._download(effect))
                case le.UploadInitialParameters():
                    self._start(self._upload_initial())
                case le.DeclineRound(round=number, reason=reason):
                    self._reports.put_nowait(ev.ContributionDeclined(self._name, self._incarnation, number, reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _upload(self, upload: le.Upload) -> None:
        crowd = self._crowd
        payload = crowd.payloads[upload.copy.fragment]
        header = upload.copy.header(self._name, self._incarnation, upload.round, len(payload))
        started = time.perf_counter()
        try:
            fate = await self._bulk.upload(header, payload, encoding=crowd.encoding, resume=False, moved=_nobody)
        except (PeerError, UnreachableError) as error:
            crowd.failures[_reason_of(error)] += 1
            return
        crowd.fates[fate.value] += 1
        crowd.upload_seconds.append(time.perf_counter() - started)

    async def _upload_initial(self) -> None:
        for fragment, size in enumerate(self._crowd.sizes):
            await self._bulk.upload_initial(fragment, np.zeros(size, np.float32), _nobody)

    async def _download(self, download: le.Download) -> None:
        fragment, version = download.fragment, download.version
        size = self._crowd.sizes[fragment]
        try:
            async with self._room:
                held = download.held
                await self._bulk.download(fragment, version, held, Receipt(), element_count=size, moved=_nobody)
        except (PeerError, UnreachableError) as error:
            self._crowd.failures[_reason_of(error)] += 1
            self._handle(lev.DownloadFailed(fragment, version))
            return
        self._handle(lev.Downloaded(fragment, version, download.global_step))

    async def _read(self, stream: ControlStream) -> None:
        while True:
            event = await stream.received()
            if event is not None and not isinstance(event, Policy):
                self._handle(event)

    async def _write(self, stream: ControlStream) -> None:
        while True:
            await stream.send(await self._reports.get())

    async def _heartbeat(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self._phase)
        while True:
            self._reports.put_nowait(ev.ProgressReported(self._name, self._incarnation, self._progress()))
            await asyncio.sleep(seconds)


class Crowd:
    """Learners of one run. As an async context they join, and are cancelled at the end.

    Args:
        syncer: The syncer, running.
        learner_count: How many.
        schema: Their model.
        step_seconds: Duration of a step.

    Attributes:
        members: Learners in the committed round, by its number.
        abandoned: Numbers of rounds that came to nothing.
        fates: What became of contributions.
        failures: Transfers that were refused or broke, by reason; SUPERSEDED is how a late download begins.
        upload_seconds: From the header of a contribution to its fate.
    """

    def __init__(self, syncer: SyncerProcess, learner_count: int, schema: Schema, step_seconds: float) -> None:
        self.syncer = syncer
        self.schema = schema
        self.step_seconds = step_seconds
        self.sizes = fragment_schema(schema, syncer.config.fragments.count).sizes
        self.encoding = syncer.config.encoding.upload
        source = np.random.default_rng(0)
        self.payloads = [
            encoding_named(self.encoding).encode(source.standard_normal(size, np.float32)) for size in self.sizes
        ]
        self.members: dict[int, int] = {}
        self.abandoned: set[int] = set()
        self.fates: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.upload_seconds: list[float] = []
        self._news = asyncio.Event()
        self._learners = [
            CrowdLearner(self, f"learner-{index:03}", index / learner_count) for index in range(learner_count)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(learner.run()) for learner in self._learners]
        for task in self._tasks:
            task.add_done_callback(lambda _: self._news.set())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def saw(self, event: lev.LearnerEvent) -> None:
        """A learner was told something; all are told of rounds, the first one counts."""
        if not isinstance(event, lev.RoundEnded) or event.round in self.members or event.round in self.abandoned:
            return
        if event.committed:
            self.members[event.round] = len(event.members)
        else:
            self.abandoned.add(event.round)
        self._news.set()

    async def committed(self, round_count: int, contributors: int = 0) -> None:
        """Waits until so many rounds are committed, and the newest one has so many contributors.

        Raises:
            RuntimeError: A learner has failed.
            TimeoutError: They did not come within `WAIT_SECONDS`.
        """
        async with asyncio.timeout(WAIT_SECONDS):
            while not self._reached(round_count, contributors):
                self._news.clear()
                await self._news.wait()

    def _reached(self, round_count: int, contributors: int) -> bool:
        for task in self._tasks:
            if task.done():
                raise RuntimeError("a learner has failed") from task.exception()
        newest = self.members[max(self.members)] if self.members else 0
        return len(self.members) >= round_count and newest >= contributors


def _reason_of(error: PeerError | UnreachableError) -> str:
    return error.reason.value if isinstance(error, PeerError) else "UNREACHABLE"


def _nobody(_: int) -> None:
    """Told about bytes that nobody counts."""
