"""Tapes of runs that were rolled back, restored, or started from a model: they replay to the same effects."""

from safetensors.numpy import save_file

from syncer_service.replay.comparison import replay
from syncer_service.tape_file import TapeFile, tape_files
from tests.integration.syncers import config_of, machine_of
from tests.integration.test_checkpoints import committed, training
from tests.integration.test_start_from import tiny_model


def replayed(folder, machine):
    """Replays the newest tape; its machine has to come to the same state."""
    result = replay(TapeFile(tape_files(folder / "state" / "tape")[-1]))
    assert result.difference is None
    assert result.machine.run_state() == machine.run_state()


async def test_a_roll_back_and_a_restore(tmp_path):
    async with training(tmp_path / "one") as (running, _):
        await committed(running, 4)
        checkpoints = running.safekeeping.checkpoints
        await checkpoints.create("good")
        await committed(running, machine_of(running).rounds.committed_count + 4)
        await checkpoints.roll_back("good", "")
        await committed(running, machine_of(running).rounds.committed_count + 4)
        machine = machine_of(running)
    replayed(tmp_path / "one", machine)
    url = str(tmp_path / "one" / "state" / "checkpoints" / "good")
    async with training(tmp_path / "two", restore_from=url) as (running, _):
        await committed(running, machine_of(running).rounds.committed_count + 4)
        machine = machine_of(running)
    replayed(tmp_path / "two", machine)


async def test_a_start_from_a_model(tmp_path):
    save_file(tiny_model(), tmp_path / "model.safetensors")
    config = config_of(run={"start_from": str(tmp_path / "model.safetensors")})
    async with training(tmp_path, config=config) as (running, _):
        await committed(running, 4)
        machine = machine_of(running)
    replayed(tmp_path, machine)
