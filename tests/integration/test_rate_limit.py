"""Rate limits of real transfers to a real syncer, in a time that only waiting for the limit moves."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from benchmarks.rig_learner import RigLearner
from benchmarks.syncer_rig import flat_schema
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime.clock import ManualClock
from decoupled_diloco.runtime.rate_limit import BURST_SECONDS, RateLimit, TransferLimits
from decoupled_diloco.wire.stream import CHUNK_BYTES
from tests.integration.syncers import DEADLINES, config_of, syncer

SIZE = 1 << 20
"""Values of each of the two fragments: 4 MiB in float32."""
RATE = 2_000_000


class Time:
    """Moved by those who wait for a limit, and by nobody else."""

    def __init__(self) -> None:
        self.clock = ManualClock()

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    def limit(self, bytes_per_second: float) -> RateLimit:
        return RateLimit(bytes_per_second, self.clock, self.sleep)


@asynccontextmanager
async def limited_learner(folder, limits):
    """A learner with limits that has brought the initial parameters; rounds stay open, because two are required."""
    config = config_of(
        fragments={"count": 2},
        quorum={"minimum": 2},
        deadlines=DEADLINES | {"lease_seconds": 60.0, "stall_seconds": 60.0, "attach_idle_seconds": 60.0},
    )
    async with syncer(folder, config) as running:
        there = SimpleNamespace(config=config, address=str(running.addresses.data))
        async with RigLearner(there, "alpha", flat_schema([SIZE, SIZE]), limits=limits) as learner:
            yield learner


async def test_uploads_and_downloads_keep_to_their_limits_together_and_by_the_direction(tmp_path):
    up, down = Time(), Time()
    limits = TransferLimits(up.limit(RATE), down.limit(RATE / 2))
    async with limited_learner(tmp_path, limits) as learner:
        await learner.initialize()
        sent_bytes = 2 * 4 * SIZE
        assert up.clock.now() == pytest.approx(sent_bytes / RATE, rel=0.03)
        assert down.clock.now() == 0.0

        # Two contributions at the same time share the rate: together they take twice as long as each.
        began = up.clock.now()
        asks = [await learner.asked(fragment) for fragment in range(2)]
        fates = await asyncio.gather(*(learner.upload(ask, learner.payload(ask.fragment)) for ask in asks))
        assert fates == [Fate.ACCEPTED, Fate.ACCEPTED]
        assert up.clock.now() - began == pytest.approx(2 * 4 * SIZE / RATE, rel=0.03)

        # And two downloads at the same time, at half of the rate.
        ended = up.clock.now()
        news = [await learner.published(fragment) for fragment in range(2)]
        receipts = await asyncio.gather(*(learner.download(version) for version in news))
        assert [len(receipt.payload) for receipt in receipts] == [4 * SIZE, 4 * SIZE]
        whole, piece = 2 * 4 * SIZE / (RATE / 2), CHUNK_BYTES / (RATE / 2)
        assert whole - piece - BURST_SECONDS <= down.clock.now() + 1e-6 <= whole  # who pays last does not wait
        assert up.clock.now() == ended


async def test_a_slow_upload_is_cut_so_small_that_the_syncer_hears_of_it_all_the_time(tmp_path):
    time = Time()
    async with limited_learner(tmp_path, TransferLimits(time.limit(RATE))) as learner:
        await learner.initialize()
        ask, payload = await learner.asked(0), learner.payload(0)
        heard = []
        header = learner.header(ask, len(payload))
        await learner.bulk.upload(
            header,
            payload,
            encoding="float32",
            resume=False,
            moved=lambda count: heard.append((time.clock.now(), count)),
        )
        assert sum(count for _, count in heard) >= 4 * SIZE
        gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(heard)]
        assert max(gaps) <= 1.01 * BURST_SECONDS
