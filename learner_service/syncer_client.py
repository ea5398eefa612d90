"""The control calls of SyncerService as a learner or an evaluator makes them. Nothing is repeated here.

Every method raises `PeerError` for what the syncer refused and `UnreachableError` where no answer came.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from decoupled_diloco.arrays.encoding import ENCODINGS
from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.core.ids import Role
from decoupled_diloco.core.policy import Deadlines, Policy
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire.codec import (
    PROTOCOL_VERSION,
    deadlines_from_wire,
    fragment_version_from_wire,
    peers_from_wire,
    policy_from_wire,
    schema_to_wire,
)
from decoupled_diloco.wire.control import Report, hello_to_wire, instruction_from_wire, report_to_wire
from decoupled_diloco.wire.enums import encoding_to_wire, role_to_wire
from decoupled_diloco.wire.methods import SyncerStub
from decoupled_diloco.wire.status import from_rpc_error

ResultT = TypeVar("ResultT")

END: Final = grpc.aio.EOF  # type: ignore[attr-defined]
"""What `read` returns after the last message of a stream."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What a participant says of itself. `config_values` are the agreed values of its run file by dotted name."""

    run_id: str
    participant_id: str
    role: Role
    schema: Schema
    config_digest: str
    config_values: Mapping[str, str]
    policy: Policy
    software_version: str
    peer_address: str = ""


@dataclass(frozen=True, slots=True)
class Joined:
    """What the syncer hands out: see JoinRunResponse in syncer.proto. The policy holds the one table of deadlines."""

    run_id: str
    incarnation: int
    policy: Policy
    versions: tuple[lev.Published, ...]
    slot: int
    cursor: int
    global_step: int
    paused: bool
    initialized: bool
    peers: tuple[tuple[str, str], ...] = ()


class ControlStream:
    """One Attach stream.

    Attributes:
        peers: whom the newest instruction to recover names, id and address; None: there was none.
    """

    def __init__(self, call: Any, deadlines: Deadlines, policy: Policy) -> None:
        self._call = call
        self._deadlines = deadlines
        self._policy = policy
        self.peers: tuple[tuple[str, str], ...] | None = None

    async def send(self, report: Report | ev.LearnerAttached) -> None:
        """Sends one report; waits where the syncer does not keep up."""
        message = hello_to_wire(report) if isinstance(report, ev.LearnerAttached) else report_to_wire(report)
        await step_of(self._call, self._call.write(message), Idle(self._deadlines.attach_idle_seconds))

    async def received(self) -> lev.LearnerEvent | Policy | None:
        """The next instruction, a changed policy, or None for a sign of life.

        Raises:
            UnreachableError: also when nothing was heard for as long as the table of deadlines allows.
        """
        message = await step_of(self._call, self._call.read(), Idle(self._deadlines.attach_idle_seconds))
        if message is END:
            raise await end_of(self._call)
        if message.WhichOneof("message") == "policy_changed":
            self._policy = policy_from_wire(message.policy_changed.policy, self._policy)
            return self._policy
        if message.WhichOneof("message") == "recover":
            self.peers = peers_from_wire(message.recover.peers)
        return instruction_from_wire(message)

    def close(self) -> None:
        """Ends the stream."""
        self._call.cancel()


class SyncerClient:
    """One participant's calls over the control connection.

    Args:
        channel: closed by its owner.
        participant_id: the caller's id.
    """

    def __init__(self, channel: grpc.aio.Channel, participant_id: str) -> None:
        self._stub = SyncerStub(channel)
        self._participant_id = participant_id

    async def join(self, request: JoinRequest) -> Joined:
        """Registers a new incarnation."""
        message = spb.JoinRunRequest(
            protocol=spb.ProtocolVersionRange(minimum=PROTOCOL_VERSION, maximum=PROTOCOL_VERSION),
            run_id=request.run_id,
            learner_id=request.participant_id,
            role=role_to_wire(request.role),
            schema=schema_to_wire(request.schema),
            config_digest=request.config_digest,
            config_values=dict(request.config_values),
            encodings=[encoding_to_wire(name) for name in ENCODINGS],
            peer_address=request.peer_address,
            software_version=request.software_version,
        )
        deadlines = request.policy.deadlines
        call = self._stub.JoinRun(message, timeout=deadlines.rpc_seconds)
        answer = await step_of(call, call, Idle(2 * deadlines.rpc_seconds))
        policy = policy_from_wire(answer.policy, request.policy)
        return Joined(
            run_id=answer.run_id,
            incarnation=answer.incarnation,
            policy=policy.changed(deadlines=deadlines_from_wire(answer.deadlines)),
            versions=tuple(fragment_version_from_wire(version) for version in answer.fragments),
            slot=answer.slot,
            cursor=answer.cursor,
            global_step=answer.global_step,
            paused=answer.paused,
            initialized=answer.initialized,
            peers=peers_from_wire(answer.peers),
        )

    @asynccontextmanager
    async def attach(self, hello: ev.LearnerAttached, policy: Policy) -> AsyncIterator[ControlStream]:
        """Opens the control stream and says hello."""
        call = self._stub.Attach()
        stream = ControlStream(call, policy.deadlines, policy)
        try:
            await stream.send(hello)
            yield stream
        finally:
            stream.close()

    async def leave(self, incarnation: int, reason: str, deadlines: Deadlines) -> None:
        """Takes an incarnation off the run."""
        message = spb.LeaveRunRequest(learner_id=self._participant_id, incarnation=incarnation, reason=reason)
        call = self._stub.LeaveRun(message, timeout=deadlines.rpc_seconds)
        await step_of(call, call, Idle(2 * deadlines.rpc_seconds))


class Idle:
    """For how long nothing has moved, and for how long nothing may; on the event loop's clock."""

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self.moved()

    def moved(self) -> None:
        """Something has moved just now."""
        self._moved_at = asyncio.get_running_loop().time()

    def left_seconds(self) -> float:
        """Time left before the wait is over."""
        return self._moved_at + self.limit_seconds - asyncio.get_running_loop().time()


async def step_of(call: Any, work: Awaitable[ResultT], idle: Idle) -> ResultT:
    """Awaits one step of a call: an answer, a read or a write.

    gRPC reports a call that ended with status CANCELLED as if the calling task had been cancelled; here the two are
    told apart.

    Raises:
        PeerError: the syncer refused the call.
        UnreachableError: the call broke, or nothing has moved for as long as `idle` allows.
    """
    future = asyncio.ensure_future(work)
    try:
        while not future.done():
            if (left := idle.left_seconds()) <= 0.0:
                raise nothing_moved(idle)
            await asyncio.wait((future,), timeout=left)
        if future.cancelled():
            raise connection_closed()
        return future.result()
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.InvalidStateError:  # a write after the end
        raise await end_of(call) from None
    finally:
        future.cancel()


def nothing_moved(idle: Idle) -> UnreachableError:
    """What it means that the time was over."""
    return UnreachableError("DEADLINE_EXCEEDED", f"nothing has moved for {idle.limit_seconds:g} s")


def connection_closed() -> UnreachableError:
    """What it means that gRPC reports a cancellation that nobody here has asked for."""
    return UnreachableError("CANCELLED", "the connection was closed in the middle of the call")


async def end_of(call: Any) -> PeerError | UnreachableError:
    """What it means that a stream ended before its last part."""
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.OK:
        return UnreachableError("OK", "the stream ended before its last part")
    trailing = await call.trailing_metadata()
    return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None))
