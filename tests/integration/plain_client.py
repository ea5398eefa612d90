"""A learner written from the protos alone: generated messages and stubs, NumPy, xxhash. It shows what a client of any
language has to do; nothing of this project is imported but `decoupled_diloco.v1`.

    with PlainLearner(address, "alpha") as learner:
        learner.join()
        learner.attach()
        learner.bring_first_parameters()
        ask = learner.told("ask_contribution")
        fate = learner.contribute(ask, delta, spb_fragment.ENCODING_BF16)
"""

from __future__ import annotations

import hashlib
import json
import queue
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Self

import grpc
import numpy as np
import xxhash
from google.protobuf.duration_pb2 import Duration

from decoupled_diloco.v1 import fragment_pb2 as fragment
from decoupled_diloco.v1 import syncer_pb2 as syncer
from decoupled_diloco.v1.syncer_pb2_grpc import SyncerServiceStub

PATIENCE_SECONDS = 60
CHUNK_BYTES = 1 << 20


# ---- fragment.proto: payloads ----------------------------------------------------------------------------------------
# Vectors are little-endian float32, "<f4". A payload does not say how many values it holds; both ends know that.


def write_float32(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


def read_float32(payload: bytes, count: int) -> np.ndarray:
    return np.frombuffer(payload, "<f4", count)


def write_bf16(values: np.ndarray) -> bytes:
    """The upper half of a float32, rounded to nearest, ties to even."""
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def read_bf16(payload: bytes, count: int) -> np.ndarray:
    return (np.frombuffer(payload, "<u2", count).astype("<u4") << 16).view("<f4")


def write_int8(values: np.ndarray) -> bytes:
    return _write_blocks(values, 127, lambda codes: codes.tobytes())


def read_int8(payload: bytes, count: int) -> np.ndarray:
    return _read_blocks(payload, count, lambda data, _: np.frombuffer(data, np.int8), 1)


def write_int4(values: np.ndarray) -> bytes:
    def packed(codes: np.ndarray) -> bytes:
        half = (len(codes) + 1) // 2
        low, high = codes[:half] & 15, np.zeros(half, np.int8)
        high[: len(codes) - half] = codes[half:]
        return (low | high << 4).astype(np.uint8).tobytes()

    return _write_blocks(values, 7, packed)


def read_int4(payload: bytes, count: int) -> np.ndarray:
    def unpacked(data: bytes, size: int) -> np.ndarray:
        pairs = np.frombuffer(data, np.int8)
        return np.concatenate([(pairs << 4) >> 4, pairs >> 4])[:size]

    return _read_blocks(payload, count, unpacked, 2)


def _write_blocks(values: np.ndarray, largest_code: int, packed: Any) -> bytes:
    """Scales of all blocks as bf16, rounded up so that the largest value of the block still fits; then the codes."""
    scales, codes = b"", b""
    for start in range(0, len(values), 128):
        block = values[start : start + 128].astype(np.float32)
        bits = int((np.abs(block).max() / np.float32(largest_code)).astype("<f4").view("<u4"))
        upper = (bits + 0xFFFF) >> 16
        scale = np.array(upper << 16, "<u4").view("<f4")
        scales += upper.to_bytes(2, "little")
        codes += packed((np.rint(block / scale) if scale > 0 else 0 * block).astype(np.int8))
    return scales + codes


def _read_blocks(payload: bytes, count: int, unpacked: Any, codes_per_byte: int) -> np.ndarray:
    blocks = (count + 127) // 128
    scales, codes = read_bf16(payload, blocks), payload[2 * blocks :]
    values, at = [], 0
    for index, scale in enumerate(scales):
        size = min(128, count - 128 * index)
        width = (size + codes_per_byte - 1) // codes_per_byte
        values.append(unpacked(codes[at : at + width], size) * scale)
        at += width
    return np.concatenate(values).astype(np.float32)


class Writing(NamedTuple):
    """How an encoding is written and read."""

    write: Any
    read: Any


ENCODINGS = {
    fragment.ENCODING_FLOAT32: Writing(write_float32, read_float32),
    fragment.ENCODING_BF16: Writing(write_bf16, read_bf16),
    fragment.ENCODING_INT8: Writing(write_int8, read_int8),
    fragment.ENCODING_INT4: Writing(write_int4, read_int4),
}


def digest_of(payload: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(payload)


def chunks_of(payload: bytes, offset: int = 0, sizes: Iterable[int] = ()) -> Iterator[fragment.Chunk]:
    """A payload from an offset on in chunks of these sizes, then of `CHUNK_BYTES`."""
    sizes = iter(sizes)
    while offset < len(payload):
        data = payload[offset : offset + next(sizes, CHUNK_BYTES)]
        yield fragment.Chunk(offset=offset, checksum=xxhash.xxh3_64_intdigest(data), data=data)
        offset += len(data)


def trailer_of(payload: bytes) -> fragment.Trailer:
    return fragment.Trailer(digest=digest_of(payload))


def put_in_place(buffer: bytearray, chunk: fragment.Chunk) -> int:
    """Verifies a chunk and writes it to its place; returns where the next one begins."""
    if xxhash.xxh3_64_intdigest(chunk.data) != chunk.checksum:
        raise ValueError(f"the chunk at {chunk.offset} does not match its checksum")
    end = chunk.offset + len(chunk.data)
    buffer[chunk.offset : end] = chunk.data
    return end


# ---- syncer.proto: a learner -----------------------------------------------------------------------------------------


def schema_of(shapes: dict[str, tuple[int, ...]]) -> fragment.Schema:
    """Tensors merged by radial-directional averaging, ordered by name; the digest is that of their JSON form."""
    names = sorted(shapes)
    plain = [
        {"name": name, "shape": list(shapes[name]), "dtype": "float32", "rule": "rda", "stack_axis": None}
        for name in names
    ]
    canonical = json.dumps({"format": 1, "tensors": plain}, sort_keys=True, separators=(",", ":"))
    tensors = (
        fragment.TensorSpec(name=name, shape=shapes[name], rule=fragment.MERGE_RULE_RDA, dtype="float32")
        for name in names
    )
    return fragment.Schema(tensors=tensors, digest=hashlib.sha256(canonical.encode()).hexdigest())


class PlainLearner:
    """Two tensors of equal size, each a fragment of its own, so that nothing needs to be known of how models are cut.

    Attributes:
        theta: what is held of each fragment.
        versions: the version that it is.
    """

    def __init__(self, address: str, name: str, shape: tuple[int, int]) -> None:
        self._channel = grpc.insecure_channel(address)
        self.stub = SyncerServiceStub(self._channel)
        self.name = name
        self.schema = schema_of({"a/kernel": shape, "b/kernel": shape})
        self.count = shape[0] * shape[1]
        source = np.random.default_rng(5)
        self.theta = [source.standard_normal(self.count).astype("<f4") for _ in range(2)]
        self.versions: list[fragment.Version] = [fragment.Version(), fragment.Version()]
        self.step = 0
        self._outbox: queue.SimpleQueue[syncer.AttachRequest | None] = queue.SimpleQueue()
        self._kept: list[syncer.AttachResponse] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._outbox.put(None)  # half-closes the control stream
        self._channel.close()

    # --- control ---

    def join(self) -> syncer.JoinRunResponse:
        request = syncer.JoinRunRequest(
            protocol=syncer.ProtocolVersionRange(minimum=1, maximum=1),
            learner_id=self.name,
            role=syncer.ROLE_LEARNER,
            schema=self.schema,
            encodings=list(ENCODINGS),
            software_version="plain",
        )
        self.joined = self.stub.JoinRun(request, timeout=PATIENCE_SECONDS)
        return self.joined

    def attach(self) -> None:
        """Opens the control stream. Real learners report at every heartbeat; here the lease outlasts the test."""
        hello = syncer.Hello(learner_id=self.name, incarnation=self.joined.incarnation, progress=self.progress())
        self._outbox.put(syncer.AttachRequest(hello=hello))
        self._instructions = self.stub.Attach(iter(self._outbox.get, None), timeout=PATIENCE_SECONDS)

    def progress(self) -> syncer.Progress:
        duration = Duration()
        duration.FromMilliseconds(10)
        return syncer.Progress(
            local_step=self.step,
            token_count=100 * self.step,
            step_duration=duration,
            activity=syncer.ACTIVITY_COMPUTE,
        )

    def told(self, kind: str) -> Any:
        """The next instruction of a kind; others are kept for later."""
        for index, message in enumerate(self._kept):
            if message.WhichOneof("message") == kind:
                return getattr(self._kept.pop(index), kind)
        for message in self._instructions:
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)
            self._kept.append(message)
        raise AssertionError(f"the control stream ended before {kind} came")

    def applied(self, news: fragment.FragmentVersion) -> None:
        """Says that a version is held from now on."""
        self.versions[news.fragment] = news.version
        self._outbox.put(
            syncer.AttachRequest(
                fragment_applied=syncer.FragmentApplied(
                    fragment=news.fragment, version=news.version, local_step=self.step, token_count=100 * self.step
                )
            )
        )
        self._outbox.put(syncer.AttachRequest(progress=self.progress()))

    # --- bytes ---

    def bring_first_parameters(self) -> None:
        """Uploads them when the run asks for them, and holds them as the first versions."""
        self.told("ask_initial_parameters")
        for index, theta in enumerate(self.theta):
            self.stub.UploadInitialFragment(self._initial_parts(index, write_float32(theta)), timeout=PATIENCE_SECONDS)
        for _ in self.theta:
            news = self.told("fragment_published").version
            assert news.version.digest == digest_of(write_float32(self.theta[news.fragment]))
            self.applied(news)

    def _initial_parts(self, index: int, payload: bytes) -> Iterator[syncer.UploadInitialFragmentRequest]:
        header = syncer.InitialFragmentHeader(
            learner_id=self.name,
            incarnation=self.joined.incarnation,
            fragment=index,
            value_count=self.count,
            schema_digest=self.schema.digest,
        )
        yield syncer.UploadInitialFragmentRequest(header=header)
        for chunk in chunks_of(payload):
            yield syncer.UploadInitialFragmentRequest(chunk=chunk)
        yield syncer.UploadInitialFragmentRequest(trailer=trailer_of(payload))

    def header(
        self, ask: syncer.AskContribution, encoding: fragment.Encoding, payload: bytes
    ) -> syncer.ContributionHeader:
        """Ten steps of a hundred tokens since the last one."""
        self.step = max(self.step + 10, ask.due_local_step)
        return syncer.ContributionHeader(
            learner_id=self.name,
            incarnation=self.joined.incarnation,
            round=ask.round,
            fragment=ask.fragment,
            base=ask.base,
            local_step=self.step,
            token_count=100 * self.step,
            step_count_since_base=10,
            token_count_since_base=1000,
            cursor=self.step,
            encoding=encoding,
            payload_bytes=len(payload),
            schema_digest=self.schema.digest,
        )

    def contribute(
        self, ask: syncer.AskContribution, delta: np.ndarray, encoding: fragment.Encoding, sizes: Iterable[int] = ()
    ) -> syncer.ContributionFate:
        """Header, chunks, trailer; the first answer is the offset (0), the second one the fate."""
        payload = ENCODINGS[encoding].write(delta)
        header = self.header(ask, encoding, payload)

        def parts() -> Iterator[syncer.UploadContributionRequest]:
            yield syncer.UploadContributionRequest(header=header)
            for chunk in chunks_of(payload, 0, sizes):
                yield syncer.UploadContributionRequest(chunk=chunk)
            yield syncer.UploadContributionRequest(trailer=trailer_of(payload))

        offset, fate = self.stub.UploadContribution(parts(), timeout=PATIENCE_SECONDS)
        assert offset.wanted_offset == 0
        return fate.fate

    def resume(self, header: syncer.ContributionHeader, payload: bytes) -> tuple[int, syncer.ContributionFate]:
        """Asks where the syncer stands and sends the rest; returns that offset and the fate.

        A syncer that knows the fate already says so at once, and wants no bytes.
        """
        wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        header.resume = True

        def parts() -> Iterator[syncer.UploadContributionRequest]:
            yield syncer.UploadContributionRequest(header=header)
            for chunk in chunks_of(payload, wanted.get(timeout=PATIENCE_SECONDS)):
                yield syncer.UploadContributionRequest(chunk=chunk)
            yield syncer.UploadContributionRequest(trailer=trailer_of(payload))

        answers = self.stub.UploadContribution(parts(), timeout=PATIENCE_SECONDS)
        first = next(answers)
        is_known = first.HasField("fate")
        offset = len(payload) if is_known else first.wanted_offset
        wanted.put(offset)
        return offset, (first if is_known else next(answers)).fate

    def fetch(
        self, news: fragment.FragmentVersion, held: fragment.Version | None = None, break_at: int = 0
    ) -> tuple[syncer.DownloadHeader, bytes]:
        """The payload of a version, verified; a stream that is broken off after `break_at` bytes is resumed there."""
        buffer, at = bytearray(), 0
        while True:
            request = syncer.DownloadFragmentRequest(
                learner_id=self.name,
                incarnation=self.joined.incarnation,
                fragment=news.fragment,
                version=news.version,
                held=held,
                encodings=[fragment.ENCODING_FLOAT32, fragment.ENCODING_BF16],
                offset=at,
            )
            parts = self.stub.DownloadFragment(request, timeout=PATIENCE_SECONDS)
            header = next(parts).header
            buffer = buffer or bytearray(header.payload_bytes)
            for part in parts:
                if part.HasField("trailer"):
                    assert (at, part.trailer.digest) == (header.payload_bytes, digest_of(bytes(buffer)))
                    return header, bytes(buffer)
                at = put_in_place(buffer, part.chunk)
                if 0 < break_at <= at:
                    break_at = 0
                    parts.cancel()
                    break
