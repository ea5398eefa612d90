"""The rate limit: its arithmetic for any pieces and instants, and turns of streams in a time that stands still."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.runtime.clock import ManualClock
from decoupled_diloco.runtime.rate_limit import (
    BURST_SECONDS,
    BYTES_PER_SECOND_MAX,
    PIECE_BYTES_MIN,
    READ_AHEAD_BYTES_MAX,
    READ_AHEAD_BYTES_MIN,
    Allowance,
    RateLimit,
    TokenBucket,
    bytes_per_second_min,
    read_ahead_bytes,
)

MIB = 1 << 20


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self.late_seconds = 0.0
        """How much later than asked for a sleep ends."""

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds + self.late_seconds)
        await asyncio.sleep(0)

    def limit(self, bytes_per_second: float) -> RateLimit:
        return RateLimit(bytes_per_second, self.clock, self.sleep)


# ---- the bucket


@given(
    rate=st.floats(1e3, 1e9),
    burst_share=st.floats(0, 1),
    pieces=st.lists(st.tuples(st.integers(1, 4 * MIB), st.floats(0, 3)), min_size=1, max_size=60),
)
def test_no_window_holds_more_than_its_share_a_burst_and_a_piece(
    rate: float, burst_share: float, pieces: list[tuple[int, float]]
) -> None:
    burst = burst_share * rate
    bucket, now, passed = TokenBucket(rate, burst, 0.0), 0.0, []
    for size, idle_seconds in pieces:
        now = max(now + idle_seconds, bucket.clear_at)
        bucket.passed(size, now)
        passed.append((now, size))
    for first, last in itertools.combinations_with_replacement(range(len(passed)), 2):
        window = passed[last][0] - passed[first][0]
        whole = sum(size for _, size in passed[first : last + 1])
        assert whole - passed[last][1] <= (rate * window + burst) * (1 + 1e-9) + 1e-3


@given(
    rate=st.floats(1e3, 1e9),
    sizes=st.lists(st.integers(1, MIB), min_size=2, max_size=60),
    late=st.floats(0, BURST_SECONDS),
)
def test_whoever_always_asks_gets_the_whole_rate_although_timers_ring_late(
    rate: float, sizes: list[int], late: float
) -> None:
    bucket, now = TokenBucket(rate, BURST_SECONDS * rate, 0.0), 0.0
    for size in sizes:
        if bucket.clear_at > now:
            now = bucket.clear_at + late
        bucket.passed(size, now)
    # What passed is owed since the first instant, and nothing was forgiven: it is paid off when the rate says so.
    assert bucket.clear_at == pytest.approx(sum(sizes) / rate - BURST_SECONDS, rel=1e-9, abs=1e-9)


def test_idle_time_earns_a_burst_and_no_more() -> None:
    bucket = TokenBucket(100.0, 50.0, now=0.0)
    for now in (1000.0, 1000.0):
        bucket.passed(25, now)
    assert bucket.clear_at == 1000.0
    bucket.passed(100, 1000.0)
    assert bucket.clear_at == 1001.0


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        TokenBucket(0.0, 1.0, 0.0)


# ---- turns


async def test_without_a_limit_nobody_waits() -> None:
    time = Time()
    limit = time.limit(0)
    await limit.passed(1 << 40)
    assert time.clock.now() == 1000.0
    assert limit.piece_bytes(MIB) == MIB


async def test_ten_megabytes_take_ten_seconds_at_one_megabyte_a_second() -> None:
    time = Time()
    time.late_seconds = 0.004
    limit = time.limit(1_000_000)
    for _ in range(200):
        await limit.passed(50_000)
    assert time.clock.now() - 1000.0 == pytest.approx(10.0, rel=0.01)


async def test_streams_take_turns_so_that_each_gets_the_same_share() -> None:
    time = Time()
    limit = time.limit(1_000_000)
    await limit.passed(100_000)  # the credit, which the first stream would use up before the others are there
    moved = [0, 0, 0]

    async def stream(index: int) -> None:
        while time.clock.now() < 1010.0:
            await limit.passed(50_000)
            moved[index] += 50_000
            assert max(moved) - min(moved) <= 50_000

    await asyncio.gather(*(stream(index) for index in range(3)))
    assert sum(moved) == pytest.approx(10_000_000, rel=0.03)


async def test_the_event_loop_is_free_while_a_stream_waits() -> None:
    limit = RateLimit(1.0)  # the machine's own clock: the second piece would have to wait for a second
    await limit.passed(1)
    await limit.passed(1)
    waiting = asyncio.create_task(limit.passed(1))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_a_stream_that_gives_up_leaves_its_turn_to_the_next_and_has_used_nothing() -> None:
    released = asyncio.Event()
    clock = ManualClock()

    async def sleep(seconds: float) -> None:
        await released.wait()
        clock.advance(seconds)

    limit = RateLimit(1000.0, clock, sleep)
    await limit.passed(2000)
    first, second = (asyncio.create_task(limit.passed(1000)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    released.set()
    await second
    assert first.cancelled()
    assert clock.now() == pytest.approx(2.0 - BURST_SECONDS)  # the debt of the 2000 bytes, and not of 1000 more


async def test_a_receiver_pays_for_each_piece_before_it_is_read_whatever_the_sender_cuts() -> None:
    for chunk_bytes in (100_000, 30_000, 7_000):
        time = Time()
        allowance = Allowance(time.limit(1_000_000), 100_000)
        received, payload = 0, 1_000_000
        while received < payload:
            await allowance.for_next(received, payload)
            received = min(received + chunk_bytes, payload)
        await allowance.for_next(received, payload)  # nothing is left to pay for
        paid_late = 100_000 / 1_000_000 + BURST_SECONDS
        assert 1.0 - paid_late <= time.clock.now() - 1000.0 <= 1.0 + chunk_bytes / 1_000_000


async def test_a_receiver_that_goes_on_pays_for_the_rest_alone_and_again_for_what_begins_anew() -> None:
    time = Time()
    limit = time.limit(1_000_000)
    await limit.passed(int(BURST_SECONDS * 1_000_000))  # no credit is left
    resumed = Allowance(limit, 100_000)
    await resumed.for_next(900_000, 1_000_000)
    await limit.passed(0)
    assert time.clock.now() == pytest.approx(1000.1)
    await resumed.for_next(0, 1_000_000)  # the other end has another copy: all of it is sent again
    await limit.passed(0)
    assert time.clock.now() == pytest.approx(1000.2)


async def test_a_receiver_pays_for_nothing_before_it_knows_the_length() -> None:
    time = Time()
    limit = time.limit(1_000_000)
    await Allowance(limit, 100_000).for_next(0, 0)
    await limit.passed(int(BURST_SECONDS * 1_000_000))
    await limit.passed(0)
    assert time.clock.now() == 1000.0


def test_the_transport_reads_ahead_by_a_part_of_a_second_and_as_it_likes_without_a_limit() -> None:
    assert [read_ahead_bytes(rate) for rate in (0, 1000, 16_000_000)] == [0, READ_AHEAD_BYTES_MIN, 1_000_000]


def test_the_transport_reads_ahead_by_no_more_than_a_window_of_http_2_holds() -> None:
    assert read_ahead_bytes(16 * READ_AHEAD_BYTES_MAX - 16) == READ_AHEAD_BYTES_MAX - 1
    assert [read_ahead_bytes(rate) for rate in (40e9, BYTES_PER_SECOND_MAX, 1e300)] == [READ_AHEAD_BYTES_MAX] * 3
    assert READ_AHEAD_BYTES_MAX < 2**31 - 1


def test_pieces_get_smaller_with_the_rate_down_to_a_bound() -> None:
    sizes = [Time().limit(rate).piece_bytes(MIB) for rate in (1e9, 10e6, 1e6, 1e3)]
    assert sizes == [MIB, 500_000, 50_000, PIECE_BYTES_MIN]


def test_the_lowest_rate_moves_two_pieces_of_every_stream_before_one_is_given_up() -> None:
    assert bytes_per_second_min(MIB, 4, 5.0) == 1_677_722
    assert 2 * 4 * MIB / bytes_per_second_min(MIB, 4, 5.0) <= 5.0
