"""Several connections that look like one channel: which of them a call takes, over real sockets."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from decoupled_diloco.runtime.channel import (
    SERVER_OPTIONS,
    Channels,
    add_port,
    channel_options,
    open_channel,
    open_channels,
)
from decoupled_diloco.runtime.ports import Address
from decoupled_diloco.runtime.spread_channel import SpreadChannel


class _Peers(grpc.GenericRpcHandler):
    """Every kind of call answers with the caller's address as the server sees it; streams then wait for their end."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        def of(context: Any) -> bytes:
            return str(context.peer()).encode()

        async def unary_unary(_request: bytes, context: Any) -> bytes:
            return of(context)

        async def unary_stream(_request: bytes, context: Any) -> None:
            await context.write(of(context))
            await asyncio.Event().wait()

        async def stream_unary(requests: Any, context: Any) -> bytes:
            async for _ in requests:
                pass
            return of(context)

        async def stream_stream(requests: Any, context: Any) -> None:
            await context.write(of(context))
            async for _ in requests:
                pass

        kind = handler_call_details.method.rsplit("/", 1)[1]
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(locals()[kind])


@asynccontextmanager
async def serving() -> AsyncIterator[Address]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Peers(),))
    address = add_port(server, Address("127.0.0.1", 0), None, "test")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


@asynccontextmanager
async def spread(count: int) -> AsyncIterator[SpreadChannel]:
    async with serving() as address:
        channels = open_channels(address, None, bulk_connections=count)
        try:
            yield cast(SpreadChannel, channels.bulk)
        finally:
            await channels.close()


async def end_of(call: Any) -> None:
    """Waits until a call's end has been told to everybody."""
    ended = asyncio.Event()
    call.add_done_callback(lambda _: ended.set())  # after those that were there before
    async with asyncio.timeout(10):
        await ended.wait()


async def test_streams_at_the_same_time_are_spread_evenly_over_the_connections() -> None:
    async with spread(3) as channel:
        stream = channel.unary_stream("/t/unary_stream")
        calls = [stream(b"") for _ in range(7)]
        peers = Counter([await call.read() for call in calls])
        assert sorted(peers.values()) == [2, 2, 3]
        assert sorted(channel.calls_under_way) == [2, 2, 3]


async def test_a_call_takes_the_place_of_one_that_has_ended() -> None:
    async with spread(3) as channel:
        stream = channel.unary_stream("/t/unary_stream")
        calls = [stream(b"") for _ in range(6)]
        peers = [await call.read() for call in calls]
        for ended in (1, 4):  # both on the second connection
            assert peers[ended] == peers[1]
            calls[ended].cancel()
            await end_of(calls[ended])
        assert channel.calls_under_way == (2, 0, 2)
        assert {await stream(b"").read() for _ in range(2)} == {peers[1]}


@pytest.mark.parametrize("kind", ["unary_unary", "stream_unary", "unary_stream", "stream_stream"])
async def test_calls_of_every_kind_are_counted_until_they_end(kind: str) -> None:
    async with spread(2) as channel:
        call = getattr(channel, kind)(f"/t/{kind}")(*([b""] if kind.startswith("unary") else []))
        assert sorted(channel.calls_under_way) == [0, 1]
        if kind.startswith("stream"):
            await call.done_writing()
        assert await (call if kind.endswith("unary") else call.read())
        call.cancel()
        await end_of(call)
        assert channel.calls_under_way == (0, 0)


async def test_a_connection_that_cannot_be_made_is_passed_over_while_there_are_others() -> None:
    async with serving() as address:
        nowhere, there = open_channel(Address("127.0.0.1", 1), None), open_channel(address, None)
        channel = SpreadChannel([nowhere, there])
        ask = channel.unary_unary("/t/unary_unary")
        with pytest.raises(grpc.RpcError):
            await ask(b"")  # nothing is known of either before the first call
        held = channel.unary_stream("/t/unary_stream")(b"")
        assert await held.read() == await ask(b"", timeout=10)
        assert channel.calls_under_way[0] == 0
        held.cancel()
        await channel.close()


async def test_one_connection_is_a_plain_channel_and_several_are_closed_together() -> None:
    one = open_channels(Address("127.0.0.1", 1), None)
    assert isinstance(one.bulk, grpc.aio.Channel)
    await one.close()
    async with spread(4) as channel:
        streams = [channel.unary_stream("/t/unary_stream")(b"") for _ in range(4)]
        for stream in streams:
            await stream.read()
        await Channels(open_channel(Address("127.0.0.1", 1), None), channel).close()
        for stream in streams:
            await end_of(stream)
        assert [await stream.code() for stream in streams] == [grpc.StatusCode.CANCELLED] * 4
        assert channel.calls_under_way == (0, 0, 0, 0)


def test_a_limited_channel_reads_ahead_as_far_as_it_is_told() -> None:
    limited = dict(channel_options(Address("127.0.0.1", 1), read_ahead_bytes=77))
    assert (limited["grpc.http2.bdp_probe"], limited["grpc.http2.lookahead_bytes"]) == (0, 77)
    assert not {name for name, _ in channel_options(Address("127.0.0.1", 1)) if "bdp" in name or "lookahead" in name}
