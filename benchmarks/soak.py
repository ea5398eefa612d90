"""Does a syncer grow? `python -m benchmarks.soak --minutes 30`.

A syncer with its durable state, a learner that trains, and one that comes and goes all the time. Memory and open files
of syncer and lasting learner are read every few seconds; what counts is their slope after the first fifth of the time.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from demo.plan import Plan
from demo.processes import Addresses, Processes
from demo.watch import Watch

STEP_SECONDS = 0.1
SAMPLE_SECONDS = 5.0
VISIT_SECONDS = 45.0
"""The one that comes and goes is killed and started again this often."""
WARM_SHARE = 0.2
"""Of the time; until then caches and pools fill."""
READY_SECONDS_MAX = 120.0
LASTING, VISITING = "lasting", "visiting"


@dataclass(slots=True)
class Samples:
    """What one process held, over time."""

    seconds: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    open_files: list[int] = field(default_factory=list)

    def take(self, process: psutil.Process, seconds: float) -> None:
        """One look."""
        self.seconds.append(seconds)
        self.resident_bytes.append(process.memory_info().rss)
        self.open_files.append(process.num_fds())

    def figures(self) -> dict[str, float]:
        """Slopes per hour after the warm-up, and what was held at its end and at the end of all."""
        start = next(i for i, s in enumerate(self.seconds) if s >= WARM_SHARE * self.seconds[-1])
        hours = [s / 3600 for s in self.seconds[start:]]
        resident, files = self.resident_bytes[start:], self.open_files[start:]
        return {
            "resident_mib_warm": round(resident[0] / 2**20, 1),
            "resident_mib_end": round(resident[-1] / 2**20, 1),
            "resident_mib_max": round(max(resident) / 2**20, 1),
            "resident_mib_per_hour": round(statistics.linear_regression(hours, resident).slope / 2**20, 2),
            "open_files_warm": files[0],
            "open_files_end": files[-1],
            "open_files_max": max(files),
            "open_files_per_hour": round(statistics.linear_regression(hours, files).slope, 2),
        }


def soak(folder: Path, seconds: float) -> dict[str, object]:
    """Runs it; returns the figures.

    Args:
        folder: For everything that is written.
        seconds: Of sampling.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    plan = Plan(folder, (LASTING, VISITING), quorum=1, seconds=seconds, total_steps=0)
    plan.write_run_file()
    processes = Processes(plan, Addresses.free())
    watch = Watch(processes.addresses.admin)
    try:
        processes.warm()
        processes.start_syncer()
        pad = ("--step-seconds-min", str(STEP_SECONDS))
        processes.start_learner(LASTING, *pad)
        processes.start_learner(VISITING, *pad)
        await_rounds(watch, processes)
        samples = _sample(processes, pad, seconds)
        last = watch.look()
        assert last is not None
        state_bytes = sum(path.stat().st_size for path in (folder / "state").rglob("*") if path.is_file())
        return {
            "on": f"{platform.machine()}, {psutil.cpu_count()} processors, Python {platform.python_version()}",
            "minutes": round(seconds / 60, 1),
            "rounds_committed": last.run.rounds_committed_count,
            "visits": samples.pop("visits"),
            "state_mib": round(state_bytes / 2**20, 1),
            **{name: found.figures() for name, found in samples.items() if isinstance(found, Samples)},
        }
    finally:
        watch.close()
        processes.stop_all()


def await_rounds(watch: Watch, processes: Processes) -> None:
    """Until the first round is committed.

    Raises:
        SystemExit: a process failed, or it took too long.
    """
    while (sample := watch.look()) is None or sample.run.rounds_committed_count < 1:
        if watch.seconds() > READY_SECONDS_MAX or processes.failed():
            raise SystemExit(processes.failed() or "no round was committed")
        time.sleep(0.5)


def _sample(processes: Processes, pad: tuple[str, ...], seconds: float) -> dict[str, object]:
    watched = {name: psutil.Process(processes.running[name].pid) for name in ("syncer", LASTING)}
    samples = {name: Samples() for name in watched}
    began, visits = time.monotonic(), 0
    while (passed := time.monotonic() - began) < seconds:
        for name, process in watched.items():
            samples[name].take(process, passed)
        if passed > (visits + 1) * VISIT_SECONDS:
            visits += 1
            processes.signal(VISITING, signal.SIGKILL)
            processes.running[VISITING].wait()
            processes.start_learner(VISITING, *pad)
        if failure := processes.failed():
            raise SystemExit(failure)
        time.sleep(SAMPLE_SECONDS)
    return {**samples, "visits": visits}


def main(arguments: list[str]) -> int:
    """Prints the figures and writes them beside the logs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--output", type=Path, default=Path("runs/soak"))
    options = parser.parse_args(arguments)
    figures = soak(options.output, 60 * options.minutes)
    text = json.dumps(figures, indent=2)
    (options.output / "summary.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
