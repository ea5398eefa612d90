"""Runs whose first parameters are those of a model, or of a checkpoint: over real sockets."""

import asyncio

import numpy as np
import pytest
from safetensors.numpy import save_file

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.fragments import assemble, fragment_schema, gather
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest
from syncer_service.app import running_syncer
from syncer_service.checkpoint_restore import read_restore_point
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.protocol_link import TINY_SCHEMA, Link
from tests.integration.syncers import config_of, machine_of, settings_of, syncer, until
from tests.integration.test_checkpoints import committed, training


def tiny_model(seed=3):
    generator = np.random.default_rng(seed)
    return {spec.name: generator.normal(size=spec.shape).astype(np.float32) for spec in TINY_SCHEMA.tensors}


async def test_the_first_versions_are_those_of_the_file_and_no_learner_is_asked(tmp_path):
    tensors = tiny_model()
    save_file(tensors, tmp_path / "model.safetensors")
    config = config_of(run={"start_from": str(tmp_path / "model.safetensors")})
    fragments = fragment_schema(TINY_SCHEMA, 4).fragments
    tape = []
    async with syncer(tmp_path, config, tape=tape) as running:
        machine = machine_of(running)
        learner = ProtocolLearner(str(running.addresses.data), "a", config.to_policy(), Script())
        task = asyncio.create_task(learner.run())
        await until(running, lambda: machine.phase is RunPhase.RUNNING)
        assert not any(type(event).__name__ == "InitialFragmentReceived" for _, event in tape)
        await committed(running, 8)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    first = {fragment: digest for fragment, version, digest in learner.applied if version.number == 1}
    assert first == {fragment.index: vector_digest(gather(fragment, tensors)) for fragment in fragments}


async def test_a_restart_does_not_read_the_file_again(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(tiny_model(), path)
    config = config_of(run={"start_from": str(path)})
    async with training(tmp_path, config=config) as (running, _):
        await committed(running, 4)
        versions = list(machine_of(running).versions)
    path.unlink()
    async with syncer(tmp_path, config) as running:
        assert all(now >= then for now, then in zip(machine_of(running).versions, versions, strict=True))
        assert machine_of(running).phase is RunPhase.RUNNING


@pytest.mark.parametrize("fragment_count", [4, 3])
async def test_a_checkpoint_gives_another_run_its_parameters_and_nothing_else(tmp_path, fragment_count):
    async with training(tmp_path / "one") as (running, _):
        await committed(running, 8)
        await running.safekeeping.checkpoints.create("good")
    url = str(tmp_path / "one" / "state" / "checkpoints" / "good")
    point = read_restore_point(url)
    tensors = assemble(fragment_schema(TINY_SCHEMA, 4), {p: state.theta for p, state in point.states.items()})
    config = config_of(run={"id": "two", "start_from": url}, fragments={"count": fragment_count})
    async with syncer(tmp_path / "two", config) as running:
        machine = machine_of(running)
        link = Link(str(running.addresses.data), "a")
        await link.join()
        await until(running, lambda: machine.phase is RunPhase.RUNNING)
        expected = [vector_digest(gather(f, tensors)) for f in fragment_schema(TINY_SCHEMA, fragment_count).fragments]
        assert [version.digest for version in machine.versions] == expected
        assert {(v.timeline, v.number) for v in machine.versions} == {(1, 1)}
        assert machine.global_step == 0
        assert machine.membership.slot_cursors.get(0, 0) == 0
        for commit in running.ending._shell.newest().values():
            assert not commit.state.momentum.any()
        await link.close()


async def stopped(folder, config, schema=TINY_SCHEMA):
    """Runs a syncer with one learner until it stops by itself."""
    stop = StopRequest()
    async with running_syncer(config, settings_of(folder), stop) as running:
        link = Link(str(running.addresses.data), "a", schema)
        await link.join()
        async with asyncio.timeout(20):
            await stop.wait_async()
        await link.close()
    return stop


async def test_a_model_that_does_not_fit_stops_the_syncer_with_what_is_wrong(tmp_path):
    tensors = tiny_model()
    tensors["head/scale"] = np.zeros(9, np.float32)
    tensors["head/extra"] = np.zeros(3, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    stop = await stopped(tmp_path, config_of(run={"start_from": str(tmp_path / "model.safetensors")}))
    assert stop.exit_code == ExitCode.CONFIG
    assert "head/scale" in stop.reason
    assert "head/extra" in stop.reason


async def test_a_checkpoint_of_another_model_stops_the_syncer(tmp_path):
    async with training(tmp_path / "one") as (running, _):
        await committed(running, 2)
        await running.safekeeping.checkpoints.create("good")
    url = str(tmp_path / "one" / "state" / "checkpoints" / "good")
    other = Schema([*TINY_SCHEMA.tensors[:-1], TensorSpec("head/more", (16,))])
    stop = await stopped(tmp_path / "two", config_of(run={"id": "two", "start_from": url}), other)
    assert stop.exit_code == ExitCode.CONFIG
    assert "tensor 'head/more': the run has (16,), manifest.json has none" in stop.reason


async def test_what_can_be_said_at_the_start_is_said_there(tmp_path):
    config = config_of(run={"start_from": str(tmp_path / "nothing.safetensors")})
    with pytest.raises(ConfigError, match=r"nothing\.safetensors"):
        async with syncer(tmp_path, config):
            pass
    async with training(tmp_path / "one") as (running, _):
        await committed(running, 2)
        await running.safekeeping.checkpoints.create("good")
    url = tmp_path / "one" / "state" / "checkpoints" / "good"
    config = config_of(run={"start_from": str(url), "name_map": "gemma"})
    with pytest.raises(ConfigError, match=r"leave run\.name_map out"):
        async with syncer(tmp_path / "two", config):
            pass
