"""Downloads under way: limits, and ends."""

import asyncio
from contextlib import ExitStack

import pytest

from decoupled_diloco.core.errors import PeerError, Reason, Recourse
from decoupled_diloco.core.ids import Version
from decoupled_diloco.wire.stream import CutPayload
from syncer_service import readings as module
from syncer_service.readings import (
    DOWNLOAD_RETRY_SECONDS,
    PARTICIPANT_DOWNLOADS_MAX,
    SUPERSEDED_SECONDS_MAX,
    Readings,
    superseded_seconds_max,
)

OLD, NEW, NEWEST = Version(1, 1, "a"), Version(1, 2, "b"), Version(1, 3, "c")
LONG_SECONDS = 600.0


class Deaf:
    """The context of a call whose receiver takes nothing."""

    def __init__(self):
        self.began = asyncio.Event()

    async def write(self, message):
        self.began.set()
        await asyncio.Event().wait()


class Quick:
    """The context of a call whose receiver takes everything."""

    def __init__(self):
        self.messages = []

    async def write(self, message):
        self.messages.append(message)


async def test_one_participant_has_no_more_than_its_share_however_many_it_asks_for():
    readings = Readings()
    with ExitStack() as stack:
        for _ in range(PARTICIPANT_DOWNLOADS_MAX):
            stack.enter_context(readings.begin("a", 1, 0, OLD))
        with (
            pytest.raises(PeerError, match="8 downloads of a are under way") as refused,
            readings.begin("a", 1, 1, OLD),
        ):
            pass
        assert refused.value.reason is Reason.OVERLOADED
        assert refused.value.retry_seconds == DOWNLOAD_RETRY_SECONDS
        with readings.begin("b", 2, 0, OLD):
            assert len(readings) == PARTICIPANT_DOWNLOADS_MAX + 1
    assert len(readings) == 0
    with readings.begin("a", 1, 0, OLD):
        assert len(readings) == 1


async def test_all_together_have_a_limit(monkeypatch):
    monkeypatch.setattr(module, "DOWNLOADS_MAX", 2)
    readings = Readings()
    with readings.begin("a", 1, 0, OLD), readings.begin("b", 2, 0, OLD):
        with pytest.raises(PeerError, match="2 downloads are under way") as refused, readings.begin("c", 3, 0, OLD):
            pass
        assert refused.value.reason is Reason.OVERLOADED


async def test_the_slots_of_an_incarnation_that_was_replaced_are_free_for_the_next_one():
    readings = Readings()
    with ExitStack() as stack:
        context = Deaf()
        old = [stack.enter_context(readings.begin("a", 1, 0, OLD)) for _ in range(PARTICIPANT_DOWNLOADS_MAX)]
        writing = asyncio.create_task(old[0].write(context, b"", LONG_SECONDS))
        await context.began.wait()
        with readings.begin("a", 2, 0, OLD) as young:
            with pytest.raises(PeerError) as ended:
                await writing
            assert ended.value.reason is Reason.STALE_INCARNATION
            quick = Quick()
            with pytest.raises(PeerError, match="incarnation 1 of a was replaced by 2"):
                await old[1].write(quick, b"x", LONG_SECONDS)
            await young.write(quick, b"y", LONG_SECONDS)
            assert quick.messages == [b"y"]


async def test_a_receiver_that_takes_nothing_loses_the_stream():
    with Readings().begin("a", 1, 0, OLD) as reading:
        with pytest.raises(PeerError, match=r"took no bytes for 0.01 s") as ended:
            await reading.write(Deaf(), b"", 0.01)
        assert ended.value.reason is Reason.TRANSFER_IDLE


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_a_reader_of_a_version_that_was_replaced_has_a_deadline_and_is_told_of_the_newest(
    monkeypatch, is_waiting
):
    monkeypatch.setattr(module, "SUPERSEDED_SECONDS_MAX", 0.05)
    readings, context = Readings(), Deaf()
    with readings.begin("a", 1, 0, OLD) as reading, readings.begin("a", 1, 1, OLD) as other:
        if is_waiting:
            writing = asyncio.create_task(reading.write(context, b"", LONG_SECONDS))
            await context.began.wait()
        readings.superseded(0, NEW)
        monkeypatch.setattr(module, "SUPERSEDED_SECONDS_MAX", LONG_SECONDS)
        readings.superseded(0, NEWEST)
        quick = Quick()
        if not is_waiting:
            await reading.write(quick, b"x", LONG_SECONDS)
            writing = asyncio.create_task(reading.write(context, b"", LONG_SECONDS))
        with pytest.raises(PeerError) as ended:
            await writing
        assert (ended.value.reason, ended.value.recourse) == (Reason.SUPERSEDED, Recourse.CATCH_UP)
        assert ended.value.metadata["newest-digest"] == NEWEST.digest
        with pytest.raises(PeerError):
            await reading.write(quick, b"", LONG_SECONDS)
        await other.write(quick, b"y", LONG_SECONDS)
        assert quick.messages == ([b"y"] if is_waiting else [b"x", b"y"])


async def test_a_reader_of_the_newest_version_goes_on():
    readings = Readings()
    with readings.begin("a", 1, 0, NEW) as reading:
        readings.superseded(0, NEW)
        quick = Quick()
        await reading.write(quick, b"x", LONG_SECONDS)
        assert quick.messages == [b"x"]
        assert reading._end is None


def test_a_slow_link_has_the_time_that_a_whole_fragment_takes() -> None:
    """Else who joins over it would begin with one version after the other, and be done with none."""
    assert superseded_seconds_max(None) == SUPERSEDED_SECONDS_MAX
    assert superseded_seconds_max(CutPayload(bytes(3 << 20), "digest")) == SUPERSEDED_SECONDS_MAX + 3
