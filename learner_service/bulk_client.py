"""The calls of SyncerService that move fragments. Nothing is repeated here; `transfers` does that.

Every method raises `PeerError` for what the syncer refused and `UnreachableError` where no answer came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np

from decoupled_diloco.arrays.encoding import DOWNLOAD_ENCODINGS, FloatVector, encoding_named
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.core.ids import Fate, Version
from decoupled_diloco.core.policy import Deadlines
from decoupled_diloco.runtime.channel import BulkChannel
from decoupled_diloco.runtime.rate_limit import Allowance, RateLimit, TransferLimits
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire.codec import contribution_header_to_wire, version_from_wire, version_to_wire
from decoupled_diloco.wire.enums import encoding_from_wire, encoding_to_wire, fate_from_wire
from decoupled_diloco.wire.methods import SyncerStub
from decoupled_diloco.wire.status import from_rpc_error
from decoupled_diloco.wire.stream import (
    CHUNK_BYTES,
    NEXT_VERSION_SECONDS_MAX,
    ChunkPart,
    CorruptPayloadError,
    PayloadSink,
    payload_messages,
)
from learner_service.syncer_client import END, Idle, connection_closed, end_of, nothing_moved, step_of

Moved = Callable[[int], None]
"""Told about payload bytes as they move."""


class Receipt:
    """A download under way: what has arrived so far survives a broken stream, so that the next one goes on there.

    Attributes:
        payload: the buffer, of the length that the header gave.
        encoding: how the payload is written.
        delta_base: the version that the payload is a delta to; None: the payload is the version itself.
        digest: xxh3-128 of the payload, once all of it is here and has the digest that the other end gave.
    """

    def __init__(self) -> None:
        self.digest: str | None = None
        self.payload = np.empty(0, np.uint8)
        self.encoding = ""
        self.delta_base: Version | None = None
        self.sink: PayloadSink | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all of it is here."""
        return self.digest is not None

    @property
    def received_bytes(self) -> int:
        """How much has arrived; the offset to go on at."""
        return self.sink.received_bytes if self.sink is not None else 0

    def open(self, encoding: str, delta_base: Version | None, payload_bytes: int, bytes_max: int) -> bool:
        """Takes in a header; returns whether the stream continues what has arrived.

        Raises:
            CorruptPayloadError: the length is not that of a fragment of this size.
        """
        if payload_bytes > bytes_max:
            raise CorruptPayloadError(
                f"the header promises {payload_bytes} bytes; the fragment has {bytes_max} at most"
            )
        same = (encoding, delta_base, payload_bytes) == (self.encoding, self.delta_base, len(self.payload))
        if self.sink is not None and same:
            return True
        resumed = self.received_bytes > 0
        self.encoding, self.delta_base = encoding, delta_base
        self.payload = np.empty(payload_bytes, np.uint8)
        self.sink = PayloadSink(self.payload.data)
        return not resumed


class BulkClient:
    """One incarnation's transfers over the bulk connections.

    Args:
        channel: one connection or several; closed by its owner.
        participant_id: the caller's id.
        incarnation: its incarnation.
        schema_digest: digest of its schema.
        deadlines: the one table.
        limits: how fast bytes may move; None: as fast as they can.
    """

    def __init__(
        self,
        channel: BulkChannel,
        participant_id: str,
        incarnation: int,
        schema_digest: str,
        deadlines: Deadlines,
        limits: TransferLimits | None = None,
    ) -> None:
        self._stub = SyncerStub(channel)
        self._participant_id = participant_id
        self._incarnation = incarnation
        self._schema_digest = schema_digest
        self._limits = limits or TransferLimits()
        # The other end may take as long for an answer as for a unary call; nobody waits less than it does.
        self._idle_seconds = max(deadlines.upload_idle_seconds, deadlines.rpc_seconds)

    @property
    def idle_seconds(self) -> float:
        """A call in which nothing moves for so long has broken."""
        return self._idle_seconds

    async def upload(
        self,
        header: ev.ContributionHeader,
        payload: memoryview,
        *,
        encoding: str,
        resume: bool,
        moved: Moved,
    ) -> Fate:
        """Sends one contribution and returns what became of it.

        Args:
            header: what it says of itself.
            payload: the encoded delta.
            encoding: how that is written.
            resume: an earlier stream of this contribution broke; asks first where to go on.
            moved: told about the bytes that were sent.
        """
        call = self._stub.UploadContribution()
        idle = Idle(self._idle_seconds)
        sender: asyncio.Task[None] | None = None
        try:
            message = contribution_header_to_wire(header, encoding, self._schema_digest, resume)
            await step_of(call, call.write(spb.UploadContributionRequest(header=message)), idle)
            if not resume:
                sender = asyncio.create_task(_send(call, payload, 0, idle, moved, self._limits.upload))
            while True:
                answer = await step_of(call, call.read(), idle)
                if answer is END:
                    raise await end_of(call)
                if answer.WhichOneof("answer") == "fate":
                    await _let_end(call, idle)
                    return fate_from_wire(answer.fate)
                if sender is None:
                    offset = min(max(answer.wanted_offset, 0), len(payload))
                    sender = asyncio.create_task(_send(call, payload, offset, idle, moved, self._limits.upload))
        finally:
            if sender is not None:
                sender.cancel()
            call.cancel()

    async def upload_initial(self, fragment: int, values: FloatVector, moved: Moved) -> None:
        """Sends one fragment of this learner's initial parameters."""
        payload = encoding_named("float32").encode(values)
        header = spb.InitialFragmentHeader(
            learner_id=self._participant_id,
            incarnation=self._incarnation,
            fragment=fragment,
            value_count=values.size,
            schema_digest=self._schema_digest,
        )
        call = self._stub.UploadInitialFragment()
        idle = Idle(self._idle_seconds)
        sender: asyncio.Task[None] | None = None
        try:
            await step_of(call, call.write(spb.UploadInitialFragmentRequest(header=header)), idle)
            sender = asyncio.create_task(_send(call, payload, 0, idle, moved, self._limits.upload))
            await step_of(call, call, idle)
        finally:
            if sender is not None:
                sender.cancel()
            call.cancel()

    async def download(
        self,
        fragment: int,
        version: Version,
        held: Version | None,
        receipt: Receipt,
        *,
        element_count: int,
        moved: Moved,
    ) -> None:
        """Receives a version into `receipt`, from where it stands to the end.

        Args:
            fragment: which.
            version: its version.
            held: the version that the caller can apply a delta to; None: none.
            receipt: new, or that of a broken stream of the same call.
            element_count: float32 values of the fragment.
            moved: told about the bytes that arrived.

        Raises:
            CorruptPayloadError: the stream does not hold what it promised.
        """
        request = self._download_request(fragment, held)
        request.version.CopyFrom(version_to_wire(version))
        request.offset = receipt.received_bytes
        call, idle = self._stub.DownloadFragment(request), Idle(self._idle_seconds)
        try:
            await self._receive(call, receipt, 4 * element_count, moved, idle)
        except BaseException:
            call.cancel()
            raise
        _end_in_background(call, idle)

    async def download_next(
        self,
        fragment: int,
        held: Version,
        receipt: Receipt,
        *,
        element_count: int,
        moved: Moved,
        begun: Callable[[Version], None],
        room: AbstractAsyncContextManager[object],
    ) -> None:
        """Receives the version that follows `held`, once it is published, into `receipt`.

        Waiting for it is no silence; once it has begun, nothing else is different from `download`.

        Args:
            fragment: which.
            held: the version that the caller holds; a delta to it may come.
            receipt: a new one.
            element_count: float32 values of the fragment.
            moved: told about the bytes that arrived.
            begun: told which version it is, with the header.
            room: entered before the payload is read.

        Raises:
            CorruptPayloadError: the stream does not hold what it promised.
            UnreachableError: also where the syncer ended the call because no version came.
        """
        request = self._download_request(fragment, held)
        request.next_version = True
        call, idle = self._stub.DownloadFragment(request), Idle(self._idle_seconds)
        try:
            with _Reader(call, Idle(NEXT_VERSION_SECONDS_MAX + self._idle_seconds)) as reader:
                part = await reader.next_part()
            if isinstance(part, ChunkPart) or part.WhichOneof("part") != "header":
                raise CorruptPayloadError("the stream did not begin with a header")
            _open(receipt, part.header, 4 * element_count)
            begun(version_from_wire(part.header.version.version))
            async with room:
                await self._receive(call, receipt, 4 * element_count, moved, idle)
        except BaseException:
            call.cancel()
            raise
        _end_in_background(call, idle)

    def _download_request(self, fragment: int, held: Version | None) -> spb.DownloadFragmentRequest:
        return spb.DownloadFragmentRequest(
            learner_id=self._participant_id,
            incarnation=self._incarnation,
            fragment=fragment,
            held=version_to_wire(held) if held is not None else None,
            encodings=[encoding_to_wire(name) for name in DOWNLOAD_ENCODINGS],
        )

    async def _receive(self, call: Any, receipt: Receipt, bytes_max: int, moved: Moved, idle: Idle) -> None:
        with _Reader(call, idle) as reader:
            await self._receive_parts(reader, receipt, bytes_max, moved)

    async def _receive_parts(self, reader: _Reader, receipt: Receipt, bytes_max: int, moved: Moved) -> None:
        allowance = Allowance(self._limits.download, CHUNK_BYTES)
        while True:
            await allowance.for_next(receipt.received_bytes, len(receipt.payload))
            part = await reader.next_part()
            if isinstance(part, ChunkPart):
                if receipt.sink is None:
                    raise CorruptPayloadError("a chunk came before the header")
                receipt.sink.write(part)
                moved(len(part.data))
            elif part.WhichOneof("part") == "header":
                _open(receipt, part.header, bytes_max)
            elif receipt.sink is not None:
                receipt.sink.finish(part.trailer.digest)
                receipt.digest = part.trailer.digest
                return


class _Reader:
    """Reads the parts of a stream under one timer for all of them, where `step_of` takes one for each.

    As a context, so that the timer goes with it.
    """

    def __init__(self, call: Any, idle: Idle) -> None:
        self._call = call
        self._idle = idle
        self._is_reading = False
        self._is_over = False

    def __enter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._idle.limit_seconds, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        """Ends the call if it was waited for, and nothing has come, for too long."""
        left = self._idle.left_seconds() if self._is_reading else self._idle.limit_seconds
        self._is_over = left <= 0.0
        if self._is_over:
            self._call.cancel()
        else:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)

    async def next_part(self) -> Any:
        """The next part; errors are those of `step_of`, and the end of the stream is one."""
        self._is_reading = True
        self._idle.moved()
        try:
            part = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            if self._is_over:
                raise nothing_moved(self._idle) from None
            raise connection_closed() from None
        finally:
            self._is_reading = False
        if part is END:
            raise await end_of(self._call)
        return part


_endings: set[asyncio.Task[None]] = set()
"""Downloads that are whole, until the other end has finished the call; the event loop itself keeps no task alive."""


def _open(receipt: Receipt, header: spb.DownloadHeader, bytes_max: int) -> None:
    base = version_from_wire(header.delta_base) if header.HasField("delta_base") else None
    if not receipt.open(encoding_from_wire(header.encoding), base, header.payload_bytes, bytes_max):
        raise UnreachableError("ABORTED", "the rest came in another encoding; it starts over")


def _end_in_background(call: Any, idle: Idle) -> None:
    """The caller has all that it wants; it need not wait for the good-bye."""
    ending = asyncio.create_task(_end_download(call, idle))
    _endings.add(ending)
    ending.add_done_callback(_endings.discard)


async def _end_download(call: Any, idle: Idle) -> None:
    try:
        await _let_end(call, idle)
    finally:
        call.cancel()


async def _let_end(call: Any, idle: Idle) -> None:
    """Lets the other end finish the call after its last message: cut off now, it would take that for a fault."""
    with contextlib.suppress(PeerError, UnreachableError):
        await step_of(call, call.read(), idle)


async def _send(call: Any, payload: memoryview, offset: int, idle: Idle, moved: Moved, limit: RateLimit) -> None:
    """Writes the chunks from an offset on, then the trailer; ends quietly if the other end has answered already."""
    try:
        for message in payload_messages(payload, offset, limit.piece_bytes(CHUNK_BYTES)):
            await limit.passed(len(message))
            await call.write(message)
            idle.moved()
            moved(len(message))
        await call.done_writing()
    except (grpc.RpcError, asyncio.InvalidStateError):
        return
