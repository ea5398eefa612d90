"""Real processes: the syncer is killed, its disk is gone, and another one goes on from the mirror."""

import asyncio
import re
import shutil
import urllib.request

import pytest

from decoupled_diloco.core.policy import Policy
from syncer_service.store.reader import open_ledger
from tests.integration.lasting_learner import LastingLearner
from tests.integration.protocol_learner import Script
from tests.integration.test_syncer_restart import SyncerProcess, until

pytestmark = pytest.mark.slow


def figures(process):
    """Committed rounds and the mirror's lag, of one look at the metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{process.ports[2]}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    committed = re.search(r'^decoupled_diloco_syncer_rounds_total\{outcome="committed"\} (\S+)$', text, re.MULTILINE)
    lag = re.search(r"^decoupled_diloco_syncer_mirror_lag_rounds (\S+)$", text, re.MULTILINE)
    return int(float(committed[1])), int(float(lag[1]))


async def test_a_lost_disk_costs_what_the_lag_says(tmp_path):
    mirror, stuck = tmp_path / "mirror", tmp_path / "stuck"
    process = SyncerProcess(tmp_path, **{"syncer.mirror_url": str(mirror)})
    learner = LastingLearner(process.address, "a", Policy(), Script())
    task = asyncio.create_task(learner.run())
    try:
        process.start({"DECOUPLED_DILOCO_FAILPOINTS": f"mirror.before_manifest=enospc@{stuck}"})
        await until(lambda: len(learner.applied) >= 12 and (mirror / "manifest.json").exists(), tasks=[task])
        stuck.touch()
        count = len(learner.applied)
        await until(lambda: len(learner.applied) >= count + 8, tasks=[task])
        shown, lag = await asyncio.to_thread(figures, process)
        process.kill()
        with open_ledger(tmp_path / "state") as reader:
            durable = sum(1 for row in reader.rounds() if row.outcome == "committed")
        assert process.logged("mirror_failed")
        shutil.rmtree(tmp_path / "state")
        stuck.unlink()

        process.settings["syncer.restore_from"] = str(mirror)
        process.start()
        await until(lambda: learner.joins == 2, tasks=[task])
        (restored,) = process.logged("run_restored_from")
        assert lag >= 6
        assert restored["rounds_committed"] == shown - lag
        assert durable - restored["rounds_committed"] == lag + (durable - shown), "and what came after that look"
        count = len(learner.applied)
        await until(lambda: len(learner.applied) >= count + 12, tasks=[task])
        assert learner.applied[-1][1].timeline == restored["timeline"] > 1
        assert process.kill() != 0
        process.start()  # by the same command line, as a supervisor does
        count = len(learner.applied)
        await until(lambda: len(learner.applied) >= count + 4, tasks=[task])
        assert learner.joins == 2, "it goes on with what it holds"
        assert process.logged("restored_before")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if process.process is not None and process.process.poll() is None:
            process.kill()


async def test_a_syncer_killed_in_the_middle_of_a_checkpoint_leaves_none_and_tidies_up(tmp_path):
    process = SyncerProcess(tmp_path, **{"syncer.checkpoint_interval_steps": "8"})
    learner = LastingLearner(process.address, "a", Policy(), Script())
    task = asyncio.create_task(learner.run())
    folder = tmp_path / "state" / "checkpoints"
    try:
        process.start({"DECOUPLED_DILOCO_FAILPOINTS": "checkpoint.before_manifest=kill@2"})
        await asyncio.to_thread(process.process.wait, 60)
        whole = [path.parent.name for path in folder.glob("*/manifest.json")]
        assert len(whole) == 1
        (partial,) = [path.name for path in folder.iterdir() if path.name not in whole]
        process.start()
        await until(lambda: len(list(folder.glob("*/manifest.json"))) >= 2, tasks=[task])
        removed = process.logged("checkpoint_removed")
        assert [entry["checkpoint"] for entry in removed if "never completed" in entry["reason"]] == [partial]
        assert process.logged("run_restored")[0]["timeline"] == 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if process.process.poll() is None:
            process.kill()
