"""A learner without a model that drives a syncer, through the calls of `learner_service` and without JAX.

`syncer_rig` shows how the two go together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar

import numpy as np

from decoupled_diloco.arrays.encoding import FloatVector, encoding_named, float32_elements
from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Activity, Fate, Role, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.channel import open_channels
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.runtime.rate_limit import TransferLimits, read_ahead_bytes
from decoupled_diloco.wire.control import Report
from learner_service.bulk_client import BulkClient, Receipt
from learner_service.syncer_client import ControlStream, Joined, JoinRequest, SyncerClient

EventT = TypeVar("EventT", bound=lev.LearnerEvent)

WAIT_SECONDS: Final = 120.0
"""An instruction that has not come after this long will not come."""
STEPS_PER_ASK: Final = 10
"""Steps that a learner claims to have made for each contribution."""
TOKENS_PER_STEP: Final = 100


class Joinable(Protocol):
    """A syncer that runs somewhere, for example a `SyncerProcess`."""

    @property
    def address(self) -> str: ...  # noqa: D102 (host:port of its data port)
    @property
    def config(self) -> RunConfig: ...  # noqa: D102 (the run's)


class RigLearner:
    """One incarnation of a learner (or observer) without a model: joins, attaches, and does what it is told to.

    As an async context it joins and attaches, and goes away at the end. Instructions are kept in `events`.

    Args:
        syncer: the syncer, running.
        name: its id.
        schema: its model, the same for all.
        role: an observer is never asked.
        step_seconds: the step time that it reports; short, so that the pace never waits for steps.
        address: what is dialled, for example a proxy; default: the syncer itself.
        bulk_connections: connections that transfers are spread over.
        limits: how fast bytes may move; default: as fast as they can.

    Attributes:
        joined: the answer to the join.
        bulk: the project's client for transfers.
        events: all instructions so far.
        heard_at: when the newest instruction of each kind came, by `time.perf_counter`.
    """

    joined: Joined
    bulk: BulkClient

    def __init__(
        self,
        syncer: Joinable,
        name: str,
        schema: Schema,
        role: Role = Role.LEARNER,
        step_seconds: float = 0.001,
        *,
        address: str = "",
        bulk_connections: int = 1,
        limits: TransferLimits | None = None,
    ) -> None:
        self._syncer = syncer
        self.name = name
        self.schema = schema
        self.role = role
        self.step_seconds = step_seconds
        self._address = address
        self._bulk_connections = bulk_connections
        self._limits = limits
        self.local_step = STEPS_PER_ASK
        self.events: list[lev.LearnerEvent | Policy] = []
        self.heard_at: dict[type, float] = {}
        self._news = asyncio.Condition()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        config = self._syncer.config
        self.sizes = fragment_schema(self.schema, config.fragments.count).sizes
        address = parse_address(self._address or self._syncer.address)
        read_ahead = read_ahead_bytes(self._limits.download.bytes_per_second) if self._limits else 0
        channels = open_channels(address, None, bulk_connections=self._bulk_connections, read_ahead_bytes=read_ahead)
        self._stack.push_async_callback(channels.close)
        client = SyncerClient(channels.control, self.name)
        policy = config.to_policy()
        self.joined = await client.join(
            JoinRequest(
                config.run.id,
                self.name,
                self.role,
                self.schema,
                config.digest(),
                config.agreed_values(),
                policy,
                "benchmark",
            )
        )
        deadlines = self.joined.policy.deadlines
        self.bulk = BulkClient(
            channels.bulk, self.name, self.joined.incarnation, self.schema.digest, deadlines, self._limits
        )
        self._probe = BulkClient(channels.control, self.name, self.joined.incarnation, self.schema.digest, deadlines)
        hello = ev.LearnerAttached(self.name, self.joined.incarnation, (), self._progress(0))
        self._stream = await self._stack.enter_async_context(client.attach(hello, self.joined.policy))
        reader = asyncio.create_task(self._read(self._stream))
        self._stack.callback(reader.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _read(self, stream: ControlStream) -> None:
        while True:
            if (event := await stream.received()) is not None:
                self.events.append(event)
                self.heard_at[type(event)] = time.perf_counter()
                async with self._news:
                    self._news.notify_all()

    def _progress(self, local_step: int) -> ev.Progress:
        return ev.Progress(local_step, local_step * TOKENS_PER_STEP, Activity.COMPUTE, self.step_seconds)

    # --- instructions ---

    async def event(self, kind: type[EventT], wanted: Callable[[EventT], bool] = lambda event: True) -> EventT:
        """The newest event of a kind that is wanted, once it is there.

        Raises:
            TimeoutError: it has not come within `WAIT_SECONDS`.
        """

        def found() -> EventT | None:
            kept = (event for event in reversed(self.events) if isinstance(event, kind))
            return next((event for event in kept if wanted(event)), None)

        async with asyncio.timeout(WAIT_SECONDS), self._news:
            await self._news.wait_for(lambda: found() is not None)
        event = found()
        assert event is not None
        return event

    async def asked(self, fragment: int, after_round: int = 0) -> lev.Asked:
        """The newest request for a contribution to a fragment, of a later round than given."""
        return await self.event(lev.Asked, lambda ask: ask.fragment == fragment and ask.round > after_round)

    async def published(self, fragment: int, after: Version | None = None) -> lev.Published:
        """The newest version of a fragment, newer than the one given."""
        bound = _order(after) if after is not None else (0, 0)
        return await self.event(lev.Published, lambda news: news.fragment == fragment and _order(news.version) > bound)

    # --- reports ---

    async def report(self, report: Report) -> None:
        """Sends a report on the control stream."""
        await self._stream.send(report)

    async def apply(self, news: lev.Published) -> None:
        """Says that a version was applied, and with how many steps since."""
        incarnation = self.joined.incarnation
        await self.report(ev.FragmentApplied(self.name, incarnation, news.fragment, news.version, self.local_step, 0))
        await self.report(ev.ProgressReported(self.name, incarnation, self._progress(self.local_step)))

    # --- bytes ---

    async def initialize(self, value: float = 0.5) -> None:
        """Brings the initial parameters, all of one value, and applies the first versions."""
        await self.event(lev.InitialAsked)
        for fragment, size in enumerate(self.sizes):
            await self.bulk.upload_initial(fragment, np.full(size, value, np.float32), _nobody)
        await self.apply_first()

    async def apply_first(self) -> None:
        """Applies the first version of every fragment, without a download."""
        for fragment in range(len(self.sizes)):
            await self.apply(await self.published(fragment))

    def payload(self, fragment: int, encoding: str | None = None, seed: int = 0) -> memoryview:
        """A random contribution, encoded; make it before the clock runs."""
        values = np.random.default_rng(seed).standard_normal(self.sizes[fragment], np.float32)
        return encoding_named(encoding or self.joined.policy.upload_encoding).encode(values)

    def header(self, ask: lev.Asked, payload_bytes: int) -> ev.ContributionHeader:
        """The header of a contribution to a round."""
        return ev.ContributionHeader(
            self.name,
            self.joined.incarnation,
            ask.round,
            ask.fragment,
            ask.base,
            self.local_step,
            self.local_step * TOKENS_PER_STEP,
            STEPS_PER_ASK,
            STEPS_PER_ASK * TOKENS_PER_STEP,
            self.local_step,
            payload_bytes,
        )

    async def upload(self, ask: lev.Asked, payload: memoryview, encoding: str | None = None) -> Fate:
        """Uploads a contribution and returns what became of it; each one claims ten more steps."""
        encoding = encoding or self.joined.policy.upload_encoding
        self.local_step += STEPS_PER_ASK
        header = self.header(ask, len(payload))
        return await self.bulk.upload(header, payload, encoding=encoding, resume=False, moved=_nobody)

    async def download(self, news: lev.Published, held: Version | None = None) -> Receipt:
        """Receives a version, whole or as the delta to `held`; its values are not decoded."""
        receipt = Receipt()
        await self.bulk.download(
            news.fragment, news.version, held, receipt, element_count=self.sizes[news.fragment], moved=_nobody
        )
        return receipt

    async def echo(self) -> float:
        """Seconds of a small question on the control connection: through gRPC, the event loop, the driver, and back.

        It is the header of a contribution to a round that does not exist, which the machine answers with LATE.
        """
        nothing = lev.Asked(
            1 << 40, 0, self.joined.versions[0].version if self.joined.versions else Version(1, 1), 0, 0
        )
        header = self.header(nothing, encoding_named("float32").payload_bytes(self.sizes[0]))
        started = time.perf_counter()
        await self._probe.upload(header, memoryview(b""), encoding="float32", resume=True, moved=_nobody)
        return time.perf_counter() - started

    def values_of(self, receipt: Receipt) -> FloatVector:
        """The values of a version that came whole."""
        return float32_elements(receipt.payload)


def _order(version: Version) -> tuple[int, int]:
    return version.timeline, version.number


def _nobody(_: int) -> None:
    """Nobody is told about moved bytes."""


async def cycle(learner: RigLearner, payload: memoryview, fragment: int = 0, ask: lev.Asked | None = None) -> lev.Asked:
    """One whole round of a lone learner: asked, upload, publication, download, applied; returns its ask."""
    ask = ask or await learner.asked(fragment)
    fate = await learner.upload(ask, payload)
    if fate is not Fate.ACCEPTED:
        raise RuntimeError(f"the contribution to round {ask.round} came to {fate}")
    news = await learner.published(fragment, after=ask.base)
    await learner.download(news)
    await learner.apply(news)
    return ask
