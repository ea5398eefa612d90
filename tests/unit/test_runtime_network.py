"""Addresses, channels, TLS and health, over real connections on loopback."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decoupled_diloco.core.errors import UnreachableError
from decoupled_diloco.runtime.channel import (
    SERVER_OPTIONS,
    Backoff,
    add_port,
    channel_options,
    open_channel,
    open_channels,
    open_sync_channel,
)
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.health import LIVENESS, READINESS, Health, Verdict
from decoupled_diloco.runtime.ports import Address, listen_error, parse_address
from decoupled_diloco.runtime.tls import TlsFiles, channel_credentials, plaintext_problem, server_credentials
from decoupled_diloco.wire.status import from_rpc_error

TLS = Path(__file__).parent.parent / "data" / "tls"


class _Echo(grpc.GenericRpcHandler):
    """Answers every call with the caller's address as the server sees it."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def peer(_request: bytes, context: Any) -> bytes:
            return str(context.peer()).encode()

        return grpc.unary_unary_rpc_method_handler(peer)


@asynccontextmanager
async def serving(
    credentials: grpc.ServerCredentials | None = None,
    prepare: Callable[[grpc.aio.Server], None] | None = None,
) -> AsyncIterator[Address]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((_Echo(),))
    if prepare:
        prepare(server)
    address = add_port(server, Address("127.0.0.1", 0), credentials, "test")
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


async def ask(channel: grpc.aio.Channel) -> str:
    answer: bytes = await channel.unary_unary("/t/peer", None, None)(b"", timeout=20)
    return answer.decode()


# ---- addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:50051", Address("127.0.0.1", 50051)),
        ("[::1]:9", Address("::1", 9)),
        ("syncer.example:0", Address("syncer.example", 0)),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "host:99999", "host:-1", "::1:50051", "http://h:1", "a b:1", "h:\u0663"],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_address(text)


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("localhost", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("syncer", False),
    ],
)
def test_loopback_is_what_nothing_outside_can_reach(host: str, is_loopback: bool) -> None:
    assert Address(host, 1).is_loopback is is_loopback
    assert (plaintext_problem(Address(host, 1), ["do this", "do that"]) is None) is is_loopback


def test_a_port_in_use_names_the_address_and_the_setting() -> None:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        first.listen()
        address = Address(*first.getsockname())
        with pytest.raises(OSError, match="in use") as caught:
            second.bind((address.host, address.port))
    (problem,) = listen_error(address, "syncer.listen", caught.value).problems
    assert problem.startswith(f'syncer.listen = "{address}": another process already listens on port {address.port}')


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (OSError(errno.EACCES, "x"), "may not listen"),
        (OSError(errno.EADDRNOTAVAIL, "x"), "0.0.0.0:80 for all"),
        ("Cannot assign requested address", "0.0.0.0:80 for all"),
        (RuntimeError("odd"), "cannot be listened on: odd"),
    ],
)
def test_other_reasons_why_an_address_cannot_be_listened_on(cause: BaseException | str, words: str) -> None:
    assert words in str(listen_error(Address("10.9.9.9", 80), "syncer.listen", cause))


async def test_two_servers_never_share_a_port() -> None:
    async with serving() as address:
        second = grpc.aio.server(options=SERVER_OPTIONS)
        with pytest.raises(ConfigError) as caught:
            add_port(second, address, None, "syncer.listen")
        with pytest.raises(RuntimeError):
            second.add_insecure_port(str(address))
        await second.stop(None)
    assert "another process already listens" in str(caught.value)


async def test_a_server_says_which_port_it_took_and_why_it_cannot_take_one() -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    taken = add_port(server, Address("127.0.0.1", 0), None, "syncer.listen")
    assert taken.host == "127.0.0.1"
    assert taken.port > 0
    with pytest.raises(ConfigError, match="this machine has no such address"):
        add_port(server, Address("203.0.113.7", 0), None, "syncer.listen")
    with pytest.raises(ConfigError, match="cannot be resolved"):
        add_port(server, Address("no-such-host.invalid", 0), None, "syncer.listen")
    await server.stop(None)


# ---- channels


async def test_control_and_bulk_are_connections_of_their_own() -> None:
    async with serving() as address:
        channels = open_channels(address, None)
        control, bulk = await ask(channels.control), await ask(channels.bulk)
        again = await ask(channels.control)
        await channels.close()
    assert control != bulk
    assert control == again


async def test_a_proxy_in_the_environment_does_not_catch_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving() as address, open_channel(address, None) as channel:
        assert await ask(channel)
    assert ("grpc.enable_http_proxy", 0) not in channel_options(Address("far.example", 1))


def test_no_message_limit_is_changed() -> None:
    names = {name for name, _ in (*SERVER_OPTIONS, *channel_options(Address("localhost", 1)))}
    assert not {name for name in names if "message" in name}


def test_waits_grow_within_bounds_and_repeat_for_a_seed() -> None:
    def waits(seed: int) -> list[float]:
        backoff = Backoff(random.Random(seed), first_seconds=1.0, factor=2.0, seconds_max=5.0)
        return [backoff.next_seconds() for _ in range(6)]

    assert waits(1) == waits(1) != waits(2)
    for wait, bound in zip(waits(3), (1, 2, 4, 5, 5, 5), strict=True):
        assert bound / 2 <= wait <= bound


def test_a_success_starts_the_waits_over_and_advice_is_kept() -> None:
    backoff = Backoff(random.Random(0), first_seconds=1.0, factor=2.0, seconds_max=60.0)
    for _ in range(10_000):
        backoff.next_seconds()
    backoff.reset()
    assert backoff.next_seconds() <= 1.0
    assert backoff.next_seconds(at_least_seconds=7.0) > 7.0


# ---- TLS


def files(name: str | None = None, authority: str | None = None, folder: Path = TLS) -> TlsFiles:
    return TlsFiles(
        certificate=folder / f"{name}.pem" if name else None,
        key=folder / f"{name}.key" if name else None,
        authority=folder / f"{authority}.pem" if authority else None,
        section="syncer",
    )


async def test_tls_and_mutual_tls_carry_calls() -> None:
    trusting = channel_credentials(files(authority="authority"))
    async with (
        serving(server_credentials(files("server"))) as address,
        open_channel(address, trusting) as channel,
    ):
        assert await ask(channel)
    async with serving(server_credentials(files("server", "authority"))) as address:
        async with open_channel(address, channel_credentials(files("caller", "authority"))) as channel:
            assert await ask(channel)
        async with open_channel(address, trusting) as channel:
            with pytest.raises(grpc.RpcError):
                await ask(channel)


async def test_the_expected_name_can_be_given() -> None:
    credentials = channel_credentials(files(authority="authority"))
    async with serving(server_credentials(files("server"))) as address:
        async with open_channel(address, credentials, "syncer.test") as channel:
            assert await ask(channel)
        async with open_channel(address, credentials, "elsewhere.test") as channel:
            with pytest.raises(grpc.RpcError):
                await ask(channel)


async def test_a_stranger_is_not_trusted() -> None:
    credentials = channel_credentials(files(authority="stranger"))
    async with (
        serving(server_credentials(files("server"))) as address,
        open_channel(address, credentials) as channel,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await ask(channel)
    error = from_rpc_error(caught.value)
    assert isinstance(error, UnreachableError)
    assert "is not signed by the authorities given here" in error.text


async def test_plaintext_meeting_tls_is_named() -> None:
    credentials = channel_credentials(files(authority="authority"))
    async with serving() as address, open_channel(address, credentials) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await ask(channel)
    assert "this end speaks TLS, the other one plaintext" in str(from_rpc_error(caught.value))
    async with (
        serving(server_credentials(files("server"))) as address,
        open_channel(address, None) as channel,
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await ask(channel)
    assert "perhaps the other end speaks TLS" in str(from_rpc_error(caught.value))


async def test_a_renewed_certificate_is_used_without_a_restart(tmp_path: Path) -> None:
    for suffix in ("pem", "key"):
        shutil.copy(TLS / f"server.{suffix}", tmp_path / f"own.{suffix}")
    credentials = channel_credentials(files(authority="authority"))
    async with serving(server_credentials(files("own", folder=tmp_path))) as address:
        async with open_channel(address, credentials, "syncer.test") as channel:
            assert await ask(channel)
        (tmp_path / "own.pem").write_text("half a renewal")
        async with open_channel(address, credentials, "syncer.test") as channel:
            assert await ask(channel), "what cannot be used is not used"
        for suffix in ("pem", "key"):
            shutil.copy(TLS / f"renewed.{suffix}", tmp_path / f"own.{suffix}")
            os.utime(tmp_path / f"own.{suffix}", ns=(10**18, 10**18))
        async with open_channel(address, credentials, "renewed.test") as channel:
            assert await ask(channel)


def test_threads_have_channels_too() -> None:
    with open_sync_channel(Address("127.0.0.1", 1), None) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/t/x", None, None)(b"", timeout=5)


def problems_of(files_given: TlsFiles) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        server_credentials(files_given)
    return [problem.replace(str(TLS) + "/", "") for problem in caught.value.problems]


def test_files_that_cannot_be_used_are_named_with_their_settings(tmp_path: Path) -> None:
    assert problems_of(TlsFiles(TLS / "no.pem", TLS / "no.key", None, "syncer")) == [
        'syncer.tls_certificate = "no.pem": there is no such file',
        'syncer.tls_key = "no.key": there is no such file',
    ]
    (swapped, second) = problems_of(TlsFiles(TLS / "server.key", TLS / "server.pem", None, "syncer"))
    assert swapped == 'syncer.tls_certificate = "server.key": holds no certificate'
    assert second == 'syncer.tls_key = "server.pem": holds no private key'
    (mismatch,) = problems_of(TlsFiles(TLS / "server.pem", TLS / "caller.key", None, "syncer"))
    assert "is not the key of that certificate" in mismatch
    (not_pem,) = problems_of(TlsFiles(TLS / "README.md", TLS / "server.key", None, "syncer"))
    assert "is not a PEM file" in not_pem
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nxxxx\n-----END CERTIFICATE-----\n")
    (cannot,) = problems_of(TlsFiles(broken, TLS / "server.key", None, "syncer"))
    assert "cannot be loaded" in cannot
    (directory,) = problems_of(TlsFiles(TLS, TLS / "server.key", None, "syncer"))
    assert "cannot be read: Is a directory" in directory
    with pytest.raises(ConfigError, match="syncer.tls_key is given without syncer.tls_certificate"):
        TlsFiles(None, TLS / "server.key", None, "syncer").check()
    with pytest.raises(ConfigError, match="TLS needs tls_certificate and tls_key"):
        server_credentials(TlsFiles(section="syncer"))


# ---- health


async def test_health_is_computed_when_somebody_asks() -> None:
    verdict = Verdict(False, "restoring")
    health = Health(lambda: verdict, lambda: Verdict(True), ("t.Service",))
    stub_class = health_pb2_grpc.HealthStub
    serving_now = health_pb2.HealthCheckResponse.SERVING
    async with serving(prepare=health.add_to_server) as address, open_channel(address, None) as channel:
        stub: Any = stub_class(channel)

        async def status(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert await status("") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status(LIVENESS) == serving_now
        verdict = Verdict(True)
        assert [await status(name) for name in ("", READINESS, "t.Service")] == [serving_now] * 3
        with pytest.raises(grpc.RpcError) as caught:
            await status("t.Other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


async def test_who_watches_health_is_told_of_changes() -> None:
    verdict = Verdict(True)
    health = Health(lambda: verdict, lambda: Verdict(True))
    async with serving(prepare=health.add_to_server) as address, open_channel(address, None) as channel:
        await health.publish()
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=READINESS))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        verdict = Verdict(False, "draining")
        await health.publish()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


def test_a_probe_that_fails_is_not_well() -> None:
    def broken() -> Verdict:
        raise KeyError("x")

    health = Health(broken, lambda: Verdict(True))
    assert health.verdict() == Verdict(False, "the probe failed: KeyError: 'x'")
    assert health.verdict("nothing") is None
