"""PeerService: what other learners may ask of this one when they recover."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from decoupled_diloco.arrays.state_entry import entries_difference
from decoupled_diloco.core.errors import PeerError, Reason, Recourse
from decoupled_diloco.runtime.channel import SERVER_OPTIONS, add_port
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.runtime.ports import Address
from decoupled_diloco.runtime.rate_limit import RateLimit
from decoupled_diloco.v1 import peer_pb2 as ppb
from decoupled_diloco.v1.peer_pb2_grpc import PeerServiceServicer
from decoupled_diloco.wire import status
from decoupled_diloco.wire.methods import add_peer_service
from decoupled_diloco.wire.peer import PartRequest, part_header_to_wire, part_request_from_wire
from decoupled_diloco.wire.stream import CHUNK_BYTES, payload_messages
from learner_service.optimizer_copies import OptimizerCopies
from learner_service.peer_copies import KeptCopies, KeptCopy

log = get_logger(__name__)

REQUESTS_MAX: Final = 8
"""Requests that a donor serves at a time; more get OVERLOADED."""
WRITE_SECONDS_MAX: Final = 10.0
"""A caller that takes no bytes for this long loses its stream."""


@dataclass(frozen=True, slots=True)
class DonorIdentity:
    """Who the donor is, so that nobody takes another run's or model's state for its own."""

    learner: str
    run_id: Callable[[], str]
    schema_digest: str


class PeerServicer(PeerServiceServicer):
    """Serves copies of the inner optimizer's state.

    Args:
        identity: of this learner.
        copies: made at step boundaries.
        kept: those in host memory.
        sent: told about payload bytes.
        limit: how fast they may leave; None: as fast as they can.
    """

    def __init__(
        self,
        identity: DonorIdentity,
        copies: OptimizerCopies,
        kept: KeptCopies,
        sent: Callable[[int], None],
        limit: RateLimit | None = None,
    ) -> None:
        self._identity = identity
        self._copies = copies
        self._kept = kept
        self._sent = sent
        self._limit = limit or RateLimit()
        self._request_count = 0

    async def DownloadOptimizerState(  # noqa: N802
        self, request: ppb.DownloadOptimizerStateRequest, context: Any
    ) -> None:
        """Streams one part, or says why not."""
        try:
            await self._download(part_request_from_wire(request), context)
        except Exception as error:
            await _refuse(context, error, request.learner_id)

    async def _download(self, request: PartRequest, context: Any) -> None:
        self._check(request)
        if self._request_count >= REQUESTS_MAX:
            raise PeerError(Reason.OVERLOADED, f"{REQUESTS_MAX} requests are served already")
        self._request_count += 1
        try:
            await context.send_initial_metadata(())
            async with self._kept.reading(request.part, request.copy) as copy:
                await self._send(request, copy, context)
        finally:
            self._request_count -= 1

    def _check(self, request: PartRequest) -> None:
        """Refuses, in words, whoever cannot use this learner's state."""
        identity, fragments = self._identity, self._copies.fragments
        if request.learner == identity.learner:
            raise PeerError(Reason.WRONG_STATE, f"learner {request.learner!r} asks itself")
        if request.run_id != identity.run_id():
            text = f"run_id = {request.run_id!r}: this learner is in run {identity.run_id()!r}"
            raise PeerError(Reason.RUN_MISMATCH, text)
        if request.schema_digest != identity.schema_digest:
            text = f"schema_digest = {request.schema_digest!r}: this learner's model has {identity.schema_digest!r}"
            raise PeerError(Reason.SCHEMA_MISMATCH, text)
        if fragments is None:
            text = "this learner's training loop does not hand over the optimizer's state, or has not begun"
            raise PeerError(Reason.NOT_READY, text, None, 1.0)
        if request.part >= fragments.part_count:
            text = f"fragment = {request.part}: must be 0 to {fragments.part_count - 1}"
            raise PeerError(Reason.INVALID_FIELD, text)
        if difference := entries_difference(fragments.entries[request.part], request.entries):
            text = f"the optimizer's state of learner {identity.learner!r} is built otherwise; {difference}"
            raise PeerError(Reason.SCHEMA_MISMATCH, text)

    async def _send(self, request: PartRequest, copy: KeptCopy, context: Any) -> None:
        here, there = copy.header.version, request.version
        if here is not None and there is not None and here.timeline != there.timeline:
            text = f"this learner is on timeline {here.timeline}, the caller on {there.timeline}"
            raise PeerError(Reason.NOT_READY, text, None, 1.0)
        offset = request.offset if copy.header.copy == request.copy else 0
        if offset > copy.payload.size:
            raise PeerError(Reason.INVALID_FIELD, f"offset = {offset}: must be 0 to {copy.payload.size}")
        await _write(context, part_header_to_wire(copy.part, copy.header))
        for message in payload_messages(copy.payload.data, offset, self._limit.piece_bytes(CHUNK_BYTES)):
            await self._limit.passed(len(message))
            await _write(context, message)
            self._sent(len(message))
        log.debug(
            "optimizer_state_served",
            learner=request.learner,
            part=copy.part,
            sent_bytes=copy.payload.size - offset,
            local_step=copy.header.copy.local_step,
        )


async def _write(context: Any, message: ppb.DownloadOptimizerStateResponse | bytes) -> None:
    try:
        async with asyncio.timeout(WRITE_SECONDS_MAX):
            await context.write(message)
    except TimeoutError:
        text = f"the receiver took no bytes for {WRITE_SECONDS_MAX:g} s"
        raise PeerError(Reason.TRANSFER_IDLE, text) from None


async def _refuse(context: Any, failure: Exception, learner: str) -> NoReturn:
    if status.connection_broke(failure):
        log.debug("call_ended", call="DownloadOptimizerState", learner=learner, reason=status.CONNECTION_BROKE)
        await status.abort(context, failure)
    error = status.error_of(failure)
    if error.reason is Reason.INTERNAL:
        log.error("call_failed", call="DownloadOptimizerState", learner=learner, exc_info=failure)
    else:
        say = log.info if error.recourse is Recourse.STOP else log.debug
        say("optimizer_state_refused", learner=learner, code=error.reason.value, reason=error.text)
    await status.abort(context, error)


async def start_peer_server(
    address: Address, credentials: grpc.ServerCredentials | None, setting: str, servicer: PeerServicer
) -> tuple[grpc.aio.Server, Address]:
    """Serves PeerService in the running event loop; returns the server and the address with its port.

    Args:
        address: where; port 0 takes any free one.
        credentials: of this end; None for plaintext, which the settings must have allowed.
        setting: name of the setting with the address, for the message.
        servicer: answers the calls.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_peer_service(servicer, server)
    taken = add_port(server, address, credentials, setting)
    await server.start()
    return server, taken
