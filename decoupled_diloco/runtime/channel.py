"""gRPC channels and servers: their options, and how to wait before trying again.

Message limits stay at gRPC's defaults at both ends, because no message is large. Control and bulk traffic get
connections of their own, so that moving bytes cannot starve a heartbeat. gRPC's own retries are off: they do not
cover long streams, so repeating is ours.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import grpc
import grpc.aio

from decoupled_diloco.runtime.ports import Address, check_listenable, listen_error
from decoupled_diloco.runtime.spread_channel import SpreadChannel

Options = tuple[tuple[str, int | str], ...]

KEEPALIVE_SECONDS = 20
"""A connection is pinged this often; below the idle limits of load balancers (60 s and more)."""
KEEPALIVE_TIMEOUT_SECONDS = 20
"""A ping that is not answered for this long ends the connection; long, because a busy process is not a dead
one."""
PING_SECONDS_MIN = 5
"""A server puts up with pings this far apart, whatever callers send them."""
RECONNECT_SECONDS_MAX = 5
"""gRPC tries to reconnect at least this often, so that a server that is back is found soon."""

SERVER_OPTIONS: Options = (
    # Without this two processes may listen on one port, and each gets half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", PING_SECONDS_MIN * 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_SECONDS_MIN * 1000),
)
"""Options of every gRPC server."""


def add_port(
    server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None, setting: str
) -> Address:
    """Lets a server, made with `SERVER_OPTIONS` and not yet started, listen on an address.

    Args:
        server: The server.
        address: Where; port 0 takes any free one.
        credentials: From `tls.server_credentials`; None for plaintext, which the settings must have allowed.
        setting: The setting that the address comes from, for messages.

    Returns:
        The address with the port that was taken.

    Raises:
        ConfigError: If the address cannot be listened on, with the reason and what to change.
    """
    check_listenable(address, setting)
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:  # somebody else was faster
        raise listen_error(address, setting, error) from None
    return Address(address.host, port)


def channel_options(address: Address, server_name: str = "", read_ahead_bytes: int = 0) -> Options:
    """Options of every gRPC channel.

    Args:
        address: What is dialled.
        server_name: Name to expect in the server's certificate, where it is not the host.
        read_ahead_bytes: What may arrive on a stream that nobody reads from; 0: what gRPC finds right for the link,
            many megabytes on a fast one.
    """
    options: list[tuple[str, int | str]] = [
        # A pool of its own per channel: channels with equal options would otherwise share one connection.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", RECONNECT_SECONDS_MAX * 1000),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_SECONDS_MAX * 1000),
    ]
    if address.is_loopback:
        # A proxy that the environment names cannot reach this machine's loopback.
        options.append(("grpc.enable_http_proxy", 0))
    if read_ahead_bytes:
        options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", read_ahead_bytes)]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return tuple(options)


BulkChannel = grpc.aio.Channel | SpreadChannel
"""What streams of bytes go over: one connection or several."""


@dataclass(frozen=True, slots=True)
class Channels:
    """The connections to one server, opened and closed together."""

    control: grpc.aio.Channel
    """For unary calls and long-lived streams of small messages."""
    bulk: BulkChannel
    """For streams of bytes."""

    async def close(self) -> None:
        """Ends all; calls in flight are cancelled."""
        await self.control.close(None)
        await self.bulk.close(None)


def open_channels(
    address: Address,
    credentials: grpc.ChannelCredentials | None,
    server_name: str = "",
    bulk_connections: int = 1,
    read_ahead_bytes: int = 0,
) -> Channels:
    """Opens the connections to a server, in the running event loop; nothing is sent before the first call.

    Args:
        address: The server.
        credentials: From `tls.channel_credentials`; None for plaintext, which the settings must have allowed.
        server_name: Name to expect in the server's certificate, where it is not the host.
        bulk_connections: Connections that streams of bytes are spread over, >= 1.
        read_ahead_bytes: See `channel_options`; for the bulk connections.
    """
    bulk = [open_channel(address, credentials, server_name, read_ahead_bytes) for _ in range(bulk_connections)]
    control = open_channel(address, credentials, server_name)
    return Channels(control, bulk[0] if bulk_connections == 1 else SpreadChannel(bulk))


def open_channel(
    address: Address, credentials: grpc.ChannelCredentials | None, server_name: str = "", read_ahead_bytes: int = 0
) -> grpc.aio.Channel:
    """One connection for asyncio."""
    options = channel_options(address, server_name, read_ahead_bytes)
    if credentials is None:
        return grpc.aio.insecure_channel(str(address), options=options)
    return grpc.aio.secure_channel(str(address), credentials, options=options)


def open_sync_channel(
    address: Address, credentials: grpc.ChannelCredentials | None, server_name: str = ""
) -> grpc.Channel:
    """One connection for threads."""
    options = channel_options(address, server_name)
    if credentials is None:
        return grpc.insecure_channel(str(address), options=options)
    return grpc.secure_channel(str(address), credentials, options=options)


class Backoff:
    """Waiting times between attempts: growing, bounded, and random so that many callers do not return as one.

    Args:
        source: Randomness, seeded by the caller.
        first_seconds: Longest first wait.
        factor: Growth from one wait to the next.
        seconds_max: Longest wait of all.
    """

    def __init__(
        self,
        source: random.Random,
        first_seconds: float = 0.2,
        factor: float = 1.7,
        seconds_max: float = 3.0,
    ) -> None:
        self._source = source
        self._first_seconds = first_seconds
        self._factor = factor
        self._seconds_max = seconds_max
        self.attempt_count = 0

    def next_seconds(self, at_least_seconds: float = 0.0) -> float:
        """The next wait: half to all of the current bound, on top of what the other end asked for."""
        bound = min(self._seconds_max, self._first_seconds * self._factor ** min(self.attempt_count, 64))
        self.attempt_count += 1
        return at_least_seconds + bound * self._source.uniform(0.5, 1.0)

    def reset(self) -> None:
        """To be called after a success: the next wait is a first one again."""
        self.attempt_count = 0
