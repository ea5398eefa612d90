"""Errors on the wire: the catalogue is complete, statuses survive the trip, and nothing outgrows gRPC's
metadata."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc._cython.cygrpc import ExecuteBatchError

from decoupled_diloco.core.effects import Refusal
from decoupled_diloco.core.errors import KINDS, Blame, PeerError, Reason, Recourse, UnreachableError
from decoupled_diloco.v1 import error_pb2
from decoupled_diloco.wire import status
from decoupled_diloco.wire.enums import CodecError
from decoupled_diloco.wire.stream import CorruptPayloadError


def test_every_reason_of_the_proto_is_in_the_catalogue_and_no_other() -> None:
    names = {name.removeprefix(status.REASON_PREFIX) for name, number in error_pb2.ErrorReason.items() if number}
    assert names == {reason.value for reason in Reason}
    assert set(status.CODES) == set(Reason) == set(KINDS)


def test_the_codes_are_those_that_the_proto_promises() -> None:
    text = error_pb2.DESCRIPTOR.name
    assert text == "decoupled_diloco/v1/error.proto"
    assert status.CODES[Reason.CONFIG_MISMATCH] is grpc.StatusCode.FAILED_PRECONDITION
    assert status.CODES[Reason.OVERLOADED] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert status.CODES[Reason.NOT_READY] is grpc.StatusCode.UNAVAILABLE
    assert status.CODES[Reason.CORRUPT] is grpc.StatusCode.DATA_LOSS


@pytest.mark.parametrize("reason", list(Reason))
def test_a_refusal_survives_the_trip(reason: Reason) -> None:
    error = PeerError(reason, "K = 65: at most 64", {"newest": "1.7"}, retry_seconds=2.5)
    again = status.from_status(status.to_status(error))
    assert again is not None
    assert (again.reason, again.text, again.metadata, again.retry_seconds) == (
        reason,
        "K = 65: at most 64",
        {"newest": "1.7"},
        2.5,
    )
    assert again.recourse is error.recourse


def test_the_error_info_carries_the_full_name_and_the_domain() -> None:
    made = status.to_status(PeerError(Reason.RUN_MISMATCH, "x"))
    info = error_details_pb2.ErrorInfo()
    assert len(made.details) == 1
    assert made.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("ERROR_REASON_RUN_MISMATCH", "decoupled-diloco")


def test_a_full_queue_always_says_when_to_come_back() -> None:
    again = status.from_status(status.to_status(PeerError(Reason.OVERLOADED, "the queue is full")))
    assert again is not None
    assert again.retry_seconds == status.RETRY_SECONDS_DEFAULT


@pytest.mark.parametrize("text", ["x" * 100_000, "\u00fc" * 5000, "\u96ea" * 5000])
def test_long_text_is_cut_so_that_it_fits_into_metadata(text: str) -> None:
    made = status.to_status(PeerError(Reason.CONFIG_MISMATCH, text, {f"key-{n}": text[:300] for n in range(99)}))
    assert made.message.endswith("...")
    assert len(made.SerializeToString()) < 4600
    again = status.from_status(made)
    assert again is not None
    assert int(again.metadata["left-out"]) > 50


def test_a_status_of_another_maker_is_not_ours() -> None:
    foreign = status.to_status(PeerError(Reason.INTERNAL, "x"))
    info = error_details_pb2.ErrorInfo(reason="STOCKOUT", domain="compute.example")
    foreign.details[0].Pack(info)
    assert status.from_status(foreign) is None
    info = error_details_pb2.ErrorInfo(reason="ERROR_REASON_OF_A_LATER_RELEASE", domain="decoupled-diloco")
    foreign.details[0].Pack(info)
    assert status.from_status(foreign) is None


@pytest.mark.parametrize(
    ("failure", "reason", "words"),
    [
        (PeerError(Reason.SUPERSEDED, "by 1.9"), Reason.SUPERSEDED, "by 1.9"),
        (Refusal("RUN_FINISHED", "it is over"), Reason.RUN_FINISHED, "it is over"),
        (CodecError("fragment = -1: 0 or more"), Reason.INVALID_FIELD, "fragment = -1"),
        (CorruptPayloadError("chunk at 0"), Reason.CORRUPT, "chunk at 0"),
        (NotImplementedError(), Reason.UNIMPLEMENTED, "does not have it"),
        (KeyError("secret path"), Reason.INTERNAL, "KeyError"),
    ],
)
def test_failures_become_refusals_and_bugs_keep_their_details_to_themselves(
    failure: BaseException | Refusal, reason: Reason, words: str
) -> None:
    error = status.error_of(failure)
    assert error.reason is reason
    assert words in error.text
    assert "secret" not in error.text


def test_blame_and_recourse_of_the_cases_that_programs_branch_on() -> None:
    assert PeerError(Reason.NOT_JOINED, "").recourse is Recourse.JOIN_AGAIN
    assert PeerError(Reason.SUPERSEDED, "").recourse is Recourse.CATCH_UP
    assert PeerError(Reason.OVERLOADED, "").blame is Blame.CALLED
    assert PeerError(Reason.CONFIG_MISMATCH, "").recourse is Recourse.STOP


class _Refusing(grpc.GenericRpcHandler):
    """A server of which every call fails with the failure that the call's name says."""

    def __init__(self, failures: dict[str, BaseException]) -> None:
        self._failures = failures

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        failure = self._failures.get(handler_call_details.method)
        if failure is None:
            return None

        async def refuse(_request: bytes, context: Any) -> bytes:
            await status.abort(context, failure)

        return grpc.unary_unary_rpc_method_handler(refuse)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    differences = {f"section.setting-{n:03}": "syncer 0.6000000000001, learner 0.7" for n in range(500)}
    failures: dict[str, BaseException] = {
        "/t/differs": PeerError(Reason.CONFIG_MISMATCH, "snö " * 5000, differences),
        "/t/full": PeerError(Reason.OVERLOADED, "full", retry_seconds=3.0),
        "/t/bug": ZeroDivisionError(),
    }
    server.add_generic_rpc_handlers((_Refusing(failures),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0)]) as opened:
        yield opened
    await server.stop(None)


async def refusal_of(channel: grpc.aio.Channel, method: str) -> PeerError | UnreachableError:
    with pytest.raises(grpc.RpcError) as caught:
        await channel.unary_unary(method, None, None)(b"")
    return status.from_rpc_error(caught.value)


async def test_even_the_longest_refusal_arrives_over_a_real_connection(channel: grpc.aio.Channel) -> None:
    error = await refusal_of(channel, "/t/differs")
    assert isinstance(error, PeerError)
    assert error.reason is Reason.CONFIG_MISMATCH
    assert "section.setting-000" in error.metadata
    assert "left-out" in error.metadata


async def test_advice_to_wait_and_bugs_arrive_too(channel: grpc.aio.Channel) -> None:
    full = await refusal_of(channel, "/t/full")
    assert isinstance(full, PeerError)
    assert full.retry_seconds == 3.0
    bug = await refusal_of(channel, "/t/bug")
    assert isinstance(bug, PeerError)
    assert bug.reason is Reason.INTERNAL


async def test_a_call_that_the_other_end_does_not_know_is_a_refusal(channel: grpc.aio.Channel) -> None:
    error = await refusal_of(channel, "/t/unheard-of")
    assert isinstance(error, PeerError)
    assert error.reason is Reason.UNIMPLEMENTED


class _DeadCall:
    """The context of a call whose caller is gone."""

    abort_count = 0

    async def abort(self, *_: object) -> NoReturn:
        self.abort_count += 1
        raise ExecuteBatchError("Failed grpc_call_start_batch")


async def test_nobody_is_told_why_a_call_ended_whose_connection_broke() -> None:
    call, broken = _DeadCall(), ExecuteBatchError("Failed execute_batch")
    assert status.connection_broke(broken)
    assert not status.connection_broke(grpc.aio.UsageError())
    assert not status.connection_broke(PeerError(Reason.INTERNAL, ""))
    with pytest.raises(asyncio.CancelledError, match="the connection broke"):
        await status.abort(call, broken)
    assert call.abort_count == 0
    with pytest.raises(asyncio.CancelledError, match="the connection broke"):
        await status.abort(call, PeerError(Reason.TRANSFER_IDLE, "no bytes came"))
    assert call.abort_count == 1


async def test_no_answer_is_unreachable_and_not_a_refusal() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1", options=[("grpc.enable_http_proxy", 0)]) as nowhere:
        error = await refusal_of(nowhere, "/t/x")
    assert isinstance(error, UnreachableError)
    assert error.code == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("details", "has_hint"),
    [
        ("failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", True),
        ("Stream removed (Socket closed)", False),
        ("Stream removed (recvmsg:Connection reset by peer (104))", False),
    ],
)
def test_tls_is_not_suspected_where_the_connection_had_been_up(details: str, has_hint: bool) -> None:
    empty = grpc.aio.Metadata()
    failure = status.from_rpc_error(grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, empty, empty, details))
    assert ("perhaps the other end speaks TLS" in str(failure)) is has_hint
    assert not status.is_tls_fault(failure)
