"""Single calls of one participant, for tests of what the wire can get wrong; needs neither JAX nor a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import numpy as np
import xxhash

from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.core.ids import Activity, Fate, Role, Version
from decoupled_diloco.v1 import fragment_pb2 as fpb
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire import codec, control, enums
from decoupled_diloco.wire.methods import SyncerStub
from decoupled_diloco.wire.status import from_rpc_error
from decoupled_diloco.wire.stream import CHUNK_BYTES, ChunkPart, PayloadSink, payload_messages

TINY_SCHEMA = Schema(
    [
        TensorSpec("embed/table", (32, 8), rule="avg"),
        TensorSpec("layers/kernel", (4, 8, 8), stack_axis=0),
        TensorSpec("head/kernel", (8, 32)),
        TensorSpec("head/scale", (8,)),
    ]
)


async def refusal_of(stream) -> PeerError | UnreachableError:
    """Why the syncer ended a stream; passes over what comes before."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            pass
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the stream ended in good order")


async def answered(call):
    """Awaits a call; what failed arrives as the error that the other end meant."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


class Link:
    """One participant's connections to a syncer."""

    def __init__(self, address: str, name: str, schema: Schema = TINY_SCHEMA) -> None:
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 300),
        )
        self.name = name
        self.schema = schema
        self.incarnation = 0
        self.joined: spb.JoinRunResponse | None = None
        self._channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(2)]
        self.control = SyncerStub(self._channels[0])
        self.bulk = SyncerStub(self._channels[1])

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def join(self, role: Role = Role.LEARNER, **overrides: object) -> spb.JoinRunResponse:
        """Joins; `overrides` replace fields of the request."""
        fields = {
            "protocol": spb.ProtocolVersionRange(minimum=1, maximum=1),
            "learner_id": self.name,
            "role": enums.role_to_wire(role),
            "schema": codec.schema_to_wire(self.schema),
            "encodings": [fpb.ENCODING_FLOAT32, fpb.ENCODING_BF16],
            "software_version": "protocol-learner",
        }
        self.joined = await answered(self.control.JoinRun(spb.JoinRunRequest(**(fields | overrides)), timeout=10))
        self.incarnation = self.joined.incarnation
        return self.joined

    async def leave(self, reason: str = "done") -> None:
        request = spb.LeaveRunRequest(learner_id=self.name, incarnation=self.incarnation, reason=reason)
        await answered(self.control.LeaveRun(request, timeout=10))

    @asynccontextmanager
    async def attached(
        self, applied: Iterable[tuple[int, Version]] = (), progress: ev.Progress | None = None
    ) -> AsyncIterator[grpc.aio.StreamStreamCall]:
        """The control stream after its hello."""
        call = self.control.Attach()
        hello = ev.LearnerAttached(self.name, self.incarnation, tuple(applied), progress or compute(0, 0))
        await call.write(control.hello_to_wire(hello))
        try:
            yield call
        finally:
            call.cancel()

    def header(self, ask: lev.Asked, written_as: str, **overrides: object) -> spb.ContributionHeader:
        """The header of a contribution to an ask; `overrides` replace fields."""
        size = fragment_schema(self.schema, self.joined.policy.fragment_count).sizes[ask.fragment]
        header = ev.ContributionHeader(
            self.name,
            self.incarnation,
            ask.round,
            ask.fragment,
            ask.base,
            10,
            1000,
            5,
            500,
            10,
            encoding_named(written_as).payload_bytes(size),
        )
        message = codec.contribution_header_to_wire(header, written_as, self.schema.digest, resume=False)
        for name, value in overrides.items():
            setattr(message, name, value)
        return message

    async def upload(
        self,
        header: spb.ContributionHeader,
        payload: bytes | memoryview,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        mangle: Callable[[int, bytes], bytes | None] = lambda index, message: message,
    ) -> Fate:
        """Sends one contribution. `mangle` may change each message after the header, or end the stream with None."""
        call = self.bulk.UploadContribution()
        try:
            await call.write(spb.UploadContributionRequest(header=header))
            offset = 0
            if header.resume:
                first = await answered(call.read())
                if first is grpc.aio.EOF:
                    await answered(call)
                if first.WhichOneof("answer") == "fate":
                    return enums.fate_from_wire(first.fate)
                offset = first.wanted_offset
            for index, message in enumerate(payload_messages(payload, offset, chunk_bytes)):
                if (changed := mangle(index, message)) is None:
                    break
                await call.write(changed)
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.RpcError):
            pass  # the syncer has ended the stream; its answer, or its status, says why
        return await self.fate(call)

    @staticmethod
    async def fate(call: grpc.aio.StreamStreamCall) -> Fate:
        """The last answer to an upload."""
        while (answer := await answered(call.read())) is not grpc.aio.EOF:
            if answer.WhichOneof("answer") == "fate":
                return enums.fate_from_wire(answer.fate)
        trailing = await call.trailing_metadata()
        code, details = await call.code(), await call.details()
        raise from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None))

    async def upload_initial(self, fragment: int, theta: np.ndarray) -> None:
        header = spb.InitialFragmentHeader(
            learner_id=self.name,
            incarnation=self.incarnation,
            fragment=fragment,
            value_count=theta.size,
            schema_digest=self.schema.digest,
        )

        async def parts():
            yield spb.UploadInitialFragmentRequest(header=header)
            for message in payload_messages(theta.view(np.uint8).data):
                yield message

        await answered(self.bulk.UploadInitialFragment(parts()))

    async def download(
        self,
        fragment: int,
        version: Version,
        held: Version | None = None,
        encodings: tuple[str, ...] = ("float32", "bf16"),
        offset: int = 0,
        received: bytes = b"",
    ) -> tuple[spb.DownloadHeader, bytes]:
        """One version, verified; `received` is what an earlier stream brought, up to `offset`."""
        request = spb.DownloadFragmentRequest(
            learner_id=self.name,
            incarnation=self.incarnation,
            fragment=fragment,
            offset=offset,
            version=codec.version_to_wire(version),
            encodings=[enums.encoding_to_wire(name) for name in encodings],
        )
        if held is not None:
            request.held.CopyFrom(codec.version_to_wire(held))
        call = self.bulk.DownloadFragment(request)
        header = (await answered(call.read())).header
        buffer = bytearray(header.payload_bytes)
        sink = PayloadSink(memoryview(buffer))
        for start in range(0, offset, CHUNK_BYTES):
            piece = memoryview(received)[start : min(offset, start + CHUNK_BYTES)]
            sink.write(chunk_of(start, piece))
        while isinstance(part := await answered(call.read()), ChunkPart):
            sink.write(part)
        sink.finish(part.trailer.digest)
        return header, bytes(buffer)


def chunk_of(offset: int, data: memoryview) -> ChunkPart:
    """A received chunk, as if it had come over the wire."""
    return ChunkPart(offset, xxhash.xxh3_64_intdigest(data), data)


def compute(local_step: int, token_count: int, step_seconds: float | None = None, **more: object) -> ev.Progress:
    """A report of a learner that computes."""
    return ev.Progress(local_step, token_count, Activity.COMPUTE, step_seconds, **more)
