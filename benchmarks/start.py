"""How soon is a killed learner back? `python -m benchmarks.start`.

A syncer and three learners train the demo's model. One of them is killed again and again and started with nothing but
its id. Its journal and its log say when it joined, had its programs and made its first step, the syncer when a round
with a contribution of it was committed. Once on a quiet machine (the others' steps padded), once beside two learners
that compute all the time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from benchmarks.soak import await_rounds
from demo.plan import Plan
from demo.processes import Addresses, Processes
from demo.watch import Watch

KILLED, OTHERS = "killed", ("first", "second")
QUIET_STEP_SECONDS = 0.2
"""Steps of the other learners on the quiet machine; those of the killed one are never padded."""
POLL_SECONDS = 0.05
BACK_SECONDS_MAX = 120.0
BETWEEN_SECONDS = 3.0
"""A learner that is back trains so long until it is killed again."""
PROGRAMS_READY = '"event": "programs_ready"'


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds since the process was; the last one is processor time."""

    joined: float
    programs_ready: float
    first_step: float
    first_merged: float
    cpu_until_first_step: float


def measure(folder: Path, kill_count: int, step_seconds: float) -> list[Start]:
    """Kills and starts one learner so often.

    Args:
        folder: For everything that is written; keeps the cache of earlier measurements.
        kill_count: Kills, at least 1.
        step_seconds: Padding of the other learners' steps; 0: they compute all the time.

    Raises:
        SystemExit: a process failed, or a learner did not come back.
    """
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    plan = Plan(folder, (KILLED, *OTHERS), quorum=1, seconds=0.0, total_steps=0)
    plan.write_run_file()
    processes = Processes(plan, Addresses.free())
    watch = Watch(processes.addresses.admin)
    try:
        processes.warm()
        processes.start_syncer()
        for name in OTHERS:
            processes.start_learner(name, "--step-seconds-min", str(step_seconds))
        await_rounds(watch, processes)
        _start(processes, watch)
        starts = []
        for _ in range(kill_count):
            time.sleep(BETWEEN_SECONDS)
            processes.signal(KILLED, signal.SIGKILL)
            processes.running[KILLED].wait()
            starts.append(_start(processes, watch))
        return starts
    finally:
        watch.close()
        processes.stop_all()


def _start(processes: Processes, watch: Watch) -> Start:
    """Starts the learner and waits until a contribution of it was merged."""
    journal, log = processes.plan.folder / f"{KILLED}.journal", processes.log(KILLED)
    journal.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    to_monotonic = time.monotonic() - time.time()
    began = time.monotonic()
    processes.start_learner(KILLED, "--journal", str(journal))
    process, cpu_until_first_step = psutil.Process(processes.running[KILLED].pid), 0.0
    while True:
        time.sleep(POLL_SECONDS)
        lines = _lines(journal)
        if not cpu_until_first_step and any(line["kind"] == "step" for line in lines):
            times = process.cpu_times()
            cpu_until_first_step = times.user + times.system
        if (merged := _merged_at(watch, lines)) is not None:
            break
        if time.monotonic() - began > BACK_SECONDS_MAX or processes.failed():
            raise SystemExit(processes.failed() or f"{KILLED} did not come back; see {log}")
    first = {line["kind"]: float(str(line["t"])) - began for line in reversed(lines)}
    ready = next(line for line in log.read_text(encoding="utf-8").splitlines() if PROGRAMS_READY in line)
    ready_at = datetime.fromisoformat(json.loads(ready)["time"]).timestamp() + to_monotonic
    return Start(first["joined"], ready_at - began, first["step"], merged - began, cpu_until_first_step)


def _merged_at(watch: Watch, lines: list[dict[str, object]]) -> float | None:
    """When a round that this process contributed to was seen committed with it, on the monotonic clock."""
    asked = {line["round"] for line in lines if line["kind"] == "contribution"}
    if not asked or watch.look() is None:
        return None
    seen = [
        watch.started + watch.round_seconds[item.round]
        for item in watch.committed()
        if item.round in asked and any(member.learner_id == KILLED for member in item.members)
    ]
    return min(seen, default=None)


def _lines(journal: Path) -> list[dict[str, object]]:
    """The journal's complete lines."""
    if not journal.exists():
        return []
    complete, _, _ = journal.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def figures(starts: list[Start]) -> dict[str, float]:
    """Medians, and the slowest return."""
    medians = {name: round(statistics.median(getattr(start, name) for start in starts), 2) for name in Start.__slots__}
    return medians | {"first_merged_max": round(max(start.first_merged for start in starts), 2)}


def main(arguments: list[str]) -> int:
    """Prints the figures and writes them beside the logs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--kills", type=int, default=5, help="per measurement (default 5)")
    parser.add_argument("--output", type=Path, default=Path("runs/start"), help="folder")
    options = parser.parse_args(arguments)
    report: dict[str, object] = {
        "on": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "load_before": round(os.getloadavg()[0], 2),
        "kills": options.kills,
    }
    stamp = time.strftime("%H%M%S")
    for name, step_seconds in (("quiet", QUIET_STEP_SECONDS), ("busy", 0.0)):
        folder = options.output / f"{stamp}-{name}"
        report[name] = figures(measure(folder, options.kills, step_seconds))
    text = json.dumps(report, indent=2)
    (options.output / "summary.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
