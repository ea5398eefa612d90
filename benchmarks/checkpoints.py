"""What a checkpoint costs, and whether anybody notices it: `python -m benchmarks.checkpoints`.

A durable store commits rounds in one thread, as a syncer does, while an event loop counts how late its timers are. In
every other block of commits another thread writes checkpoints to the same disk, one after the other: the worst case.
Blocks with and without take turns, so that what else the machine does falls on both. Then the checkpoint is read back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.durability import describe_machine
from decoupled_diloco.arrays.digest import state_digest, vector_digest
from decoupled_diloco.arrays.outer import outer_step
from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.ids import RunPhase, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.checkpoint_files import Cut
from syncer_service.checkpoint_folder import CheckpointFolder
from syncer_service.checkpoint_storage import open_folder
from syncer_service.store.durable import DurableStore
from syncer_service.store.interface import FragmentCommit, MergedDelta, RunModel

BLOCK_COMMITS = 16
TICK_SECONDS = 0.005
MODEL = RunModel({}, {}, "alpha")


@dataclass(slots=True)
class Block:
    """What was seen with checkpoints being written, or without."""

    commit_seconds: list[float] = field(default_factory=list)
    late_seconds: list[float] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Figures in milliseconds."""
        return {
            "commits": len(self.commit_seconds),
            "commit_ms_median": round(1000 * statistics.median(self.commit_seconds), 1),
            "commit_ms_p90": round(1000 * float(np.quantile(self.commit_seconds, 0.9)), 1),
            "loop_late_ms_median": round(1000 * statistics.median(self.late_seconds), 2),
            "loop_late_ms_p99": round(1000 * float(np.quantile(self.late_seconds, 0.99)), 2),
            "loop_late_ms_max": round(1000 * max(self.late_seconds), 1),
        }


class Run:
    """A store that commits one fragment after the other."""

    def __init__(self, folder: Path, parameter_count: int, fragment_count: int) -> None:
        policy = Policy(fragment_count=fragment_count)
        self.store = DurableStore(folder, policy)
        self.store.begin("benchmark", {}, fragment_count)
        self.chance = np.random.default_rng(0)
        for fragment in range(fragment_count):
            theta = self.chance.standard_normal(parameter_count // fragment_count, np.float32)
            self.store.stage_initial("alpha", 1, fragment, theta)
        self.commits = {commit.fragment: commit for commit in self.store.commit_initial("alpha", 1, fragment_count)}
        self.number = 0
        self.state = replace(SyncerMachine(policy).run_state(), phase=RunPhase.RUNNING)
        self._name()

    def _name(self) -> None:
        commits = [commit for _, commit in sorted(self.commits.items())]
        self.state: RunState = replace(
            self.state,
            versions=tuple(commit.version for commit in commits),
            version_steps=tuple(commit.global_step for commit in commits),
        )
        self.cut = Cut("benchmark", self.state, dict(self.commits), MODEL, {})

    def merge(self) -> tuple[FragmentCommit, MergedDelta, CommitRound]:
        """The next round, ready to be committed."""
        self.number += 1
        before = self.commits[self.number % len(self.commits)]
        delta = MergedDelta(self.chance.standard_normal(before.state.theta.size, np.float32), 0.7, 0.9, "bf16")
        step = outer_step(before.state, delta.delta, learning_rate=0.7, mu=0.9, download_encoding="bf16")
        version = Version(1, before.version.number + 1, vector_digest(step.state.theta))
        commit = FragmentCommit(before.fragment, version, self.number, step.state, before.version, step.delta_payload)
        return commit, delta, CommitRound(self.number, before.fragment, version, self.number, (), (), 1, False, "")

    def commit(self, commit: FragmentCommit, delta: MergedDelta, row: CommitRound) -> float:
        """Seconds that it took."""
        started = time.perf_counter()
        self.store.commit_round(commit, delta, row, self.state)
        seconds = time.perf_counter() - started
        self.commits[commit.fragment] = commit
        self._name()
        return seconds


async def _block(run: Run, seen: Block, store: ThreadPoolExecutor) -> None:
    """Commits rounds while timers are watched."""
    loop, is_over = asyncio.get_running_loop(), False

    async def watch() -> None:
        while not is_over:
            before = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            seen.late_seconds.append(time.perf_counter() - before - TICK_SECONDS)

    watching = asyncio.create_task(watch())
    for _ in range(BLOCK_COMMITS):
        merged = await loop.run_in_executor(store, run.merge)
        seen.commit_seconds.append(await loop.run_in_executor(store, run.commit, *merged))
    is_over = True
    await watching


def _keep_writing(run: Run, checkpoints: CheckpointFolder, seconds: list[float], is_over: threading.Event) -> None:
    while not is_over.is_set():
        started = time.perf_counter()
        written = checkpoints.write(run.cut, "", "", True)
        seconds.append(time.perf_counter() - started)
        checkpoints.remove(written.id)


async def measure(folder: Path, parameter_count: int, fragment_count: int, pairs: int) -> dict[str, Any]:
    """Both kinds of blocks in turn, then reads the newest checkpoint.

    Raises:
        RuntimeError: It came back with other bits.
    """
    run = Run(folder / "state", parameter_count, fragment_count)
    checkpoints = CheckpointFolder(open_folder(str(folder / "checkpoints"), rests=True))
    quiet, busy = Block(), Block()
    write_seconds: list[float] = []
    with ThreadPoolExecutor(1) as store, ThreadPoolExecutor(1) as writer:
        await _block(run, Block(), store)  # the first ones begin segments
        for _ in range(pairs):
            await _block(run, quiet, store)
            is_over = threading.Event()
            writing = asyncio.get_running_loop().run_in_executor(
                writer, _keep_writing, run, checkpoints, write_seconds, is_over
            )
            await _block(run, busy, store)
            is_over.set()
            await writing
    cut = run.cut
    started = time.perf_counter()
    manifest = checkpoints.write(cut, "last", "", True)
    alone = time.perf_counter() - started
    started = time.perf_counter()
    states = checkpoints.states(checkpoints.manifest("last"))
    read = time.perf_counter() - started
    if any(state_digest(states[p]) != state_digest(commit.state) for p, commit in cut.fragments.items()):
        raise RuntimeError("a checkpoint came back with other bits")
    run.store.close()
    return {
        "parameters": parameter_count,
        "checkpoint_bytes": manifest.byte_count,
        "write_seconds_alone": round(alone, 2),
        "write_seconds_beside_commits": round(statistics.median(write_seconds), 2),
        "checkpoints_written_beside_commits": len(write_seconds),
        "read_and_verify_seconds": round(read, 2),
        "without": quiet.report(),
        "while_checkpoints_are_written": busy.report(),
    }


def main() -> int:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description="Commits with and without checkpoints in the background.")
    parser.add_argument("--parameters", type=float, default=16e6)
    parser.add_argument("--fragments", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=3, help="blocks of each kind")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/checkpoints"))
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    try:
        figures = asyncio.run(measure(options.folder, int(options.parameters), options.fragments, options.pairs))
        print(json.dumps({"on": describe_machine(options.folder), **figures}, indent=2))
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
