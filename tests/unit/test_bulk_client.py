"""The learner's calls that move fragments, against calls that do what a network can do."""

import asyncio
import contextlib

import pytest

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import UnreachableError
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Deadlines
from decoupled_diloco.runtime.clock import ManualClock
from decoupled_diloco.runtime.rate_limit import RateLimit, TransferLimits
from decoupled_diloco.v1 import fragment_pb2, syncer_pb2
from decoupled_diloco.wire.codec import version_to_wire
from decoupled_diloco.wire.stream import CHUNK_BYTES, CorruptPayloadError, part_parser, payload_messages
from learner_service.bulk_client import BulkClient, Receipt
from learner_service.syncer_client import END

IDLE_SECONDS = 0.05
PAYLOAD = bytes(range(256)) * 16
VERSION = Version(1, 1, "x")


class FakeCall:
    """A call whose parts are given; after them it stays silent until somebody cancels it."""

    def __init__(self, parts=()):
        self.parts = list(parts)
        self.written = []
        self.blocks_writes = False
        self.is_silent = asyncio.Event()
        self.is_cancelled = asyncio.Event()
        self.wrote = asyncio.Condition()

    async def read(self):
        if self.parts:
            return self.parts.pop(0)
        self.is_silent.set()
        await self.is_cancelled.wait()
        raise asyncio.CancelledError  # as gRPC does

    async def write(self, message):
        async with self.wrote:
            self.written.append(message)
            self.wrote.notify_all()
        if self.blocks_writes and len(self.written) > 1:
            await self.is_cancelled.wait()

    def cancel(self):
        self.is_cancelled.set()


class FakeChannel:
    """Gives out one call, whatever is asked for."""

    def __init__(self, call):
        self._call = call

    def unary_stream(self, *_, **__):
        return lambda request: self._call

    def stream_stream(self, *_, **__):
        return lambda: self._call

    unary_unary = stream_unary = stream_stream


def client_of(call, limits=None):
    deadlines = Deadlines(upload_idle_seconds=IDLE_SECONDS, rpc_seconds=IDLE_SECONDS)
    return BulkClient(FakeChannel(call), "a", 1, "schema", deadlines, limits)


def parts_of(payload, chunk_bytes=1024):
    header = syncer_pb2.DownloadHeader(encoding=fragment_pb2.ENCODING_FLOAT32, payload_bytes=len(payload))
    parse = part_parser(syncer_pb2.DownloadFragmentResponse)
    messages = map(parse, payload_messages(payload, chunk_bytes=chunk_bytes))
    return [syncer_pb2.DownloadFragmentResponse(header=header), *messages]


async def download(call, receipt, limits=None, payload=PAYLOAD):
    await client_of(call, limits).download(
        0, VERSION, None, receipt, element_count=len(payload) // 4, moved=lambda size: None
    )


async def test_a_download_puts_its_parts_together():
    receipt = Receipt()
    await download(FakeCall([*parts_of(PAYLOAD), END]), receipt)
    assert bytes(receipt.payload) == PAYLOAD


async def test_a_download_in_which_nothing_moves_is_given_up_and_keeps_what_it_has():
    call, receipt = FakeCall(parts_of(PAYLOAD)[:3]), Receipt()
    with pytest.raises(UnreachableError, match=r"DEADLINE_EXCEEDED.*nothing has moved for 0.05 s"):
        await download(call, receipt)
    assert call.is_cancelled.is_set()
    assert receipt.received_bytes == 2048


async def download_next(call, receipt, begun):
    await client_of(call).download_next(
        0,
        VERSION,
        receipt,
        element_count=len(PAYLOAD) // 4,
        moved=lambda size: None,
        begun=begun,
        room=contextlib.nullcontext(),
    )


async def test_the_wait_for_a_version_that_is_not_there_is_not_taken_for_silence():
    call, receipt = FakeCall(), Receipt()
    waiting = asyncio.create_task(download_next(call, receipt, lambda version: None))
    assert await asyncio.wait((waiting,), timeout=4 * IDLE_SECONDS) == (set(), {waiting})
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert call.is_cancelled.is_set()


async def test_a_version_that_has_begun_and_then_stands_still_is_given_up_and_keeps_what_it_has():
    versions, receipt, parts = [], Receipt(), parts_of(PAYLOAD)[:3]
    parts[0].header.version.version.CopyFrom(version_to_wire(VERSION))
    call = FakeCall(parts)
    with pytest.raises(UnreachableError, match=r"DEADLINE_EXCEEDED.*nothing has moved for 0.05 s"):
        await download_next(call, receipt, versions.append)
    assert call.is_cancelled.is_set()
    assert (versions, receipt.received_bytes, receipt.is_complete) == ([VERSION], 2048, False)


async def test_a_stream_that_does_not_begin_with_a_header_is_corrupt():
    with pytest.raises(CorruptPayloadError, match="did not begin with a header"):
        await download_next(FakeCall(parts_of(PAYLOAD)[1:]), Receipt(), lambda version: None)


async def test_the_wait_for_a_rate_limit_is_not_taken_for_silence():
    clock = ManualClock(0.0)

    async def sleep(seconds):
        clock.advance(seconds)
        await asyncio.sleep(2 * IDLE_SECONDS)

    limits = TransferLimits(download=RateLimit(CHUNK_BYTES, clock, sleep))
    receipt, payload = Receipt(), bytes(3 * CHUNK_BYTES)
    await download(FakeCall([*parts_of(payload, CHUNK_BYTES), END]), receipt, limits, payload)
    assert bytes(receipt.payload) == payload
    assert clock.now() > 1


async def test_a_connection_that_was_closed_is_no_cancellation():
    call = FakeCall(parts_of(PAYLOAD)[:2])
    call.cancel()
    with pytest.raises(UnreachableError, match=r"CANCELLED.*the connection was closed"):
        await download(call, Receipt())


async def test_a_stream_that_ends_early_is_told_from_a_whole_one():
    call = FakeCall([*parts_of(PAYLOAD)[:2], END])
    call.code, call.details = _answering(None), _answering("")
    call.trailing_metadata = _answering(())
    with pytest.raises(UnreachableError):
        await download(call, Receipt())


async def test_a_cancelled_download_is_cancelled():
    call = FakeCall(parts_of(PAYLOAD)[:2])
    task = asyncio.create_task(download(call, Receipt()))
    await call.is_silent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert call.is_cancelled.is_set()


async def test_an_upload_has_one_message_in_hand():
    call = FakeCall()
    call.blocks_writes = True
    payload = memoryview(bytes(8 * CHUNK_BYTES))
    header = ev.ContributionHeader("a", 1, 7, 0, VERSION, 5, 50, 5, 50, 5, len(payload))
    task = asyncio.create_task(
        client_of(call).upload(header, payload, encoding="float32", resume=False, moved=lambda size: None)
    )
    async with call.wrote:
        await call.wrote.wait_for(lambda: len(call.written) > 1)
    for _ in range(10):
        await asyncio.sleep(0)  # it has every chance to make more
    assert len(call.written) == 2  # the header, and the chunk that waits for room
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def _answering(value):
    async def answer():
        return value

    return answer
