"""Follows the published versions of a run: the newest of every fragment, in host memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragmentation
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import UnreachableError
from decoupled_diloco.core.ids import Activity, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.channel import Channels
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.runtime.rate_limit import TransferLimits
from decoupled_diloco.wire.control import Report
from learner_service.bulk_client import BulkClient
from learner_service.downloader import Downloader, Held, VersionGoneError
from learner_service.syncer_client import ControlStream, Joined, JoinRequest

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """One instant of the run's parameters: the newest version of every fragment that is here.

    Attributes:
        versions: by fragment.
        values: float32 vectors by fragment; read-only.
        global_step: the newest global step among them.
    """

    versions: dict[int, Version]
    values: dict[int, FloatVector]
    global_step: int


class Follower:
    """An observer; a `connection.Participant`. All of it runs on one event loop.

    Args:
        join: what to join with.
        fragmentation: of the run's schema.
        channels: the present connections.
        executor: for what takes CPU time.
        limits: how fast bytes may move.
    """

    def __init__(
        self,
        join: JoinRequest,
        fragmentation: Fragmentation,
        channels: Callable[[], Channels | None],
        executor: Executor,
        limits: TransferLimits,
    ) -> None:
        self._join = join
        self._fragmentation = fragmentation
        self._channels = channels
        self._executor = executor
        self._limits = limits
        self._wanted: dict[int, lev.Published] = {}
        self._held: dict[int, Held] = {}
        self._steps: dict[int, int] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._reports: deque[Report] = deque()
        self._news = asyncio.Event()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self.downloaded_bytes = 0
        self.joined: Joined | None = None
        self.end: lev.Ended | None = None
        """The end of the run, once the syncer has told it."""

    # ---- what it is for ----------------------------------------------------------------------------------------------

    async def wait_until(self, condition: Callable[[Follower], bool]) -> None:
        """Waits for something that this object comes to by itself."""
        while not condition(self):
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    @property
    def is_empty(self) -> bool:
        """Whether the run has no parameters yet."""
        return not self._wanted

    @property
    def is_complete(self) -> bool:
        """Whether a version of every fragment is here."""
        return len(self._held) == len(self._fragmentation.fragments)

    @property
    def is_up_to_date(self) -> bool:
        """Whether that is the newest one for every fragment."""
        return self.is_complete and all(self._held[p].version == news.version for p, news in self._wanted.items())

    @property
    def global_step(self) -> int:
        """The newest global step of what is here."""
        return max(self._steps.values(), default=0)

    def published(self) -> Published:
        """What is here now."""
        return Published(
            {p: held.version for p, held in self._held.items()},
            {p: held.values for p, held in self._held.items()},
            self.global_step,
        )

    def send(self, global_step: int, figures: dict[str, float]) -> None:
        """Reports figures to the syncer, as soon as it is there."""
        self._reports.append(ev.EvaluationReported("", 0, global_step, tuple(sorted(figures.items()))))
        self._news.set()

    async def flushed(self) -> None:
        """Waits until every report has been sent."""
        await self.wait_until(lambda _: not self._reports)

    def close(self) -> None:
        """Stops downloading."""
        for task in self._tasks.values():
            task.cancel()
        self._tasks.clear()

    # ---- Participant -------------------------------------------------------------------------------------------------

    def join_request(self) -> JoinRequest:
        """What to join with."""
        return self._join

    def on_joined(self, joined: Joined) -> None:
        """A new incarnation; what is here and no longer published is dropped."""
        self.close()
        self.joined = joined
        published = {news.fragment: news for news in joined.versions}
        for fragment in list(self._held):
            news = published.get(fragment)
            if news is None or (self._held[fragment].version.timeline, self._steps[fragment]) > (
                news.version.timeline,
                news.global_step,
            ):
                del self._held[fragment], self._steps[fragment]
        self._wanted = {}
        self._downloader = Downloader(
            self._bulk, self._fragmentation.sizes, self._executor, self._count, random.Random(), log
        )
        for news in joined.versions:
            self._want(news)

    def hello(self) -> ev.LearnerAttached:
        """What is here already."""
        assert self.joined is not None
        applied = tuple((p, held.version) for p, held in sorted(self._held.items()))
        return ev.LearnerAttached(self._join.participant_id, self.joined.incarnation, applied, self._progress())

    def on_attached(self) -> None:
        """Nothing to do: the syncer announces what is not here."""

    def on_detached(self) -> None:
        """Nothing to do: downloads go on by themselves."""

    def on_instruction(self, instruction: lev.LearnerEvent | Policy) -> None:
        """Only versions and the end of the run matter to an observer."""
        if isinstance(instruction, lev.Published):
            self._want(instruction)
        elif isinstance(instruction, lev.Ended):
            self.end = instruction
            self._tell()

    async def report(self, stream: ControlStream) -> None:
        """Sends evaluations, and a sign of life at every heartbeat."""
        assert self.joined is not None
        heartbeat = self.joined.policy.deadlines.heartbeat_seconds
        while True:
            self._news.clear()
            while self._reports:
                await stream.send(self._reports[0])
                self._reports.popleft()
            self._tell()
            await stream.send(ev.ProgressReported("", 0, self._progress()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat / 2):
                    await self._news.wait()

    # ---- downloads ---------------------------------------------------------------------------------------------------

    def _want(self, news: lev.Published) -> None:
        known = self._wanted.get(news.fragment)
        if known is not None and _order(news.version) <= _order(known.version):
            return
        self._wanted[news.fragment] = news
        if news.fragment not in self._tasks:
            task = self._tasks[news.fragment] = asyncio.create_task(self._follow(news.fragment))
            task.add_done_callback(self._ended)

    async def _follow(self, fragment: int) -> None:
        """Downloads until the newest version of a fragment is here."""
        while True:
            news = self._wanted[fragment]
            held = self._held.get(fragment)
            if held is not None and held.version == news.version:
                break
            try:
                values = await self._downloader.fetch(fragment, news.version, held)
            except VersionGoneError:
                if self._wanted[fragment] is news:  # news of the one that replaced it is on its way
                    await asyncio.sleep(0.2)
                continue
            self._held[fragment] = Held(news.version, values)
            self._steps[fragment] = news.global_step
            self._tell()
        del self._tasks[fragment]

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._tell()

    def _bulk(self) -> BulkClient:
        channels = self._channels()
        if channels is None or self.joined is None:
            raise UnreachableError("UNAVAILABLE", "the syncer is not connected")
        return BulkClient(
            channels.bulk,
            self._join.participant_id,
            self.joined.incarnation,
            self._join.schema.digest,
            self.joined.policy.deadlines,
            self._limits,
        )

    def _count(self, count: int) -> None:
        self.downloaded_bytes += count

    def _progress(self) -> ev.Progress:
        return ev.Progress(0, 0, Activity.COMPUTE, downloaded_bytes=self.downloaded_bytes)


def _order(version: Version) -> tuple[int, int]:
    return version.timeline, version.number
