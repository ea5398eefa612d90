"""The end of a run when its files cannot be written: learners are told all the same, and the model is not given up."""

import asyncio
import shutil

import pytest
import structlog

from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest
from syncer_service import app, ending
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.syncers import config_of, machine_of, settings_of, syncer


@pytest.mark.parametrize("below", ["a-file/output", "a-file"])
async def test_an_output_directory_that_cannot_be_used_is_found_before_anything_listens(tmp_path, below):
    (tmp_path / "a-file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"syncer\.output_dir = .*could not be written there") as refused:
        async with syncer(tmp_path, output_dir=tmp_path / below):
            pytest.fail("it serves")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["/proc/x", "/dev/full"])
async def test_places_of_the_system_that_hold_no_files_are_found_too(tmp_path, path):
    with pytest.raises(ConfigError, match="give a directory"):
        async with syncer(tmp_path, output_dir=path):
            pytest.fail("it serves")


async def test_a_usable_output_directory_is_made_and_left_empty(tmp_path):
    async with syncer(tmp_path):
        assert list((tmp_path / "output").iterdir()) == []


def block(tmp_path):
    shutil.rmtree(tmp_path / "output")
    (tmp_path / "output").write_text("in the way")


async def train(running, config):
    async with asyncio.timeout(20):
        learner = ProtocolLearner(str(running.addresses.data), "a", config.to_policy(), Script())
        await learner.run()
    return learner


async def test_a_failing_export_is_tried_again_and_learners_are_told_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "WRITE_RETRY_SECONDS", 0.05)
    config = config_of(run={"total_steps": 8})
    with structlog.testing.capture_logs() as logs:
        async with syncer(tmp_path, config) as running:
            block(tmp_path)
            learner = await train(running, config)
            assert learner.left
            assert machine_of(running).phase is RunPhase.FINISHED
            assert running.ending.model_is_missing
            (tmp_path / "output").unlink()
            async with asyncio.timeout(20):
                assert (await running.ending.exported).exists()
                await running.ending._stop.wait_async()
    assert (tmp_path / "output" / "run_summary.json").exists()
    told = [entry for entry in logs if entry["event"] == "export_failed"]
    assert [entry["file"] for entry in told] == ["model.safetensors"]
    assert told[0]["path"] == str(tmp_path / "output" / "model.safetensors")
    assert "make room" in told[0]["remedy"]
    assert not any(entry["event"] == "background_work_died" for entry in logs)


async def test_a_model_that_could_not_be_written_is_an_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(ending, "WRITE_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(ending, "WRITE_SECONDS_MAX", 0.2)
    config = config_of(run={"total_steps": 8})
    stop = StopRequest()
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(app.serve(config, settings_of(tmp_path), stop))
        async with asyncio.timeout(20):
            while not (ready := [entry for entry in logs if entry["event"] == "syncer_ready"]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            block(tmp_path)
            await ProtocolLearner(ready[0]["learners"], "a", config.to_policy(), Script()).run()
            assert await serving == ExitCode.FAILED
    assert "could not be written" in stop.reason
    assert {entry["file"] for entry in logs if entry["event"] == "export_given_up"} == {
        "model.safetensors",
        "run_summary.json",
    }
