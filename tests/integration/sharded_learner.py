"""Learners spread over four devices; test_sharded_learner.py runs this file in a process that has them on the CPU."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from decoupled_diloco.runtime.lifecycle import StopRequest
from learner_service.app import serve
from learner_service.config import LearnerDocument, LearnerSettings
from tests.integration.syncers import config_of, machine_of, syncer, until


def run_config(total_steps: int, **sections):
    return config_of(
        run={"total_steps": total_steps, "seed": 3},
        fragments={"count": 4, "interval_steps": 8, "overlap_steps": 2},
        workload={
            "factory": "learner_service.workloads.synthetic:factory",
            "options": {"parameter_count": 500, "layer_count": 1, "batch_size": 16},
        },
        **sections,
    )


async def train(folder: Path, config, running, name: str, device_count: int) -> None:
    settings = LearnerSettings(
        learner_id=name,
        syncer=(str(running.addresses.data),),
        cache_dir=folder / "cache",
        workload_options={"fsdp_device_count": device_count},
        step_seconds_min=0.01,
        verify_applied=True,
        peer_listen="127.0.0.1:0",
    )
    sections = {section: getattr(config, section) for section in type(config).model_fields}
    document = LearnerDocument(**sections, learner=settings)
    assert await asyncio.to_thread(serve, document, time.monotonic(), StopRequest()) == 0


def test_there_are_four_devices() -> None:
    assert len(jax.devices()) == 4


async def test_training_on_four_devices_agrees_with_training_on_one(tmp_path, caplog):
    config = run_config(
        16, inner={"barrier": True}, quorum={"last_call": "off"}, outer={"learning_rate": 1.0, "momentum": 0.0}
    )
    models = []
    for device_count in (0, 4):
        folder = tmp_path / str(device_count)
        async with syncer(folder, config) as running:
            await train(folder, config, running, "a", device_count)
            models.append(load_file(await running.ending.exported))
    assert "digest_mismatch" not in caplog.text
    one, four = models
    for name in one:
        np.testing.assert_allclose(four[name], one[name], rtol=1e-5, atol=1e-7, err_msg=name)


async def test_learners_with_and_without_a_mesh_share_a_run(tmp_path, caplog):
    config = run_config(24, quorum={"minimum": 3})
    async with syncer(tmp_path, config) as running:
        await asyncio.gather(*(train(tmp_path, config, running, f"on-{count}", count) for count in (0, 2, 4)))
        machine = machine_of(running)
        merged = [record.rounds_merged for record in machine.membership.everybody()]
    assert np.min(merged) >= 1, "every fragment gets contributions of every learner"
    assert "digest_mismatch" not in caplog.text


async def test_a_learner_on_four_devices_goes_on_with_the_moments_of_one_device(tmp_path, capsys):
    config = run_config(400)
    async with syncer(tmp_path, config) as running:
        one = asyncio.create_task(train(tmp_path, config, running, "on-0", 0))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 8, 60.0)
        await asyncio.gather(one, train(tmp_path, config, running, "on-4", 4))
        merged = {record.learner: record.rounds_merged for record in machine_of(running).membership.everybody()}
        assert np.min(merged["on-4"]) >= 1
    told = "".join(capsys.readouterr())
    assert "optimizer_recovered" in told
    assert "optimizer_fresh" not in told
    assert "digest_mismatch" not in told
