"""A syncer that is killed and started again: the run goes on where its newest commits left it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.core.policy import Policy
from syncer_service.store.reader import open_ledger
from tests.integration.lasting_learner import LastingLearner
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.protocol_link import Link
from tests.integration.syncers import DEADLINES, config_of, machine_of, syncer
from tests.integration.syncers import until as in_this_process

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "run.total_steps": "0",
    "fragments.count": "4",
    "fragments.interval_steps": "8",
    **{f"deadlines.{name}": str(value) for name, value in DEADLINES.items()},
}


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class SyncerProcess:
    """One syncer at fixed ports and with a fixed state; may be started many times."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.settings = SETTINGS | settings
        self.ports = free_ports(3)
        self.process: subprocess.Popen | None = None
        self.starts = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    @property
    def log(self) -> list[dict]:
        """Everything that the newest process has logged."""
        lines = (self.folder / f"log-{self.starts}.json").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def logged(self, event: str) -> list[dict]:
        return [entry for entry in self.log if entry["event"] == event]

    def start(self, environment: dict[str, str] | None = None) -> None:
        self.starts += 1
        command = [sys.executable, "-m", "syncer_service", "--log-format", "json"]
        for name, port in zip(("listen", "admin-listen", "http-listen"), self.ports, strict=True):
            command += [f"--{name}", f"127.0.0.1:{port}"]
        command += ["--state-dir", str(self.folder / "state"), "--output-dir", str(self.folder / "output")]
        for name, value in self.settings.items():
            command += ["--set", f"{name}={value}"]
        with (self.folder / f"log-{self.starts}.json").open("w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stderr=log, env={**os.environ, **(environment or {})})

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture
def process(tmp_path):
    one = SyncerProcess(tmp_path)
    yield one
    if one.process is not None:
        one.process.kill()
        one.process.wait()


async def until(condition, seconds=40.0, tasks=()):
    """Waits for a condition; a task that ends with an error meanwhile ends the wait with it."""
    async with asyncio.timeout(seconds):
        while not condition():
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.02)


def numbers_by_fragment(learner):
    """Version numbers in the order in which a learner applied them."""
    found = {}
    for fragment, version, _ in learner.applied:
        found.setdefault(fragment, []).append(version)
    return found


async def test_a_killed_syncer_goes_on_with_its_newest_commits(process):
    process.start()
    names = "ab"
    team = [LastingLearner(process.address, name, Policy(), Script(seed=n)) for n, name in enumerate(names)]
    tasks = [asyncio.create_task(learner.run()) for learner in team]
    try:
        for kills in range(1, 4):
            count = len(team[0].applied) + 12
            await until(lambda count=count: len(team[0].applied) >= count, tasks=tasks)
            process.kill()
            steps = team[0].machine.local_step
            await until(
                lambda steps=steps: team[0].machine.local_step > steps + 5, tasks=tasks
            )  # nobody waits for the syncer
            process.start()
            await until(lambda kills=kills: all(learner.attaches > kills for learner in team), tasks=tasks)
        count = len(team[0].applied) + 12
        await until(lambda: len(team[0].applied) >= count, tasks=tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert [learner.joins for learner in team] == [1, 1], "incarnations outlive the syncer"
    for learner in team:
        for versions in numbers_by_fragment(learner).values():
            assert versions == sorted(set(versions)), "versions only go up"
            assert {version.timeline for version in versions} == {1}, "nothing committed was lost"
    values = [{(f, v.timeline, v.number): digest for f, v, digest in learner.applied} for learner in team]
    shared = values[0].keys() & values[1].keys()
    assert len(shared) > 20
    assert all(values[0][key] == values[1][key] for key in shared), "one value under one name"
    assert process.logged("run_restored")[0]["epoch"] == 4
    process.kill()
    with open_ledger(process.folder / "state") as reader:
        rows = list(reader.rounds())
    ledger = {(row.fragment, row.version.number): row.version.digest for row in rows if row.version is not None}
    for fragment, version, digest in team[0].applied:
        if version.number > 1:
            assert ledger[fragment, version.number] == digest


async def test_everybody_dead_and_started_again_loses_nothing(process):
    process.start()
    learner = LastingLearner(process.address, "a", Policy(), Script())
    task = asyncio.create_task(learner.run())
    await until(lambda: len(learner.applied) >= 12)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    process.kill()
    process.start()
    again = LastingLearner(process.address, "a", Policy(), Script())
    task = asyncio.create_task(again.run())
    try:
        await until(lambda: len(again.applied) >= 8)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    newest = {fragment: version for fragment, version, _ in learner.applied}
    for fragment, versions in numbers_by_fragment(again).items():
        assert versions[0] >= newest[fragment], "what was published is still there"
    assert again.link.incarnation > learner.link.incarnation
    assert again.machine.cursor >= 0


async def test_settings_that_a_run_keeps_cannot_change(process):
    process.start()
    link = Link(process.address, "a")
    await until(lambda: process.logged("syncer_ready"))
    await link.join()
    await link.close()
    assert process.kill() == -signal.SIGKILL
    process.settings |= {"run.seed": "7", "quorum.minimum": "2"}
    process.start()
    assert process.process.wait(20) == 2
    text = (process.folder / f"log-{process.starts}.json").read_text().splitlines()[-1]
    assert "holds the state of a run that was started with other settings" in text
    assert "run.seed: before 0, now 7" in text
    assert "quorum.minimum" not in text, "what may change is not in the way"


def test_another_number_of_fragments_is_refused_in_one_paragraph(process):
    process.start()
    process_is_ready(process)
    assert process.kill(signal.SIGTERM) == 0
    process.settings["fragments.count"] = "3"
    process.start()
    assert process.process.wait(20) == 2
    text = (process.folder / f"log-{process.starts}.json").read_text().splitlines()[-1]
    assert "has 4 fragments, the run file says 3" in text


def test_two_syncers_on_one_state_are_refused(process):
    process.start()
    process_is_ready(process)
    second = SyncerProcess(process.folder)
    second.starts = 10
    second.start()
    assert second.process.wait(20) == 2
    text = (process.folder / f"log-{second.starts}.json").read_text()
    assert f"{process.process.pid}" in text
    assert process.process.poll() is None, "the first one does not notice"


def process_is_ready(process, seconds=20.0):
    async def wait():
        await until(lambda: process.logged("syncer_ready") or process.process.poll() is not None, seconds)

    asyncio.run(wait())
    assert process.process.poll() is None, process.log


async def test_rounds_of_earlier_starts_can_still_be_listed(tmp_path):
    async with syncer(tmp_path) as running:
        learner = ProtocolLearner(str(running.addresses.data), "a", config_of().to_policy(), Script())
        task = asyncio.create_task(learner.run())
        await in_this_process(running, lambda: machine_of(running).rounds.committed_count >= 6)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        before = [status for status in machine_of(running).rounds.closed if status.version is not None]
    async with syncer(tmp_path) as running:
        after = [status for status in machine_of(running).rounds.closed if status.version is not None]
    assert [(s.round, s.version, s.members, s.state) for s in after] == [
        (s.round, s.version, s.members, s.state) for s in before
    ]
