"""One channel made of several connections to the same server, for streams of bytes over long distances.

A single TCP connection moves at most one window per round trip, and halves its window when a packet is lost; several
side by side move several windows. Over loopback and within a data centre one connection is as fast.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

CallMaker = Callable[..., Any]


class SpreadChannel:
    """Looks like a `grpc.aio.Channel` to generated stubs; each call takes the connection with the fewest under way.

    Connections that cannot be made at present are passed over while there are others. Calls do not move: one on a
    connection that breaks ends, and is repeated by its owner.

    Args:
        connections: at least one; closed together with this.
    """

    def __init__(self, connections: Sequence[grpc.aio.Channel]) -> None:
        self._lanes = [_Lane(connection) for connection in connections]

    @property
    def calls_under_way(self) -> tuple[int, ...]:
        """Calls that have not ended, by connection."""
        return tuple(lane.call_count for lane in self._lanes)

    def unary_unary(self, *args: Any, **options: Any) -> CallMaker:
        """As `grpc.aio.Channel` has it."""
        return self._maker("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> CallMaker:
        """As `grpc.aio.Channel` has it."""
        return self._maker("unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> CallMaker:
        """As `grpc.aio.Channel` has it."""
        return self._maker("stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> CallMaker:
        """As `grpc.aio.Channel` has it."""
        return self._maker("stream_stream", args, options)

    def _maker(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> CallMaker:
        def call(*call_args: Any, **call_options: Any) -> Any:
            lane = min(self._lanes, key=_Lane.load)
            return lane.counted(getattr(lane.connection, kind)(*args, **options)(*call_args, **call_options))

        return call

    async def close(self, grace: float | None = None) -> None:
        """Ends all connections; calls in flight are cancelled, after `grace` seconds if given."""
        await asyncio.gather(*(lane.connection.close(grace) for lane in self._lanes))


class _Lane:
    """One connection, and how many calls it carries."""

    def __init__(self, connection: grpc.aio.Channel) -> None:
        self.connection = connection
        self.call_count = 0

    def load(self) -> tuple[bool, int]:
        """What calls are spread by, the smallest first."""
        return self.connection.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE, self.call_count

    def counted(self, call: Any) -> Any:
        """Counts a call until it has ended, however it ends."""
        self.call_count += 1
        call.add_done_callback(self._ended)
        return call

    def _ended(self, _: Any) -> None:
        self.call_count -= 1
