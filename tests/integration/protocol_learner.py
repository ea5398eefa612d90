"""A learner without a model: speaks the real protocol over gRPC, steps by a script, needs neither JAX nor data.

`Link` makes single calls, for tests of what the wire can get wrong. `ProtocolLearner` takes part in a whole run with
the core's learner machine; its "training" pulls every parameter towards a target of its own, a little at each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np
import xxhash

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.outer import apply_delta
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_effects as le
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.core.ids import Activity, Fate, Role, Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.policy import Policy
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


async def answered(call):
    """Awaits a call; what failed arrives as the error that the other end meant."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


class Link:
    """One participant's connections to a syncer."""

    def __init__(self, address: str, name: str, schema: Schema = TINY_SCHEMA) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
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

    def header(self, ask: lev.Asked, encoding: str, **overrides: object) -> spb.ContributionHeader:
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
            encoding_named(encoding).payload_bytes(size),
        )
        message = codec.contribution_header_to_wire(header, encoding, self.schema.digest, resume=False)
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
        await call.write(spb.UploadContributionRequest(header=header))
        try:
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
        except asyncio.InvalidStateError:
            pass  # the syncer has ended the stream; its answer says why
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return await self._fate(call)

    @staticmethod
    async def _fate(call: grpc.aio.StreamStreamCall) -> Fate:
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


@dataclass
class Script:
    """How a protocol learner behaves."""

    step_seconds: float = 0.02
    tokens_per_step: int = 100
    seed: int = 0
    poison_round: int = 0
    """Its contribution to this round holds a NaN."""


@dataclass
class ProtocolLearner:
    """One incarnation of a learner that takes part in a run from the join to the goodbye."""

    address: str
    name: str
    base_policy: Policy
    script: Script = field(default_factory=Script)
    schema: Schema = TINY_SCHEMA
    fates: dict[int, Fate] = field(default_factory=dict)
    applied: list[tuple[int, Version, str]] = field(default_factory=list)
    """Fragment, version, digest of the values as they were applied."""
    encodings_seen: set[str] = field(default_factory=set)
    finished: bool = False
    left: bool = False

    def __post_init__(self) -> None:
        self.link = Link(self.address, self.name, self.schema)
        self._wake = asyncio.Event()
        self._reports: asyncio.Queue = asyncio.Queue()
        self._work: set[asyncio.Task] = set()
        self._arrived: dict[tuple[int, Version], np.ndarray] = {}
        self._copies: dict[int, np.ndarray] = {}

    # --- from the join to the goodbye ---

    async def run(self) -> None:
        try:
            await self._join()
            async with self.link.attached() as stream:
                helpers = [
                    asyncio.create_task(self._read(stream)),
                    asyncio.create_task(self._write(stream)),
                    asyncio.create_task(self._heartbeat()),
                ]
                try:
                    await self._step_for_ever()
                finally:
                    for task in [*helpers, *self._work]:
                        task.cancel()
                    await asyncio.gather(*helpers, *self._work, return_exceptions=True)
                await self.link.leave()
                self.left = True
        finally:
            await self.link.close()

    async def _join(self) -> None:
        joined = await self.link.join()
        self.policy = codec.policy_from_wire(joined.policy, self.base_policy)
        self.heartbeat_seconds = codec.duration_from_wire(joined.deadlines.heartbeat_duration)
        self.machine = LearnerMachine(self.policy, cursor=joined.cursor)
        sizes = fragment_schema(self.schema, self.policy.fragment_count).sizes
        source = np.random.default_rng(7)
        self.theta = [source.normal(size=size).astype(np.float32) for size in sizes]
        self.base = [theta.copy() for theta in self.theta]
        own = np.random.default_rng(self.script.seed + 100)
        self.target = [own.normal(size=size).astype(np.float32) for size in sizes]
        for version in joined.fragments:
            self._handle(codec.fragment_version_from_wire(version))

    async def _step_for_ever(self) -> None:
        while not self.finished:
            boundary = self.machine.at_boundary()
            self._carry_out(boundary)
            if boundary.hold is None:
                await asyncio.sleep(self.script.step_seconds)
                for theta, target in zip(self.theta, self.target, strict=True):
                    theta += np.float32(0.05) * (target - theta)
                self.machine.step_finished(self.script.tokens_per_step)
                continue
            if boundary.hold is le.Hold.DRAINING:
                self._perform(self.machine.drained())
            self._wake.clear()
            await self._wake.wait()

    def _carry_out(self, boundary: le.Boundary) -> None:
        for apply in boundary.applies:
            values = self._arrived.pop((apply.fragment, apply.version))
            self.theta[apply.fragment] = values.copy()
            self.base[apply.fragment] = values
            self.applied.append((apply.fragment, apply.version, vector_digest(values)))
            self._reports.put_nowait(
                ev.FragmentApplied(
                    self.name,
                    self.link.incarnation,
                    apply.fragment,
                    apply.version,
                    self.machine.local_step,
                    self.machine.token_count,
                    apply.kept_token_count,
                    0.001,
                )
            )
        for copy in boundary.copies:
            self._copies[copy.fragment] = self.theta[copy.fragment] - self.base[copy.fragment]
        self._perform(boundary.uploads)

    # --- effects ---

    def _handle(self, event: lev.LearnerEvent) -> None:
        self._perform(self.machine.handle(event))
        self.finished = self.finished or isinstance(event, lev.Ended)
        self._wake.set()

    def _perform(self, effects: Iterable[le.LearnerEffect]) -> None:
        for effect in effects:
            match effect:
                case le.Upload():
                    self._start(self._upload(effect, self._copies[effect.copy.fragment]))
                case le.Download():
                    self._start(self._download(effect))
                case le.UploadInitialParameters():
                    self._start(self._upload_initial())
                case le.DeclineRound(round=number, reason=reason):
                    self._reports.put_nowait(ev.ContributionDeclined(self.name, self.link.incarnation, number, reason))
                case le.Leave():
                    self.finished = True

    def _start(self, work) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _upload(self, upload: le.Upload, delta: np.ndarray) -> None:
        copy, encoding = upload.copy, encoding_named(self.policy.upload_encoding)
        if upload.round == self.script.poison_round:
            delta = delta.copy()
            delta[0] = np.nan
        payload = encoding.encode(delta)
        header = ev.ContributionHeader(
            self.name,
            self.link.incarnation,
            upload.round,
            copy.fragment,
            copy.base,
            copy.local_step,
            copy.total_token_count,
            copy.step_count,
            copy.token_count,
            copy.cursor,
            len(payload),
        )
        message = codec.contribution_header_to_wire(header, encoding.name, self.schema.digest, resume=False)
        fate = await self.link.upload(message, payload)
        self.fates[upload.round] = fate
        self._handle(lev.UploadEnded(upload.round))

    async def _upload_initial(self) -> None:
        for fragment, theta in enumerate(self.theta):
            await self.link.upload_initial(fragment, theta)

    async def _download(self, download: le.Download) -> None:
        try:
            header, payload = await self.link.download(download.fragment, download.version, download.held)
        except (PeerError, UnreachableError):
            self._handle(lev.DownloadFailed(download.fragment, download.version))
            return
        encoding = enums.encoding_from_wire(header.encoding)
        self.encodings_seen.add(encoding)
        if header.HasField("delta_base"):
            held = self._arrived.get((download.fragment, download.held), self.base[download.fragment])
            values = apply_delta(held, payload, encoding)
        else:
            values = encoding_named(encoding).decode(payload)
        self._arrived[download.fragment, download.version] = values
        event = lev.Downloaded(download.fragment, download.version, header.version.global_step)
        self._handle(event)

    # --- the control stream ---

    async def _read(self, stream) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            event = control.instruction_from_wire(message)
            if event is not None:
                self._handle(event)

    async def _write(self, stream) -> None:
        while True:
            await stream.write(control.report_to_wire(await self._reports.get()))

    async def _heartbeat(self) -> None:
        loss_of = [(theta, target) for theta, target in zip(self.theta, self.target, strict=True)]
        while True:
            loss = float(np.mean([np.square(theta - target).mean() for theta, target in loss_of]))
            activity = Activity.RECOVER if len(self.machine.applied_versions) < len(self.theta) else Activity.COMPUTE
            progress = ev.Progress(
                self.machine.local_step,
                self.machine.token_count,
                activity,
                self.script.step_seconds,
                spans=((activity, self.heartbeat_seconds),),
                loss=loss,
                schedule_step=self.machine.schedule_step,
            )
            self._reports.put_nowait(ev.ProgressReported(self.name, self.link.incarnation, progress))
            await asyncio.sleep(self.heartbeat_seconds)
