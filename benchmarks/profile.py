"""Where our time goes, on both ends: `python -m benchmarks.profile`.

A learner uploads a contribution and downloads the version that it leads to, again and again, while a sampling profiler
looks at the learner's process and the syncer's. The profiler, py-spy, lies in the environment of `make bench-env`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.figures import Figure, Section, run
from benchmarks.peers.pairs import Pair
from benchmarks.peers.ways import ROOT, WAYS
from benchmarks.samples import Recording, Share, cpu_by_thread, shares

PY_SPY: Final = ROOT / ".venv-bench" / "bin" / "py-spy"
MIB: Final = 1 << 20
TITLE: Final = "Where our time goes"
PAYLOAD_MIB: Final = 256
PAYLOAD_MIB_QUICK: Final = 64
SECONDS: Final = 15.0
SECONDS_QUICK: Final = 5.0
ROWS_MAX: Final = 16
"""Functions shown for each process; the rest is summed up."""
MERGE_THREADS: Final = ("merge", "merge-loop")
"""Kinds of threads whose work is the merge and the outer step: the one that leads, and those that share its loops."""


def measure(quick: bool) -> Section:
    """Samples both processes; without a profiler the section says so and has no figures."""
    byte_count = MIB * (PAYLOAD_MIB_QUICK if quick else PAYLOAD_MIB)
    try:
        if not PY_SPY.exists():
            raise RuntimeError(f"{PY_SPY.relative_to(ROOT)} is not there: make bench-env")
        trip_count, taken = _sampled(byte_count, SECONDS_QUICK if quick else SECONDS)
    except RuntimeError as error:
        return Section("profile", TITLE, f"Not measured: {error}.", ())
    return section_of(byte_count, trip_count, taken)


def _sampled(byte_count: int, seconds: float) -> tuple[int, dict[str, list[Share]]]:
    """Round trips that were made, and what each function took, by process.

    Raises:
        RuntimeError: py-spy may not look at another process here.
    """
    ours = next(way for way in WAYS if way.kind == "ours")
    with Pair(ours, byte_count) as pair, tempfile.TemporaryDirectory(prefix="profile-") as folder:
        pair.round_trip()
        (learner,) = pair.pids
        (syncer,) = psutil.Process(learner).children()
        pids = {"learner": learner, "syncer": syncer.pid}
        before = {name: cpu_by_thread(pid) for name, pid in pids.items()}
        recordings = {name: Recording(PY_SPY, pid, seconds, Path(folder) / f"{name}.txt") for name, pid in pids.items()}
        trip_count = 0
        while not all(recording.is_over for recording in recordings.values()):
            pair.round_trip()
            trip_count += 1
        after = {name: cpu_by_thread(pid) for name, pid in pids.items()}
        taken = {name: shares(recordings[name].stacks(), before[name], after[name]) for name in pids}
    return trip_count, taken


def section_of(byte_count: int, trip_count: int, taken: dict[str, list[Share]]) -> Section:
    """Processor time for each GiB of either direction, and the tables.

    Args:
        byte_count: Of the payload.
        trip_count: Round trips that were sampled.
        taken: What each function took, by process.
    """
    gib = 2 * byte_count * trip_count / (1 << 30)
    figures, tables = [], []
    for process, found in taken.items():
        transfer = [share for share in found if share.thread not in MERGE_THREADS]
        merge = [share for share in found if share.thread in MERGE_THREADS]
        figures.append(Figure(f"{process}: processor time of transfers", _sum(transfer) / gib, "CPU-s/GiB"))
        tables.append(_table(f"The {process}'s process", transfer, gib, "CPU-s/GiB"))
        if merge:
            note = "one contribution; merge, outer step, digest"
            figures.append(Figure(f"{process}: of the merge", _sum(merge) / trip_count, "CPU-s a round", note=note))
            tables.append(_table(f"The {process}'s merge", merge, trip_count, "CPU-s a round"))
    return Section(
        "profile",
        TITLE,
        f"One learner uploads {byte_count // MIB} MiB of float32 and downloads the version that it leads to, "
        f"{trip_count} times; samples of both processes, weighed with the processor time of their threads. A function "
        "counts with the C code that it calls, such as copies, checksums and system calls; behind '<' "
        "stands what of ours has called it. Sampling slows down what it samples: read the shares, not the speed.",
        tuple(figures),
        {"tables": tables},
    )


def _sum(found: Sequence[Share]) -> float:
    return sum(share.cpu_seconds for share in found)


def _table(title: str, found: Sequence[Share], count: float, unit: str) -> dict[str, Any]:
    total = _sum(found) or 1.0
    rows: list[list[str | float]] = [
        [f"{100 * share.cpu_seconds / total:.1f} %", share.cpu_seconds / count, share.thread, share.function]
        for share in found[:ROWS_MAX]
    ]
    if rest := _sum(found[ROWS_MAX:]):
        rows.append([f"{100 * rest / total:.1f} %", rest / count, "", f"{len(found) - ROWS_MAX} more functions"])
    return {"title": title, "columns": ["share", unit, "thread", "function"], "rows": rows}


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
