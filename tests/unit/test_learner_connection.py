"""Before the first join: what is said while the syncer is not there, and when TLS settings end the wait."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest

from decoupled_diloco.core.errors import UnreachableError
from decoupled_diloco.runtime.channel import Backoff
from decoupled_diloco.runtime.ports import Address
from learner_service import connection as module
from learner_service.connection import TLS_FAULTS_MAX, Connection, Participant
from learner_service.syncer_client import SyncerClient


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def info(self, event: str, **values: Any) -> None:
        self.lines.append((event, values))

    warning = info


class Unreached(Connection):
    """Joins that fail for these reasons, then for ever."""

    def __init__(self, log: Log, *reasons: str) -> None:
        participant = cast(Participant, self)
        addresses = [Address("127.0.0.1", 1)]
        wait = Backoff(random.Random(0), first_seconds=0.0, seconds_max=0.0)
        super().__init__(addresses, lambda _: pytest.fail("no connection is opened"), participant, wait, cast(Any, log))
        self.reasons = list(reasons)
        self.tried = asyncio.Event()

    def client(self) -> SyncerClient:
        return cast(SyncerClient, self)

    def join_request(self) -> None:
        return None

    async def join(self, _: object) -> None:
        if not self.reasons:
            self.tried.set()
            await asyncio.Event().wait()
        raise UnreachableError("UNAVAILABLE", self.reasons.pop(0))


async def lines_of(*reasons: str) -> list[tuple[str, dict[str, Any]]]:
    log = Log()
    connection = Unreached(log, *reasons)
    running = asyncio.create_task(connection.run())
    await connection.tried.wait()
    running.cancel()
    return log.lines


async def test_waiting_is_told_at_once_and_then_once_a_minute_with_the_newest_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, where), *others = await lines_of("refused", "refused", "no route")
    assert (first, where) == ("waiting_for_the_syncer", {"syncer": "127.0.0.1:1"})
    assert [values["reason"] for _, values in others] == ["UNAVAILABLE: refused"]
    assert "training" not in others[0][1]["hint"]
    monkeypatch.setattr(module, "OUTAGE_LOG_SECONDS", 0.0)
    _, *others = await lines_of("refused", "no route")
    assert [values["reason"] for _, values in others] == ["UNAVAILABLE: refused", "UNAVAILABLE: no route"]


@pytest.mark.parametrize(
    "sign",
    ["WRONG_VERSION_NUMBER", "CERTIFICATE_VERIFY_FAILED", "Hostname Verification Check failed", "BAD_CERTIFICATE"],
)
async def test_tls_settings_that_do_not_fit_end_the_wait_for_the_first_join(sign: str) -> None:
    connection = Unreached(Log(), *[sign] * TLS_FAULTS_MAX)
    with pytest.raises(UnreachableError, match=rf"the syncer at 127\.0\.0\.1:1 .*5 attempts\): {sign}.*tls_ca"):
        await connection.run()


async def test_tls_faults_now_and_then_do_not() -> None:
    await lines_of(*(["BAD_CERTIFICATE"] * (TLS_FAULTS_MAX - 1) + ["refused"]) * 2)


async def test_a_tunnel_whose_syncer_is_away_is_waited_for() -> None:
    """It takes every connection and closes it at once, as a server with TLS does with plaintext."""
    await lines_of(*["failed to connect; last error: Socket closed"] * 3 * TLS_FAULTS_MAX)
