"""The proxy: each condition of a link, seen from both ends of real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from chaos.proxy import BOTH, Conditions, Direction, Link, Proxy

PATIENCE_SECONDS = 10.0
HELD_SECONDS = 0.3
"""How long nothing must come while a link holds back; long against what loopback takes."""


class Echo:
    """A server that sends back what it gets, and counts it."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = self._server.getsockname()
        self.received_bytes = 0
        self.accepted_count = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.accepted_count += 1
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    self.received_bytes += len(data)
                    connection.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def link(echo: Echo) -> Iterator[Link]:
    with Proxy() as proxy:
        yield proxy.link(echo.address)


@pytest.fixture
def client(link: Link) -> Iterator[socket.socket]:
    with connected(link) as opened:
        yield opened


def connected(link: Link) -> socket.socket:
    host, port = link.address.rsplit(":", 1)
    opened = socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS)
    opened.settimeout(PATIENCE_SECONDS)
    return opened


def exactly(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = client.recv(count - len(data))
        assert piece, f"the stream ended after {len(data)} of {count} bytes"
        data += piece
    return data


def round_trip(client: socket.socket, data: bytes) -> float:
    """Sends, expects the same back; returns seconds."""
    began = time.monotonic()
    client.sendall(data)
    assert exactly(client, len(data)) == data
    return time.monotonic() - began


def assert_nothing_comes(client: socket.socket) -> None:
    client.settimeout(HELD_SECONDS)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(PATIENCE_SECONDS)


def test_a_fair_link_passes_everything_on_and_ends_with_the_stream(client, link, echo):
    round_trip(client, bytes(range(256)) * 4096)
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    assert link.moved_bytes == {Direction.UP: 1 << 20, Direction.DOWN: 1 << 20}
    assert echo.received_bytes == 1 << 20


def test_latency_is_added_each_way_to_connections_that_are_open(client, link):
    round_trip(client, b"warm")
    link.impose(Conditions(latency_seconds=0.15))
    assert round_trip(client, b"slow") >= 0.3
    link.heal()
    round_trip(client, b"fast")


def test_latency_does_not_limit_the_rate(client, link):
    link.impose(Conditions(latency_seconds=0.2))
    assert round_trip(client, b"x" * (1 << 20)) < 2.0  # 16 pieces one after the other would take over 6 s


def test_a_window_limits_the_rate_of_each_connection_by_its_own(link):
    def seconds_of(connection_count: int) -> float:
        """Each connection moves ten windows one way: nine round trips and a latency at least."""
        opened = [connected(link) for _ in range(connection_count)]
        for client in opened:
            round_trip(client, b"warm")
        began = time.monotonic()
        for client in opened:
            client.sendall(b"x" * 100_000)
        for client in opened:
            exactly(client, 100_000)
            client.close()
        return time.monotonic() - began

    link.impose(Conditions(latency_seconds=0.02, window_bytes=10_000))
    assert seconds_of(1) >= 9 * 0.04
    assert seconds_of(8) < 8 * 9 * 0.04  # side by side; one after the other they would take longer


def test_a_throttle_limits_the_rate_of_all_connections_together(client, link):
    link.impose(Conditions(bytes_per_second=100_000))
    with connected(link) as other:
        began = time.monotonic()
        client.sendall(b"a" * 15_000)
        other.sendall(b"b" * 15_000)
        exactly(client, 15_000)
        exactly(other, 15_000)
        assert time.monotonic() - began >= 0.3


def test_a_stall_holds_bytes_back_and_lets_them_go_on(client, link):
    link.impose(Conditions(held=BOTH))
    client.sendall(b"later")
    assert_nothing_comes(client)
    link.heal()
    assert exactly(client, 5) == b"later"


def test_one_direction_alone_can_be_held(client, link, echo):
    link.impose(Conditions(held=frozenset({Direction.DOWN})))
    client.sendall(b"heard, but not answered")
    assert_nothing_comes(client)
    assert echo.received_bytes == 23
    link.heal()
    assert exactly(client, 23) == b"heard, but not answered"


def test_a_partition_connects_nobody_and_ends_what_lived_through_it(client, link, echo):
    round_trip(client, b"before")
    link.impose(Conditions(held=BOTH, is_cut=True))
    with connected(link) as newcomer:
        newcomer.sendall(b"anybody?")
        assert_nothing_comes(newcomer)
        assert echo.accepted_count == 1
        link.heal()
        for lived_through in (client, newcomer):
            with pytest.raises(ConnectionResetError):
                exactly(lived_through, 1)
    with connected(link) as after:
        round_trip(after, b"after")


def test_a_reset_is_an_rst_at_both_ends(client, link):
    round_trip(client, b"before")
    link.reset()
    with pytest.raises(ConnectionResetError):
        exactly(client, 1)


def test_a_stream_breaks_after_as_many_bytes_as_asked(client, link, echo):
    link.impose(Conditions(break_after_bytes=10_000))
    client.sendall(b"x" * 50_000)
    with pytest.raises(ConnectionResetError):
        exactly(client, 10_001)
    assert echo.received_bytes <= 10_000


def test_bits_flip_in_large_pieces_only(client, link):
    link.impose(Conditions(flip_every_bytes=20_000))
    for _ in range(100):
        round_trip(client, b"small")
    data = bytes(200_000)
    client.sendall(data)
    found = exactly(client, len(data))
    wrong = [value for value in found if value]
    assert wrong
    assert len(wrong) <= link.flipped_count
    assert set(wrong) <= {0x10}


def test_a_link_can_be_pointed_at_another_target(link, echo):
    other = Echo()
    link.target = other.address
    with connected(link) as client:
        round_trip(client, b"moved")
    assert (other.received_bytes, echo.received_bytes) == (5, 0)
    other.close()


def test_a_target_that_is_gone_ends_the_connection(link, echo):
    echo.close()
    with pytest.raises(ConnectionResetError), connected(link) as client:
        exactly(client, 1)
