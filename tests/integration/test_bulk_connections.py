"""Transfers of one learner spread over several connections to a real syncer, and within rate limits."""

import asyncio
import os
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.rig_learner import RigLearner
from benchmarks.syncer_rig import flat_schema
from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.core.ids import Fate, RunPhase
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.runtime.rate_limit import BYTES_PER_SECOND_MAX, RateLimit
from tests.integration.learner_threads import Trainee, figure, start_values, train
from tests.integration.syncers import DEADLINES, config_of, machine_of, syncer

COUNT = 4
SIZE = 1 << 19


def connections_to(address):
    """Connections that this process has made to an address and that live."""
    port = parse_address(address).port
    opened = psutil.Process(os.getpid()).net_connections("tcp")
    return sum(1 for one in opened if one.raddr and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED)


@pytest.mark.parametrize("connections", [1, 3])
async def test_transfers_at_the_same_time_use_all_connections_and_bring_the_same_bits(tmp_path, connections):
    config = config_of(
        fragments={"count": COUNT, "interval_steps": 4, "overlap_steps": 3},
        deadlines=DEADLINES | {"lease_seconds": 60.0, "stall_seconds": 60.0, "attach_idle_seconds": 60.0},
    )
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        there = SimpleNamespace(config=config, address=address)
        async with RigLearner(there, "alpha", flat_schema(COUNT * [SIZE]), bulk_connections=connections) as learner:
            await learner.initialize()
            asks = [await learner.asked(fragment) for fragment in range(COUNT)]
            payloads = [learner.payload(fragment, "float32", seed=fragment) for fragment in range(COUNT)]
            fates = await asyncio.gather(*(learner.upload(ask, payloads[ask.fragment], "float32") for ask in asks))
            assert set(fates) == {Fate.ACCEPTED}
            news = [await learner.published(ask.fragment, after=ask.base) for ask in asks]
            receipts = await asyncio.gather(*(learner.download(version) for version in news))
            digests = [vector_digest(learner.values_of(receipt)) for receipt in receipts]
            assert digests == [version.version.digest for version in news]
            assert connections_to(address) == 1 + connections


@pytest.mark.parametrize(("up", "down"), [(20_000_000, 30_000_000), (BYTES_PER_SECOND_MAX, BYTES_PER_SECOND_MAX - 1)])
async def test_a_learner_passes_its_limits_with_every_payload_byte(tmp_path, monkeypatch, up, down):
    passed = Counter()
    original = RateLimit.passed

    async def counted(limit, byte_count):
        passed[limit.bytes_per_second] += byte_count
        await original(limit, byte_count)

    monkeypatch.setattr(RateLimit, "passed", counted)
    config = config_of(run={"total_steps": 32})
    async with syncer(tmp_path, config) as running:
        trainee = Trainee("a", start_values(1), step_seconds=0.01)
        settings = {"upload_bytes_per_second_max": up, "download_bytes_per_second_max": down, "bulk_connections": 3}
        await train(running, config, trainee, **settings)
        assert machine_of(running).phase is RunPhase.FINISHED
        assert figure(trainee.session, "digest_mismatches_total") == 0
        handover = trainee.session._handover
        assert passed[down] >= handover.downloaded_bytes > 0
        assert passed[up] >= handover.uploaded_bytes > 0
