"""Payloads as streams of bytes: how one is cut into chunks, and how it is put together again.

A payload (an encoded fragment or contribution) travels as chunk messages of about 1 MiB, each with its
offset and an xxh3-64 checksum, and ends with a trailer that carries the xxh3-128 digest of the whole. The
header in front differs by stream and is the caller's.

The streams that carry payloads (`UploadContributionRequest`, `UploadInitialFragmentRequest`,
`DownloadFragmentResponse`, `DownloadOptimizerStateResponse`) share the numbers of their parts: header 1,
chunk 2, trailer 3. So a chunk has the same bytes in all of them, and this module writes and reads those
bytes by hand: ordinary protobuf on the wire, without the copies of the generated classes (1.90 against
1.62 GB/s measured). Whatever does not look like the canonical form is left to the generated class, so any
other implementation of protobuf is understood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import xxhash
from google.protobuf.message import Message

from decoupled_diloco.v1 import fragment_pb2, syncer_pb2

CHUNK_BYTES = 1 << 20
"""Bytes of payload in a chunk as we send it; the fastest size measured."""

CHUNK_BYTES_MAX = (4 << 20) - (64 << 10)
"""Most bytes of payload in a chunk as we accept it; fits gRPC's default message limit."""

NEXT_VERSION_SECONDS_MAX = 600.0
"""A download that was asked for before its version was there waits at the syncer for so long, then ends without one."""

_PART_CHUNK = b"\x12"  # field 2 of the stream's message, length-delimited
_CHUNK_OFFSET = 0x08  # field 1 of Chunk, varint
_CHUNK_CHECKSUM = 0x11  # field 2 of Chunk, 8 bytes
_CHUNK_DATA = 0x1A  # field 3 of Chunk, length-delimited

MessageT = TypeVar("MessageT", bound=Message)


class CorruptPayloadError(Exception):
    """A stream does not hold what it promised; nothing of it may be used, all of it may be sent again."""


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """One received chunk; `data` points into the received message."""

    offset: int
    checksum: int
    data: memoryview


def payload_digest(payload: memoryview | bytes) -> str:
    """xxh3-128 of a payload, lower-case hexadecimal."""
    return xxhash.xxh3_128_hexdigest(payload)


def chunk_message(offset: int, data: memoryview, checksum: int | None = None) -> bytes:
    """The wire bytes of one chunk part, equal to those of the generated classes; copies `data` once.

    Args:
        offset: Where the chunk lies in the payload.
        data: Its bytes.
        checksum: Their xxh3-64, where it is known already.
    """
    head = b""
    if offset:
        head = b"\x08" + _varint(offset)
    if checksum is None:
        checksum = xxhash.xxh3_64_intdigest(data)
    if checksum:
        head += b"\x11" + checksum.to_bytes(8, "little")
    if len(data):
        head += b"\x1a" + _varint(len(data))
    return b"".join((_PART_CHUNK, _varint(len(head) + len(data)), head, data))


def trailer_message(digest: str) -> bytes:
    """The wire bytes of the trailer part."""
    trailer = fragment_pb2.Trailer(digest=digest)
    return syncer_pb2.DownloadFragmentResponse(trailer=trailer).SerializeToString()


def payload_messages(payload: memoryview | bytes, offset: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Cuts a payload: chunk messages from `offset` on, then the trailer with the digest of the whole payload.

    The digest grows along with the chunks, so nothing is read twice except the part below `offset`. Takes
    CPU time for each message (checksum, digest, one copy): drive it from a thread that may.

    Args:
        payload: The whole encoded payload.
        offset: First byte that the other end wants, 0 <= offset <= len(payload).
        chunk_bytes: Bytes of payload in a message.

    Raises:
        ValueError: The offset does not lie in the payload.
    """
    view = memoryview(payload).cast("B")
    if not 0 <= offset <= len(view):
        raise ValueError(f"offset {offset} does not lie in a payload of {len(view)} bytes")
    whole = xxhash.xxh3_128(view[:offset])
    for start in range(offset, len(view), chunk_bytes):
        data = view[start : start + chunk_bytes]
        whole.update(data)
        yield chunk_message(start, data)
    yield trailer_message(whole.hexdigest())


class CutPayload:
    """A payload read once, to be served any number of times, straight from its memory.

    Checksums and digest are kept; messages are put together as they are sent (one copy, a tenth of a millisecond),
    so that serving a payload to many holds one message for each of them and no second payload.

    Args:
        payload: The whole encoded payload; kept, and not to be changed.
        digest: Its xxh3-128, where it is known already.
        chunk_bytes: Bytes of payload in a message.

    Attributes:
        payload_bytes: Length of the payload.
        digest: xxh3-128 of the payload.
    """

    def __init__(self, payload: memoryview | bytes, digest: str | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._view = memoryview(payload).cast("B")
        self.payload_bytes = len(self._view)
        self._chunk_bytes = chunk_bytes
        whole = xxhash.xxh3_128()
        self._checksums = []
        for start in range(0, len(self._view), chunk_bytes):
            data = self._view[start : start + chunk_bytes]
            self._checksums.append(xxhash.xxh3_64_intdigest(data))
            if digest is None:
                whole.update(data)
        self.digest = whole.hexdigest() if digest is None else digest
        self._trailer = trailer_message(self.digest)

    def messages(self, offset: int = 0) -> Iterator[bytes]:
        """The messages from a byte offset on, 0 <= offset <= payload_bytes, each made when it is asked for."""
        index, rest = divmod(offset, self._chunk_bytes)
        if rest:
            index += 1
            if offset < self.payload_bytes:
                yield chunk_message(offset, self._view[offset : index * self._chunk_bytes])
        for start in range(index * self._chunk_bytes, self.payload_bytes, self._chunk_bytes):
            data = self._view[start : start + self._chunk_bytes]
            yield chunk_message(start, data, self._checksums[start // self._chunk_bytes])
        yield self._trailer


class PayloadSink:
    """Puts a payload together in a buffer that exists already: every chunk goes straight to its place.

    Keeps what it has when a stream breaks, so that the next one can go on at `received_bytes`.
    """

    def __init__(self, target: memoryview) -> None:
        self._target = target.cast("B")
        if self._target.readonly:
            raise ValueError("the buffer is read-only")
        self._whole = xxhash.xxh3_128()
        self.received_bytes = 0

    @property
    def payload_bytes(self) -> int:
        """Length of the payload."""
        return len(self._target)

    def write(self, part: ChunkPart) -> None:
        """Verifies a chunk and copies it to its place. Takes CPU time in proportion to the chunk.

        Raises:
            CorruptPayloadError: Out of order, out of bounds, too large, empty, or another checksum. The
                sink is as before.
        """
        size = len(part.data)
        end = part.offset + size
        if part.offset != self.received_bytes:
            raise CorruptPayloadError(f"a chunk at offset {part.offset} came where {self.received_bytes} was next")
        if not 0 < size <= CHUNK_BYTES_MAX:
            raise CorruptPayloadError(
                f"a chunk of {size} bytes at offset {part.offset}; allowed are 1 to {CHUNK_BYTES_MAX}"
            )
        if end > len(self._target):
            raise CorruptPayloadError(f"a chunk ends at {end}, beyond the payload's {len(self._target)} bytes")
        if xxhash.xxh3_64_intdigest(part.data) != part.checksum:
            raise CorruptPayloadError(f"the chunk at offset {part.offset} does not match its checksum")
        self._target[part.offset : end] = part.data
        # From our copy, which is in the cache: what is digested is what will be used.
        self._whole.update(self._target[part.offset : end])
        self.received_bytes = end

    def finish(self, digest: str) -> None:
        """Verifies the whole against the trailer's digest.

        Raises:
            CorruptPayloadError: Bytes are missing, or the digest differs; the sink starts over at offset 0.
        """
        if self.received_bytes != len(self._target):
            missing = len(self._target) - self.received_bytes
            raise CorruptPayloadError(f"the stream ended {missing} bytes before its {len(self._target)}")
        if self._whole.hexdigest() != digest:
            self.restart()
            raise CorruptPayloadError("the payload does not match the digest in its trailer")

    def restart(self) -> None:
        """Forgets what was received."""
        self._whole.reset()
        self.received_bytes = 0


def parse_chunk(message: bytes) -> ChunkPart | None:
    """Reads a message that holds a chunk in canonical form; None for all others. Copies nothing."""
    if message[:1] != _PART_CHUNK:
        return None
    try:
        length, at = _read_varint(message, 1)
        if at + length != len(message):
            return None
        offset = checksum = 0
        data = memoryview(b"")
        while at < len(message):
            tag = message[at]
            if tag == _CHUNK_OFFSET:
                offset, at = _read_varint(message, at + 1)
            elif tag == _CHUNK_CHECKSUM:
                checksum, at = int.from_bytes(message[at + 1 : at + 9], "little"), at + 9
            elif tag == _CHUNK_DATA:
                length, at = _read_varint(message, at + 1)
                data, at = memoryview(message)[at : at + length], at + length
            else:
                return None
    except IndexError:
        return None
    return ChunkPart(offset, checksum, data) if at == len(message) else None


def part_parser(message_class: type[MessageT]) -> Callable[[bytes], MessageT | ChunkPart]:
    """A deserializer for a stream of parts: chunks as `ChunkPart`, the rest as the generated message."""

    def parse(message: bytes) -> MessageT | ChunkPart:
        if (chunk := parse_chunk(message)) is not None:
            return chunk
        parsed = message_class.FromString(message)
        if parsed.WhichOneof("part") == "chunk":
            odd = parsed.chunk  # type: ignore[attr-defined]
            return ChunkPart(odd.offset, odd.checksum, memoryview(odd.data))
        return parsed

    return parse


def part_serializer(part: Message | bytes) -> bytes:
    """A serializer for a stream of parts: bytes are messages already."""
    return part if isinstance(part, bytes) else part.SerializeToString()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a varint of more than ten bytes")
