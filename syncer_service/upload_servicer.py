"""Uploads: bytes from the wire straight into their buffers, and what is told of them to the machine.

The event loop reads a message, verifies the chunk and copies it to its place: a fifth of a millisecond for 1 MiB, a
millisecond for the largest chunk, which is less than handing it to another thread and back takes. One message of each
stream is in memory beside the buffer; what else has arrived waits in gRPC, bounded by HTTP/2's flow control. Nothing
waits for the driver while bytes move. A contribution is told at its header (it counts for quorum from then on), when
it is whole, or when it broke.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

import numpy as np

from decoupled_diloco.arrays.encoding import Encoded, encoding_named
from decoupled_diloco.arrays.merge import examine
from decoupled_diloco.arrays.recycled import RECYCLER
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire import codec, enums, status
from decoupled_diloco.wire.stream import ChunkPart, CorruptPayloadError, PayloadSink
from syncer_service.serving import END_OF_STREAM, Serving, carried_out
from syncer_service.uploads import REPLACED, UploadSlot, UploadStream

Context = Any  # grpc.aio.ServicerContext
Part = Any  # ChunkPart, or the stream's message

HeaderT = TypeVar("HeaderT")

FLOAT32_BYTES: Final = 4


class BrokenStreamError(Exception):
    """The stream of a contribution ended before its trailer."""


# --- contributions ---


async def receive_contribution(serving: Serving, context: Context) -> None:
    """Serves one UploadContribution stream.

    Raises:
        PeerError: The stream was refused, stood still, or was taken over.
        CodecError: The header holds a value that is not allowed.
    """
    message = await _first_part(serving, context)
    header, encoding = _read_header(serving, message)
    slot = _reserve(serving, header, encoding)
    stream = slot.stream if slot is not None else None
    try:
        admission = await serving.driver.request(lambda token: ev.ContributionStarted(token, header), fx.Admission)
    except BaseException:
        if slot is not None and slot.sink.received_bytes == 0:
            _give_back(serving, slot, stream, "the syncer could not decide")
        raise
    if admission.fate is not Fate.ACCEPTED or admission.known:
        if slot is not None:
            _give_back(serving, slot, stream, admission.text)
        serving.metrics.contribution_ended(admission.fate)
        await _answer(context, admission.fate)
        return
    if slot is None or stream is None:  # its round was opened, or its learner admitted, between the two looks
        reason = "the syncer had no buffer ready; send it again"
        serving.driver.report(
            ev.ContributionFailed(header.learner, header.incarnation, header.round, Fate.ABORTED, reason)
        )
        raise PeerError(Reason.OVERLOADED, reason)
    await _take(serving, context, slot, stream, bool(message.header.resume))


def _give_back(serving: Serving, slot: UploadSlot, stream: UploadStream | None, reason: str) -> None:
    """Discards the slot of a stream that will not be served, unless a newer stream has taken it over."""
    if slot.stream is stream:
        serving.uploads.discard(slot, reason)


def _read_header(serving: Serving, message: Part) -> tuple[ev.ContributionHeader, str]:
    if isinstance(message, ChunkPart) or message.WhichOneof("part") != "header":
        raise PeerError(Reason.CORRUPT, "the stream must begin with its header")
    header = codec.contribution_header_from_wire(message.header, serving.agreement.schema_digest)
    encoding = enums.encoding_from_wire(message.header.encoding)
    fragments = serving.agreement.known().fragments
    if not 0 <= header.fragment < len(fragments):
        raise PeerError(Reason.INVALID_FIELD, f"fragment = {header.fragment}: must be 0 to {len(fragments) - 1}")
    due = encoding_named(encoding).payload_bytes(fragments[header.fragment].size)
    if header.schema_matches and header.payload_bytes != due:
        raise PeerError(
            Reason.INVALID_FIELD,
            f"payload_bytes = {header.payload_bytes}: fragment {header.fragment} has {due} bytes in {encoding}",
        )
    return header, encoding


def _reserve(serving: Serving, header: ev.ContributionHeader, encoding: str) -> UploadSlot | None:
    """The buffer for a contribution, before the machine is told of it; None where it will surely be refused.

    A whole contribution keeps its slot; the machine knows it and wants no more bytes.
    """
    welcome = serving.machine.admits(header.learner, header.incarnation) is None and header.schema_matches
    known = serving.uploads.find(header.learner, header.incarnation, header.round)
    if not welcome or (known is not None and known.complete) or header.round not in serving.machine.rounds.under_way:
        return None
    result_bytes = FLOAT32_BYTES * serving.agreement.known().fragments[header.fragment].size
    return serving.uploads.open(header, encoding, result_bytes)


async def _take(serving: Serving, context: Context, slot: UploadSlot, stream: UploadStream, resume: bool) -> None:
    """Receives the bytes and asks for the fate; tells the machine if that fails."""
    sink = slot.sink
    if not serving.uploads.owns(slot, stream):  # its round closed, or a newer stream came, while it was let in
        if stream.stop_reason == REPLACED:
            raise PeerError(Reason.OVERLOADED, REPLACED)
        serving.metrics.contribution_ended(Fate.ABORTED)
        await _answer(context, Fate.ABORTED)
        return
    if not resume:
        sink.restart()
    hold = slot.buffer.hold()
    try:
        await context.write(spb.UploadContributionResponse(wanted_offset=sink.received_bytes))
        failpoints.hit("upload.after_header")
        await _receive(serving, context, slot, stream)
        fate = await _verify(serving, slot, stream)
    except CorruptPayloadError as error:
        _failed(serving, slot, stream, Fate.CORRUPT, str(error))
        fate = Fate.CORRUPT
    except BrokenStreamError as error:
        _failed(serving, slot, stream, Fate.ABORTED, str(error))
        fate = Fate.ABORTED
    except BaseException as error:
        _failed(serving, slot, stream, Fate.ABORTED, _words(error))
        raise
    finally:
        hold.release()
    serving.metrics.contribution_ended(fate)
    failpoints.hit("upload.before_answer")
    await _answer(context, fate)


async def _receive(serving: Serving, context: Context, slot: UploadSlot, stream: UploadStream) -> None:
    seconds = serving.machine.policy.deadlines.upload_idle_seconds
    header, sink = slot.header, slot.sink
    moved = serving.movement(header.learner, header.incarnation, header.round)
    begun_bytes = sink.received_bytes
    while True:
        part = await _next_part(context, stream, seconds)
        if isinstance(part, ChunkPart):
            sink.write(part)
            serving.metrics.bytes_received(len(part.data))
            moved.moved()
        elif part.WhichOneof("part") == "trailer":
            sink.finish(part.trailer.digest)
            moved.ended("upload", sink.payload_bytes - begun_bytes)
            return
        else:
            raise CorruptPayloadError(f"a {part.WhichOneof('part') or 'part of an unknown kind'} came after the header")


async def _next_part(context: Context, stream: UploadStream, seconds: float) -> Part:
    """The next part of a stream that may be stopped from outside.

    Raises:
        BrokenStreamError: The machine stopped it, or the sender ended it early.
        PeerError: TRANSFER_IDLE after too long without bytes; OVERLOADED when a newer stream took over.
    """
    try:
        async with stream.waiting(seconds):
            part = await context.read()
    except TimeoutError:
        if stream.stop_reason is None:
            raise PeerError(Reason.TRANSFER_IDLE, f"no bytes came for {seconds:g} s; send it again") from None
    finally:
        stream.arrived()
    if stream.stop_reason == REPLACED:
        raise PeerError(Reason.OVERLOADED, REPLACED)
    if stream.stop_reason is not None:
        raise BrokenStreamError(stream.stop_reason)
    if part is END_OF_STREAM:
        raise BrokenStreamError("the sender ended the stream before its trailer")
    return part


async def _verify(serving: Serving, slot: UploadSlot, stream: UploadStream) -> Fate:
    """Looks at the values and asks the machine what becomes of the contribution."""
    header = slot.header
    data = slot.buffer.data
    fragment = serving.agreement.known().fragments[header.fragment]
    upload = Encoded(data, slot.encoding, fragment.size)
    found = await carried_out(serving.executors.bulk, lambda: examine(upload, fragment.segments))
    if not serving.uploads.owns(slot, stream):
        raise BrokenStreamError(stream.stop_reason or REPLACED)

    def received(token: int) -> ev.ContributionReceived:
        # Made when it is sure that the machine will hear it. Not later: it may start the merge as it accepts.
        slot.complete, slot.squares = True, found.squares
        return ev.ContributionReceived(
            token,
            header.learner,
            header.incarnation,
            header.round,
            found.problem is None,
            found.norm,
            found.problem or "",
        )

    fate = await serving.driver.request(received, Fate)
    if fate is not Fate.ACCEPTED:
        serving.uploads.discard(slot, fate.value)
    return fate


def _failed(serving: Serving, slot: UploadSlot, stream: UploadStream, fate: Fate, reason: str) -> None:
    """Tells the machine that the slot's own stream broke; what it has received stays for the next one.

    One of which the machine has heard that it is whole needs its stream no more: who sends it again is told its fate.
    """
    header = slot.header
    if slot.complete:
        return
    if stream.stop_reason is not None and not serving.uploads.owns(slot, stream):
        return  # the machine, or a newer stream, ended it
    serving.driver.report(ev.ContributionFailed(header.learner, header.incarnation, header.round, fate, reason))


async def _answer(context: Context, fate: Fate) -> None:
    await context.write(spb.UploadContributionResponse(fate=enums.fate_to_wire(fate)))


def _words(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError) or status.connection_broke(error):
        return status.CONNECTION_BROKE
    return status.error_of(error).text


# --- initial parameters ---


async def receive_initial_fragment(serving: Serving, context: Context) -> None:
    """Serves one UploadInitialFragment stream: stages the fragment and tells the machine.

    Raises:
        PeerError: The stream was refused or stood still.
        CorruptPayloadError: It did not hold what it promised.
    """
    message = await _first_part(serving, context)
    if isinstance(message, ChunkPart) or message.WhichOneof("part") != "header":
        raise PeerError(Reason.CORRUPT, "the stream must begin with its header")
    header: spb.InitialFragmentHeader = message.header
    serving.require_joined(header.learner_id, header.incarnation)
    size_bytes = FLOAT32_BYTES * _initial_size(serving, header)
    _require_asked(serving, header)
    async with serving.uploads.initial(header.learner_id, header.fragment, size_bytes) as stream:
        theta = RECYCLER.take(size_bytes).view(np.float32)
        await _receive_initial(serving, context, header, stream, PayloadSink(theta.view(np.uint8).data))
        await _stage(serving, header, theta)


async def _receive_initial(
    serving: Serving, context: Context, header: spb.InitialFragmentHeader, stream: UploadStream, sink: PayloadSink
) -> None:
    moved = serving.movement(header.learner_id, header.incarnation, None)
    seconds = serving.machine.policy.deadlines.upload_idle_seconds
    while True:
        try:
            part = await _next_part(context, stream, seconds)
        except BrokenStreamError as error:
            raise PeerError(Reason.CORRUPT, str(error)) from None
        _require_asked(serving, header)
        if not isinstance(part, ChunkPart):
            break
        sink.write(part)
        serving.metrics.bytes_received(len(part.data))
        moved.moved()
    sink.finish(part.trailer.digest)
    moved.ended("upload", sink.payload_bytes)


def _require_asked(serving: Serving, header: spb.InitialFragmentHeader) -> None:
    """Refuses what the machine would refuse at its end, before there is memory for it."""
    refusal = serving.machine.initial.refusal(header.learner_id, header.incarnation)
    if refusal is not None:
        raise status.error_of(refusal)


def _initial_size(serving: Serving, header: spb.InitialFragmentHeader) -> int:
    fragments = serving.agreement.known().fragments
    if not 0 <= header.fragment < len(fragments):
        raise PeerError(Reason.INVALID_FIELD, f"fragment = {header.fragment}: must be 0 to {len(fragments) - 1}")
    if header.schema_digest != serving.agreement.schema_digest:
        raise PeerError(Reason.SCHEMA_MISMATCH, "the initial parameters are of another model than the run's")
    due = fragments[header.fragment].size
    if header.value_count != due:
        text = f"value_count = {header.value_count}: fragment {header.fragment} has {due} values"
        raise PeerError(Reason.INVALID_FIELD, text)
    return due


async def _stage(serving: Serving, header: spb.InitialFragmentHeader, theta: np.ndarray[Any, Any]) -> None:
    learner, incarnation, fragment = header.learner_id, header.incarnation, header.fragment
    upload = Encoded(theta.view(np.uint8).data, "float32", theta.size)
    found = await carried_out(serving.executors.bulk, lambda: examine(upload))
    if found.problem is not None:
        raise PeerError(
            Reason.INVALID_FIELD, f"fragment {fragment} of the initial parameters cannot be used: {found.problem}"
        )
    digest = await serving.in_store(lambda: serving.store.stage_initial(learner, incarnation, fragment, theta))
    refusal = await serving.driver.request(
        lambda token: ev.InitialFragmentReceived(token, learner, incarnation, fragment, digest),
        fx.Refusal,
        type(None),
    )
    if refusal is not None:
        await serving.in_store(lambda: serving.store.discard_initial(learner, incarnation))
        raise status.error_of(refusal)


# --- both ---


async def _first_part(serving: Serving, context: Context) -> Part:
    seconds = serving.machine.policy.deadlines.upload_idle_seconds
    try:
        async with asyncio.timeout(seconds):
            part = await context.read()
    except TimeoutError:
        raise PeerError(Reason.TRANSFER_IDLE, f"no header came for {seconds:g} s") from None
    if part is END_OF_STREAM:
        raise PeerError(Reason.CORRUPT, "the stream ended before its header")
    return part
