"""The tape of a real syncer with protocol learners: every file replays, also after a SIGKILL."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.policy import Policy
from syncer_service.replay.comparison import replay
from syncer_service.tape_file import TapeFile, tape_files
from tests.integration.lasting_learner import LastingLearner
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.syncers import config_of, fetch, machine_of, syncer

ROOT = Path(__file__).resolve().parents[2]
SHORT_RUN = ("--set", "fragments.interval_steps=8", "--set", "fragments.count=4", "--set", "run.total_steps=96")
FREE_PORTS = ("--admin-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")


async def test_a_whole_run_is_on_tape(tmp_path):
    config = config_of(run={"total_steps": 24})
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        team = [ProtocolLearner(address, name, config.to_policy(), Script(seed=seed)) for seed, name in enumerate("ab")]
        async with asyncio.timeout(60):
            await asyncio.gather(*(learner.run() for learner in team))
            await running.ending.exported
        _, metrics = await fetch(running, "metrics")
        machine = machine_of(running)
    assert "decoupled_diloco_syncer_tape_missed_events 0.0" in metrics
    (path,) = tape_files(tmp_path / "state" / "tape")
    tape = TapeFile(path)
    kinds = set()
    result = replay(tape, watch=lambda record, effects: kinds.add(type(record.event)))
    assert result.difference is None
    assert tape.is_whole
    assert result.machine.run_state() == machine.run_state()
    assert {ev.JoinRequested, ev.ModelAgreed, ev.ContributionReceived, ev.CommitFinished, ev.LearnerLeft} <= kinds


@contextmanager
def process(folder: Path, address: str):
    command = [sys.executable, "-m", "syncer_service", "--listen", address, *FREE_PORTS, *SHORT_RUN]
    folders = ["--state-dir", str(folder / "state"), "--output-dir", str(folder / "output"), "--log-format", "json"]
    log = folder / f"{address.replace(':', '-')}.jsonl"
    with log.open("w") as errors, subprocess.Popen([*command, *folders], cwd=ROOT, stderr=errors) as started:
        try:
            yield started, listening_at(started, log)
        finally:
            started.kill()


def listening_at(started, log: Path) -> str:
    """The address for learners, once the log tells it."""
    while started.poll() is None:
        for line in log.read_text().splitlines():
            entry = json.loads(line) if line.endswith("}") else {}
            if entry.get("event") == "syncer_ready":
                return entry["learners"]
        time.sleep(0.01)
    raise AssertionError(log.read_text())


def test_the_tapes_of_a_syncer_that_was_killed_and_started_again_replay(tmp_path):
    folder = tmp_path / "state" / "tape"

    async def train(address: str, is_enough) -> None:
        learner = LastingLearner(address, "a", Policy(), Script(step_seconds=0.05))
        task = asyncio.create_task(learner.run())
        async with asyncio.timeout(60):
            while not is_enough(learner) and not task.done():  # noqa: ASYNC110 - a file has no event
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with process(tmp_path, "127.0.0.1:0") as (started, address):
        asyncio.run(train(address, lambda learner: len(learner.applied) >= 8 and _events(folder) > 20))
        started.send_signal(signal.SIGKILL)
        started.wait(20)
    with process(tmp_path, address) as (started, _):
        asyncio.run(train(address, lambda learner: learner.left))
        assert started.wait(30) == 0
    killed, ended = map(TapeFile, tape_files(folder))
    first, second = replay(killed), replay(ended)
    assert first.difference is None
    assert second.difference is None
    assert (killed.is_whole, ended.is_whole) == (False, True)
    assert (killed.header.beginning.began, ended.header.beginning.began) == ("new", "restored")
    assert 1 <= first.machine.rounds.committed_count < second.machine.rounds.committed_count
    assert second.machine.phase == "finished"


def _events(folder: Path) -> int:
    """Events that can be read now."""
    return sum(1 for path in tape_files(folder) if path.stat().st_size for _ in TapeFile(path))
