"""Transfers that break, lie, or ask for what is gone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import Encoded, FloatVector, encoding_named
from decoupled_diloco.arrays.outer import apply_delta
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.core.ids import Fate, Version
from decoupled_diloco.core.learner_effects import Copy
from decoupled_diloco.runtime import channel
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.wire.stream import CorruptPayloadError, chunk_message, parse_chunk, payload_digest
from learner_service.bulk_client import BulkClient, Receipt
from learner_service.copies import CopySlot
from learner_service.downloader import Downloader, Held, VersionGoneError
from learner_service.handed_over import UploadJob
from learner_service.transfers import Transfers
from learner_service.uploader import NotFiniteError, Sender, Uploader

SIZE = 300_000
OLD = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
DELTA = encoding_named("bf16").encode(np.random.default_rng(2).standard_normal(SIZE).astype(np.float32))
NEW = apply_delta(OLD, DELTA, "bf16")
FIRST, SECOND = Version(1, 1, vector_digest(OLD)), Version(1, 2, vector_digest(NEW))


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel.Backoff, "next_seconds", lambda *_: 0.0)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


class Source:
    """A syncer's side of downloads: each attempt follows the next script."""

    def __init__(self, *attempts: Callable[[Receipt, Version | None], None]) -> None:
        self.attempts = list(attempts)
        self.offsets: list[int] = []
        self.held: list[Version | None] = []

    async def download(
        self, fragment: int, version: Version, held: Version | None, receipt: Receipt, **_: object
    ) -> None:
        self.offsets.append(receipt.received_bytes)
        self.held.append(held)
        self.attempts.pop(0)(receipt, held)


def sending(
    payload: Any, encoding: str, base: Version | None = None, until: int | None = None
) -> Callable[[Receipt, Version | None], None]:
    """Sends a payload from where the receipt stands; breaks off at byte `until`."""
    view = memoryview(payload).cast("B")

    def attempt(receipt: Receipt, _: Version | None) -> None:
        receipt.open(encoding, base, len(view), 4 * SIZE)
        assert receipt.sink is not None
        start, end = receipt.received_bytes, until or len(view)
        part = parse_chunk(chunk_message(start, view[start:end]))
        assert part is not None
        receipt.sink.write(part)
        if until is not None:
            raise UnreachableError("UNAVAILABLE", "cut off")
        receipt.sink.finish(payload_digest(view))
        receipt.digest = payload_digest(view)

    return attempt


def refusing(reason: Reason) -> Callable[[Receipt, Version | None], None]:
    def attempt(*_: object) -> None:
        raise PeerError(reason, "no")

    return attempt


def downloader(source: Source, executor: ThreadPoolExecutor) -> Downloader:
    client = cast(BulkClient, source)
    log = get_logger("test")
    return Downloader(lambda: client, (SIZE,), executor, lambda _: None, random.Random(1), log)


async def test_a_delta_gives_the_syncers_bits(executor: ThreadPoolExecutor) -> None:
    source = Source(sending(DELTA, "bf16", FIRST))
    values = await downloader(source, executor).fetch(0, SECOND, Held(FIRST, OLD))
    assert vector_digest(values) == SECOND.digest
    assert not values.flags.writeable
    assert source.held == [FIRST]


async def test_a_broken_download_goes_on_where_it_stopped(executor: ThreadPoolExecutor) -> None:
    source = Source(
        sending(NEW, "float32", until=1000), refusing(Reason.OVERLOADED), sending(NEW, "float32", until=70_000),
        sending(NEW, "float32"),
    )  # fmt: skip
    values = await downloader(source, executor).fetch(0, SECOND, None)
    assert vector_digest(values) == SECOND.digest
    assert source.offsets == [0, 1000, 1000, 70_000]


async def test_a_delta_with_another_result_than_the_digest_is_fetched_again_as_a_whole(
    executor: ThreadPoolExecutor,
) -> None:
    wrong = np.array(OLD)
    wrong[7] += 1
    source = Source(sending(DELTA, "bf16", FIRST), sending(NEW, "float32"))
    values = await downloader(source, executor).fetch(0, SECOND, Held(FIRST, wrong))
    assert vector_digest(values) == SECOND.digest
    assert source.held == [FIRST, None]


async def test_a_delta_to_a_version_that_is_not_held_is_not_applied(executor: ThreadPoolExecutor) -> None:
    source = Source(sending(DELTA, "bf16", Version(1, 9, "other")), sending(NEW, "float32"))
    values = await downloader(source, executor).fetch(0, SECOND, Held(FIRST, OLD))
    assert vector_digest(values) == SECOND.digest


@pytest.mark.parametrize("reason", [Reason.NOT_FOUND, Reason.SUPERSEDED])
async def test_a_version_that_is_gone_is_given_up(executor: ThreadPoolExecutor, reason: Reason) -> None:
    with pytest.raises(VersionGoneError):
        await downloader(Source(refusing(reason)), executor).fetch(0, SECOND, None)


def test_a_header_that_promises_more_than_the_fragment_holds_is_refused() -> None:
    with pytest.raises(CorruptPayloadError, match="promises"):
        Receipt().open("float32", None, 1 << 40, 4 * SIZE)


class Sink:
    """A syncer's side of uploads: answers or raises what it is given."""

    def __init__(self, *answers: Fate | Exception) -> None:
        self.answers = list(answers)
        self.resumed: list[bool] = []
        self.payloads: list[bytes] = []

    async def upload(self, header: Any, payload: memoryview, *, resume: bool, **_: object) -> Fate:
        self.resumed.append(resume)
        self.payloads.append(bytes(payload))
        assert header.payload_bytes == len(payload)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def job_of(values: Any, round_number: int = 3) -> UploadJob:
    slot = CopySlot(Copy(0, FIRST, 5, 50, 2, 20, 7))
    slot.fill(cast(Any, SimpleNamespace(to_host=lambda: np.array(values, np.float32))))
    return UploadJob(round_number, slot, np.ones(3, np.float32), 1)


def uploader(
    sink: Sink, executor: ThreadPoolExecutor, encoding: str = "float32", feeds_errors_back: bool = False
) -> Uploader:
    client = cast(BulkClient, sink)
    sender = Sender("a", 1, encoding, feeds_errors_back)
    return Uploader(lambda: client, sender, executor, lambda _: None, random.Random(1), get_logger("test"))


async def test_an_upload_is_repeated_until_its_answer_is_terminal(executor: ThreadPoolExecutor) -> None:
    broken = UnreachableError("UNAVAILABLE", "gone")
    full = PeerError(Reason.OVERLOADED, "full", retry_seconds=1.0)
    sink = Sink(broken, full, Fate.ABORTED, Fate.CORRUPT, Fate.ACCEPTED)
    assert await uploader(sink, executor).contribute(job_of([2, 3, 4])) is Fate.ACCEPTED
    assert sink.resumed == [False, True, True, True, True]
    assert list(np.frombuffer(sink.payloads[-1], np.float32)) == [1, 2, 3]


@pytest.mark.parametrize("fate", [Fate.LATE, Fate.STALE_BASE, Fate.NONFINITE])
async def test_a_terminal_answer_is_not_argued_with(executor: ThreadPoolExecutor, fate: Fate) -> None:
    assert await uploader(Sink(fate), executor).contribute(job_of([2, 3, 4])) is fate


@pytest.mark.parametrize("values", [[np.nan, 1, 1], [np.inf, 1, 1], [3e38, 1, 1]])
async def test_what_is_not_finite_is_never_sent(executor: ThreadPoolExecutor, values: list[float]) -> None:
    sink = Sink()
    with pytest.raises(NotFiniteError):
        await uploader(sink, executor, "bf16").contribute(job_of(values))
    assert sink.payloads == []


async def sums_sent(uploads: Uploader, sink: Sink, rounds: range) -> FloatVector:
    """What the syncer reads in all of equal deltas, of which int4 says nothing of the second value."""
    for number in rounds:
        assert await uploads.contribute(job_of([8, 1.25, 1], number)) is Fate.ACCEPTED
        uploads.round_closed(number, 0, is_merged=True)
    read = [Encoded(payload, "int4", 3).decode() for payload in sink.payloads]
    return np.sum(read, axis=0)


async def test_what_an_encoding_drops_is_sent_later_if_that_is_wanted(executor: ThreadPoolExecutor) -> None:
    rounds = range(1, 9)
    sums = {}
    for feeds_errors_back in (False, True):
        sink = Sink(*[Fate.ACCEPTED] * len(rounds))
        uploads = uploader(sink, executor, "int4", feeds_errors_back)
        sums[feeds_errors_back] = list(await sums_sent(uploads, sink, rounds))
    # 7 over 7 is 1: codes are the values, 0.25 is dropped, and four times that make 1.
    assert sums == {False: [56.0, 0.0, 0.0], True: [56.0, 2.0, 0.0]}


@pytest.mark.parametrize("case", ["not merged", "recovery"])
async def test_what_is_not_to_be_made_up_for_is_not_sent_later(executor: ThreadPoolExecutor, case: str) -> None:
    sink = Sink(*[Fate.ACCEPTED] * 8)
    uploads = uploader(sink, executor, "int4", feeds_errors_back=True)
    for number in range(1, 9):
        assert await uploads.contribute(job_of([8, 1.25, 1], number)) is Fate.ACCEPTED
        uploads.round_closed(number, 0, is_merged=case != "not merged")
        if case == "recovery":
            uploads.forget_errors()
    assert {bytes(payload) for payload in sink.payloads} == {sink.payloads[0]}


@pytest.mark.parametrize(
    ("event", "is_carried"),
    [
        (lev.RoundEnded(3, 0, True, ("a", "b"), 24), True),
        (lev.RoundEnded(3, 0, True, ("b",), 24), False),
        (lev.RoundEnded(3, 0, False, ("a", "b"), 24), False),
        (lev.RoundEnded(4, 1, True, ("a", "b"), 24), False),
    ],
)
async def test_an_error_counts_if_the_syncer_says_that_this_learner_was_merged(
    executor: ThreadPoolExecutor, event: lev.RoundEnded, is_carried: bool
) -> None:
    sink = Sink(*[Fate.ACCEPTED] * 5)
    client, sender = cast(BulkClient, sink), Sender("a", 1, "int4", feeds_errors_back=True)
    parts: Any = [SimpleNamespace(sizes=(3,)), None, SimpleNamespace(generation=1), None]
    transfers = Transfers(lambda: client, sender, *parts, executor, cast(Any, None), cast(Any, None))
    uploads = transfers._uploader
    await uploads.contribute(job_of([8, 1.25, 1], 3))
    transfers.told(event)
    await uploads.contribute(job_of([8, 1.25, 1], 3))
    # 0.25 was dropped; 0.375 is less than half a step by itself, and more than that with what was dropped.
    await uploads.contribute(job_of([8, 1.375, 1], 3))
    assert (sink.payloads[2] != sink.payloads[1]) == is_carried
    transfers.told(lev.RecoverAsked("for this test"))
    await uploads.contribute(job_of([8, 1.375, 1], 3))
    assert sink.payloads[3] == sink.payloads[0]


async def test_an_upload_that_is_repeated_sends_the_same_bytes(executor: ThreadPoolExecutor) -> None:
    sink = Sink(Fate.ACCEPTED, UnreachableError("UNAVAILABLE", "gone"), Fate.ACCEPTED)
    uploads = uploader(sink, executor, "int4", feeds_errors_back=True)
    await sums_sent(uploads, sink, range(1, 3))
    assert sink.payloads[1] == sink.payloads[2]


async def test_an_exact_encoding_drops_nothing(executor: ThreadPoolExecutor) -> None:
    sink = Sink(*[Fate.ACCEPTED] * 2)
    uploads = uploader(sink, executor, "float32", feeds_errors_back=True)
    for number in (1, 2):
        await uploads.contribute(job_of([2, 3, 4], number))
        uploads.round_closed(number, 0, is_merged=True)
    assert [list(np.frombuffer(payload, np.float32)) for payload in sink.payloads] == [[1, 2, 3]] * 2
