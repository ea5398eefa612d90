"""Versions that a learner asks for before they are there: when that saves a call, and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.core.ids import Version
from decoupled_diloco.runtime import channel
from decoupled_diloco.wire.stream import CorruptPayloadError
from learner_service.bulk_client import Receipt
from learner_service.downloader import Held
from tests.unit.test_learner_transfers import DELTA, FIRST, NEW, OLD, SECOND, Source, downloader, sending


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel.Backoff, "next_seconds", lambda *_: 0.0)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Foresight(Source):
    """Also answers what is asked in advance: each call follows the next script, once it may."""

    def __init__(self, *attempts: Callable[[Receipt, Version | None], None]) -> None:
        super().__init__(*attempts)
        self.early: list[Callable[[Receipt, Callable[[Version], None]], None]] = []
        self.published = asyncio.Event()
        self.waiting = 0
        self.idle_seconds = 0.05

    async def download_next(
        self, fragment: int, held: Version, receipt: Receipt, *, begun: Callable[[Version], None], **_: object
    ) -> None:
        self.waiting += 1
        try:
            await self.published.wait()
        finally:
            self.waiting -= 1
        self.early.pop(0)(receipt, begun)


def bringing(
    version: Version, *script: Callable[[Receipt, Version | None], None]
) -> Callable[[Receipt, Callable[[Version], None]], None]:
    """Says which version it is, then sends what the scripts send."""

    def call(receipt: Receipt, begun: Callable[[Version], None]) -> None:
        begun(version)
        for part in script:
            part(receipt, None)

    return call


def failing(error: Exception) -> Callable[[Receipt, Callable[[Version], None]], None]:
    def call(*_: object) -> None:
        raise error

    return call


async def early_fetch(source: Foresight, executor: ThreadPoolExecutor, held: Held | None) -> FloatVector:
    """Asks in advance, then has the news, then lets the script of the call for it run."""
    downloads = downloader(source, executor)
    downloads.expect(0, FIRST)
    await asyncio.sleep(0)
    assert source.waiting == 1
    source.published.set()
    return await downloads.fetch(0, SECOND, held)


async def test_what_was_asked_in_advance_needs_no_other_call(executor: ThreadPoolExecutor) -> None:
    source = Foresight()
    source.early = [bringing(SECOND, sending(DELTA, "bf16", FIRST))]
    assert vector_digest(await early_fetch(source, executor, Held(FIRST, OLD))) == SECOND.digest
    assert source.held == []


async def test_what_was_asked_in_advance_and_broke_goes_on_where_it_stopped(executor: ThreadPoolExecutor) -> None:
    source = Foresight(sending(DELTA, "bf16", FIRST))
    source.early = [bringing(SECOND, sending(DELTA, "bf16", FIRST, until=70_000))]
    assert vector_digest(await early_fetch(source, executor, Held(FIRST, OLD))) == SECOND.digest
    assert source.offsets == [70_000]


BAD_STREAM = CorruptPayloadError("it lies")


@pytest.mark.parametrize(
    "call",
    [
        bringing(Version(1, 3, "later"), sending(NEW, "float32")),
        bringing(SECOND, sending(OLD, "float32")),
        bringing(SECOND, failing(BAD_STREAM)),
        failing(UnreachableError("OK", "the stream ended before its last part")),
        failing(PeerError(Reason.NOT_FOUND, "an older syncer does not know what is meant")),
    ],
    ids=["another version", "other values", "corrupt", "ended", "older syncer"],
)
async def test_what_was_asked_in_advance_in_vain_is_fetched_as_ever(
    executor: ThreadPoolExecutor, call: Callable[[Receipt, Callable[[Version], None]], None]
) -> None:
    source = Foresight(sending(NEW, "float32"))
    source.early = [call]
    assert vector_digest(await early_fetch(source, executor, Held(FIRST, OLD))) == SECOND.digest
    assert source.offsets == [0]


async def test_a_call_in_advance_that_does_not_begin_after_the_news_is_given_up(executor: ThreadPoolExecutor) -> None:
    source = Foresight(sending(NEW, "float32"))
    downloads = downloader(source, executor)
    downloads.expect(0, FIRST)
    assert vector_digest(await downloads.fetch(0, SECOND, Held(FIRST, OLD))) == SECOND.digest
    await asyncio.sleep(0)
    assert source.waiting == 0, "it was cancelled"


@pytest.mark.parametrize("held", [None, Held(Version(1, 9, "other"), OLD)])
async def test_a_call_in_advance_that_builds_on_another_version_is_given_up(
    executor: ThreadPoolExecutor, held: Held | None
) -> None:
    source = Foresight(sending(NEW, "float32"))
    source.early = [bringing(SECOND, sending(DELTA, "bf16", FIRST))]
    assert vector_digest(await early_fetch(source, executor, held)) == SECOND.digest
    assert source.offsets == [0]


async def test_at_most_one_call_in_advance_waits_for_a_fragment(executor: ThreadPoolExecutor) -> None:
    source = Foresight()
    downloads = downloader(source, executor)
    for held in (FIRST, FIRST, SECOND, SECOND):
        downloads.expect(0, held)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert source.waiting == 1
    downloads.close()
    await asyncio.sleep(0)
    assert source.waiting == 0


async def test_a_call_in_advance_that_failed_is_made_again(executor: ThreadPoolExecutor) -> None:
    source = Foresight()
    source.early = [failing(UnreachableError("UNAVAILABLE", "gone")), bringing(SECOND, sending(DELTA, "bf16", FIRST))]
    downloads = downloader(source, executor)
    source.published.set()
    for _ in range(2):
        downloads.expect(0, FIRST)
        for _ in range(4):
            await asyncio.sleep(0)
    downloads.expect(0, FIRST)  # it is whole, and not thrown away
    assert vector_digest(await downloads.fetch(0, SECOND, Held(FIRST, OLD))) == SECOND.digest
    assert source.held == []
