"""What a durable commit costs, and a restart: `python -m benchmarks.durability`.

One store per base interval: 1 writes a whole payload (theta, momentum, residual) at every commit, n writes a base and
n - 1 merged deltas that are replayed. All stores commit the same rounds, one after the other in every round, so that
what else the machine does falls on all of them; medians are compared. Then each is opened again, in turn. Last,
the ledger by itself: many rounds of a fragment of one parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from decoupled_diloco.arrays.digest import state_digest, vector_digest
from decoupled_diloco.arrays.outer import outer_step
from decoupled_diloco.core.effects import CommitRound, MergedContribution
from decoupled_diloco.core.events import JoinRequested
from decoupled_diloco.core.ids import RunPhase, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.store.durable import DurableStore
from syncer_service.store.interface import FragmentCommit, MergedDelta
from syncer_service.store.ledger import LEDGER_NAME

INTERVALS = (1, 4, 8, 16, 64)
OPENINGS = 3
MEMBERS = 8
"""Contributions to every round."""
LEARNERS = 32
"""Learners registered where the ledger alone is measured."""
LEDGER_ROUNDS = 2000
POLICY = Policy(fragment_count=1)


@dataclass(slots=True)
class Measured:
    """One base interval."""

    interval: int
    folder: Path
    commit_seconds: list[float] = field(default_factory=list)
    commit_bytes: list[int] = field(default_factory=list)
    open_seconds: list[float] = field(default_factory=list)
    replayed: int = 0

    def open(self) -> DurableStore:
        """Opens its store."""
        return DurableStore(self.folder, POLICY, self.interval)

    def report(self, parameter_count: int, reference: Measured) -> dict[str, Any]:
        """Its figures, compared with `reference`."""
        median = statistics.median(self.commit_seconds)
        return {
            "base_interval": self.interval,
            "bytes_per_commit": round(statistics.fmean(self.commit_bytes)),
            "bytes_per_commit_and_parameter": round(statistics.fmean(self.commit_bytes) / parameter_count, 2),
            "commit_seconds_median": round(median, 4),
            "commit_seconds_max": round(max(self.commit_seconds), 4),
            "median_to_whole_payload": round(median / statistics.median(reference.commit_seconds), 2),
            "mean_to_whole_payload": round(
                statistics.fmean(self.commit_seconds) / statistics.fmean(reference.commit_seconds), 2
            ),
            "restart_seconds_median": round(statistics.median(self.open_seconds), 3),
            "restart_replays_deltas": self.replayed,
            "disk_bytes": sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file()),
        }


def measure(folder: Path, parameter_count: int, round_count: int) -> list[dict[str, Any]]:
    """Commits rounds of one fragment to a store per interval, then opens each again.

    Raises:
        RuntimeError: a store came back with other bits.
    """
    measured = [Measured(interval, folder / f"every-{interval}") for interval in INTERVALS]
    stores = [item.open() for item in measured]
    chance = np.random.default_rng(0)
    theta = chance.standard_normal(parameter_count, np.float32)
    commit: FragmentCommit | None = None
    for store in stores:
        store.begin("benchmark", {}, 1)
        store.stage_initial("alpha", 1, 0, theta)
        (commit,) = store.commit_initial("alpha", 1, 1)
    assert commit is not None
    state = replace(
        SyncerMachine(POLICY).run_state(), phase=RunPhase.RUNNING, versions=(commit.version,), version_steps=(0,)
    )
    for number in range(1, round_count + 1):
        delta = MergedDelta(chance.standard_normal(parameter_count, np.float32), 0.7, 0.9, "bf16")
        commit = _next(commit, delta, number)
        for position in range(len(stores)):
            which = (position + number) % len(stores)  # nobody is always first
            _commit(stores[which], measured[which], commit, delta, number, state)
        state = replace(state, versions=(commit.version,), version_steps=(number,), newest_opened=number)
    for store in stores:
        store.close()
    _open_all(measured, state_digest(commit.state), round_count)
    return [item.report(parameter_count, measured[0]) for item in measured]


def measure_ledger(folder: Path, round_count: int) -> dict[str, Any]:
    """What the ledger costs by itself: a fragment of one parameter, 32 learners registered, 8 in every round.

    Args:
        folder: Of its store.
        round_count: Commits.
    """
    item = Measured(INTERVALS[0], folder)
    machine = SyncerMachine(POLICY)
    for number in range(LEARNERS):
        machine.handle(JoinRequested(number, f"learner-{number:02}"), 0.0)
    with closing(item.open()) as store:
        store.begin("benchmark", {}, 1)
        store.stage_initial("learner-00", 1, 0, np.zeros(1, np.float32))
        (commit,) = store.commit_initial("learner-00", 1, 1)
        state = replace(machine.run_state(), phase=RunPhase.RUNNING, versions=(commit.version,), version_steps=(0,))
        for number in range(1, round_count + 1):
            delta = MergedDelta(np.ones(1, np.float32), 0.7, 0.9, "bf16")
            commit = _next(commit, delta, number)
            _commit(store, item, commit, delta, number, state)
            state = replace(state, versions=(commit.version,), version_steps=(number,), newest_opened=number)
    ledger_bytes = (folder / LEDGER_NAME).stat().st_size
    return {
        "learners": LEARNERS,
        "members": MEMBERS,
        "rounds": round_count,
        "commit_seconds_median": round(statistics.median(item.commit_seconds), 5),
        "bytes_written_per_commit_median": round(statistics.median(item.commit_bytes)),
        "ledger_bytes_per_round": round(ledger_bytes / round_count),
    }


def _next(before: FragmentCommit, delta: MergedDelta, number: int) -> FragmentCommit:
    step = outer_step(before.state, delta.delta, learning_rate=0.7, mu=0.9, download_encoding="bf16")
    version = Version(1, before.version.number + 1, vector_digest(step.state.theta))
    return FragmentCommit(0, version, number, step.state, before.version, step.delta_payload)


def _commit(
    store: DurableStore, item: Measured, commit: FragmentCommit, delta: MergedDelta, number: int, state: RunState
) -> None:
    members = tuple(MergedContribution(f"learner-{n}", n, n, 1.0, 1, 1, number, number) for n in range(MEMBERS))
    row = CommitRound(number, 0, commit.version, number - 1, members, (), MEMBERS, False, "everybody has answered")
    before = _written_bytes()
    started = time.perf_counter()
    store.commit_round(commit, delta, row, state)
    item.commit_seconds.append(time.perf_counter() - started)
    item.commit_bytes.append(_written_bytes() - before)


def _written_bytes() -> int:
    return int(psutil.Process().io_counters().write_chars)


def _open_all(measured: list[Measured], digest: str, round_count: int) -> None:
    for _ in range(OPENINGS):
        for item in measured:
            started = time.perf_counter()
            store = item.open()
            item.open_seconds.append(time.perf_counter() - started)
            restored = store.restored()
            store.close()
            if restored is None or restored.losses or state_digest(restored.fragments[0].state) != digest:
                raise RuntimeError(f"the store with base interval {item.interval} came back with other bits")
            item.replayed = round_count % item.interval


def describe_machine(folder: Path) -> dict[str, Any]:
    """What it ran on."""
    device = max(
        (part for part in psutil.disk_partitions(all=True) if str(folder.resolve()).startswith(part.mountpoint)),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    return {
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "file_system": device.fstype if device else "?",
    }


def main(arguments: list[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.durability", description=__doc__)
    parser.add_argument("--parameters", type=float, default=1e6, help="of the fragment (default 1e6)")
    parser.add_argument(
        "--rounds", type=int, default=63, help="commits to each store (default 63: the most deltas to replay)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/durability"), help="folder; its stores are removed")
    options = parser.parse_args(arguments)
    folder = options.output / "stores"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        results = measure(folder, int(options.parameters), options.rounds)
        report = {
            "on": describe_machine(folder),
            "parameters": int(options.parameters),
            "rounds": options.rounds,
            "results": results,
            "ledger_alone": measure_ledger(folder / "ledger", LEDGER_ROUNDS),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps(report, indent=2)
    options.output.mkdir(parents=True, exist_ok=True)
    name = f"durability-{int(options.parameters)}.json"
    (options.output / name).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
