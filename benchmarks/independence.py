"""Do learners of different speeds slow each other down? `python -m benchmarks.independence`.

Three learners train the demo's model with steps padded to fixed durations, 1 : 0.8 : 0.5 in speed, so that all of
them together leave much of the processor idle. Each one's step rate is measured alone (a run of its own) and together
(one run of all three), in pairs, one after the other. A ratio of 1 means that nobody waited for anybody.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from demo.plan import Plan
from demo.processes import Addresses, Processes
from demo.watch import Watch, duration_seconds

FASTEST_STEP_SECONDS = 0.2
SPEEDS = {"fast": 1.0, "middle": 0.8, "slow": 0.5}
WARM_STEPS = 10
POLL_SECONDS = 0.25
READY_SECONDS_MAX = 120.0
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Rates in steps per second, by learner."""

    rates: dict[str, float]
    cpu_share: float
    network_wait_seconds: dict[str, float]
    rounds_by_fragment: dict[str, list[int]]
    participation: float


def measure(folder: Path, names: tuple[str, ...], seconds: float) -> Measured:
    """Runs the named learners with a syncer of their own and measures for some seconds.

    Raises:
        RuntimeError: a process failed, or the learners did not get going.
    """
    plan = Plan(folder, names, 1, seconds, total_steps=1_000_000)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    plan.write_run_file()
    processes = Processes(plan, Addresses.free())
    watch = Watch(processes.addresses.admin)
    try:
        processes.start_syncer()
        for name in names:
            padded = FASTEST_STEP_SECONDS / SPEEDS[name]
            processes.start_learner(name, "--step-seconds-min", str(padded))
        _wait_until_stepping(watch, processes, names)
        return _measure_now(watch, processes, names, seconds)
    finally:
        watch.close()
        processes.stop_all()


def _wait_until_stepping(watch: Watch, processes: Processes, names: tuple[str, ...]) -> None:
    while True:
        failure = processes.failed()
        if failure is not None:
            raise RuntimeError(failure)
        sample = watch.look()
        learners = [sample.learner(name) for name in names] if sample else [None]
        if all(learner is not None and learner.local_step >= WARM_STEPS for learner in learners):
            return
        if watch.seconds() > READY_SECONDS_MAX:
            raise RuntimeError(f"the learners make no steps; see {processes.plan.folder / 'logs'}")
        time.sleep(POLL_SECONDS)


def _measure_now(watch: Watch, processes: Processes, names: tuple[str, ...], seconds: float) -> Measured:
    started, cpu_before = time.monotonic(), _cpu_seconds(processes)
    first: dict[str, tuple[float, int]] = {}
    newest: dict[str, tuple[float, int]] = {}
    while time.monotonic() - started < seconds:
        time.sleep(POLL_SECONDS)
        sample = watch.look()
        if sample is None:
            continue
        for learner in sample.learners:
            # The instant of the report, not that of the look: a rate is taken from step to step.
            at = time.monotonic() - duration_seconds(learner.last_seen_duration)
            if learner.learner_id in names and newest.get(learner.learner_id, (0.0, -1))[1] != learner.local_step:
                first.setdefault(learner.learner_id, (at, learner.local_step))
                newest[learner.learner_id] = (at, learner.local_step)
    elapsed = time.monotonic() - started
    last = watch.samples[-1]
    known = {item.learner_id: item for item in last.learners if item.learner_id in names}
    return Measured(
        {name: _rate(first[name], newest[name]) for name in names},
        (_cpu_seconds(processes) - cpu_before) / elapsed / (os.cpu_count() or 1),
        {name: duration_seconds(item.network_wait_duration) for name, item in known.items()},
        {name: list(item.rounds_merged_by_fragment) for name, item in known.items()},
        last.run.goodput.participation,
    )


def _rate(first: tuple[float, int], newest: tuple[float, int]) -> float:
    return (newest[1] - first[1]) / (newest[0] - first[0])


def _cpu_seconds(processes: Processes) -> float:
    total = 0.0
    for process in processes.running.values():
        times = psutil.Process(process.pid).cpu_times()
        total += times.user + times.system
    return total


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and 95 % confidence interval (Student's t) of paired ratios."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def main(arguments: list[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.independence", description=__doc__)
    parser.add_argument("--pairs", type=int, default=3, choices=range(2, 11), help="pairs per learner (default 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (default 20)")
    parser.add_argument("--output", type=Path, default=Path("runs/independence"), help="folder")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    _warm(options.output)
    ratios: dict[str, list[float]] = {name: [] for name in SPEEDS}
    together: list[Measured] = []
    for _ in range(options.pairs):
        alone = {name: measure(options.output, (name,), options.seconds).rates[name] for name in SPEEDS}
        together.append(measure(options.output, tuple(SPEEDS), options.seconds))
        for name in SPEEDS:
            ratios[name].append(together[-1].rates[name] / alone[name])
    report = _report(ratios, together)
    (options.output / "independence.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))
    return 0


def _warm(folder: Path) -> None:
    plan = Plan(folder, tuple(SPEEDS), 1, 1.0, total_steps=1_000_000)
    plan.write_run_file()
    Processes(plan, Addresses.free()).warm()


def _report(ratios: dict[str, list[float]], together: list[Measured]) -> dict[str, Any]:
    last = together[-1]
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.python_implementation()} "
        f"{platform.python_version()}; shared with others",
        "step_rate_together_over_alone": {
            name: dict(zip(("mean", "low_95", "high_95"), (round(x, 4) for x in interval(values)), strict=True))
            for name, values in ratios.items()
        },
        "cpu_share_together": round(statistics.fmean(item.cpu_share for item in together), 3),
        "network_wait_seconds": last.network_wait_seconds,
        "rounds_merged_by_fragment": last.rounds_by_fragment,
        "participation": round(last.participation, 4),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
