"""Whole runs of a real syncer with protocol learners over loopback."""

import asyncio
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.fragments import fragment_schema, gather
from decoupled_diloco.core.ids import Fate, RunPhase
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.protocol_link import TINY_SCHEMA
from tests.integration.syncers import config_of, machine_of, syncer, until


def learners(running, config, names="abc", **script):
    address = str(running.addresses.data)
    return [
        ProtocolLearner(address, name, config.to_policy(), Script(seed=seed, **script))
        for seed, name in enumerate(names)
    ]


@pytest.mark.parametrize(("upload", "download"), [("float32", "float32"), ("bf16", "bf16")])
async def test_a_run_from_the_first_join_to_the_export(tmp_path, upload, download):
    config = config_of(run={"total_steps": 32}, encoding={"upload": upload, "download": download})
    async with syncer(tmp_path, config) as running:
        team = learners(running, config)
        async with asyncio.timeout(30):
            await asyncio.gather(*(learner.run() for learner in team))
            model = await running.ending.exported
        machine = machine_of(running)
        assert machine.phase is RunPhase.FINISHED
        status = machine.status(running.serving.clock.now())
        assert status.rounds_committed_count >= 16
        assert status.global_step == 32
        assert all(learner.left for learner in team)

        # What every learner applied has the digest of the version's name.
        for learner in team:
            assert set(learner.fates.values()) <= {Fate.ACCEPTED, Fate.LATE, Fate.ABORTED}
            assert learner.applied
            assert [digest for _, version, digest in learner.applied] == [v.digest for _, v, _ in learner.applied]
            assert learner.encodings_seen == {"float32", download}

        # The exported model is the newest published version.
        tensors = load_file(model)
        fragments = fragment_schema(TINY_SCHEMA, 4).fragments
        assert [vector_digest(gather(fragment, tensors)) for fragment in fragments] == [
            version.digest for _, version, _ in machine.published()
        ]
        await until(running, lambda: (tmp_path / "output" / "run_summary.json").exists())
    summary = json.loads((tmp_path / "output" / "run_summary.json").read_text())
    assert summary["run"]["phase"] == "finished"
    assert summary["run"]["goodput"]["participation"] > 0.5


async def test_learning_goes_towards_what_the_learners_want(tmp_path):
    config = config_of(run={"total_steps": 48})
    async with syncer(tmp_path, config) as running:
        team = learners(running, config)
        async with asyncio.timeout(30):
            await asyncio.gather(*(learner.run() for learner in team))
            tensors = load_file(await running.ending.exported)
        wanted = [np.mean([learner.target[p] for learner in team], axis=0) for p in range(4)]
        started = [np.square(t - w).mean() for t, w in zip(_initial(), wanted, strict=True)]
        ended = [
            np.square(gather(fragment, tensors) - w).mean()
            for fragment, w in zip(fragment_schema(TINY_SCHEMA, 4).fragments, wanted, strict=True)
        ]
        assert sum(ended) < 0.7 * sum(started)


def _initial():
    source = np.random.default_rng(7)
    return [source.normal(size=size).astype(np.float32) for size in fragment_schema(TINY_SCHEMA, 4).sizes]
