"""Transfers of one learner spread over several connections to a real syncer."""

import asyncio
import os
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.rig_learner import RigLearner
from benchmarks.syncer_rig import flat_schema
from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime.ports import parse_address
from tests.integration.syncers import DEADLINES, config_of, syncer

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
