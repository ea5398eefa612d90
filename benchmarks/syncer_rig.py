"""A syncer as in production, and learners without a model to drive it: what benchmarks of the service are built on.

    with SyncerProcess(run_values(fragments={"count": 2}), store="memory") as syncer:
        async with RigLearner(syncer, "alpha", flat_schema([1 << 20, 1 << 20])) as alpha:
            await alpha.initialize()
            ask = await alpha.asked(fragment=0)
            fate = await alpha.upload(ask, payload)                      # the project's own BulkClient
            news = await alpha.published(0, after=ask.base)
            receipt = await alpha.download(news)
            await alpha.apply(news)                                      # now the next round can be asked

The syncer is its own process and tunes malloc by itself; the learner speaks through the calls of `learner_service`,
without JAX (`rig_learner`). Whoever measures tunes its own process with `tune_malloc()` first, as a learner does.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import psutil

from benchmarks.places import lack_of_space
from benchmarks.tied import tied
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.config import RunConfig
from decoupled_diloco.run_file import run_config

StoreKind = Literal["memory", "durable"]
RunValues = Mapping[str, Mapping[str, object]]

ROOT: Final = Path(__file__).resolve().parents[1]
START_SECONDS: Final = 60.0
"""A syncer that is not ready after this long has failed."""
PROGRAM_OF: Final[Mapping[StoreKind, str]] = {"durable": "syncer_service", "memory": "benchmarks.memory_syncer"}


def run_values(**sections: Mapping[str, object]) -> RunValues:
    """A run of one float32 fragment whose deadlines never matter; `sections` replace values."""
    hour = 3600.0
    values: dict[str, dict[str, object]] = {
        "run": {"id": "benchmark", "total_steps": 0},
        "fragments": {"count": 1, "interval_steps": 8, "overlap_steps": 2},
        "encoding": {"upload": "float32", "download": "float32"},
        "deadlines": {
            "lease_seconds": hour,
            "stall_seconds": hour,
            "upload_seconds_min": hour,
            "upload_idle_seconds": 60.0,
            "last_call_seconds_min": 0.01,
            "last_call_seconds_max": 0.01,
        },
    }
    for section, changes in sections.items():
        values.setdefault(section, {}).update(changes)
    return values


def flat_schema(sizes: Sequence[int], columns: int = 256, rule: Literal["avg", "rda"] = "rda") -> Schema:
    """A schema of one matrix for each size, which is a multiple of `columns`: fragments of exactly these sizes."""
    return Schema(
        [TensorSpec(f"part{index}/kernel", (size // columns, columns), rule=rule) for index, size in enumerate(sizes)]
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """What something took.

    Attributes:
        wall_seconds: from begin to end.
        own_cpu_seconds: processor time of this process, user and system, all threads.
        syncer_cpu_seconds: the same of the syncer.
        syncer_peak_bytes: most resident memory of the syncer meanwhile.
    """

    wall_seconds: float
    own_cpu_seconds: float
    syncer_cpu_seconds: float
    syncer_peak_bytes: int

    @property
    def cpu_seconds(self) -> float:
        """Both ends together."""
        return self.own_cpu_seconds + self.syncer_cpu_seconds


class SyncerProcess:
    """A syncer in a process of its own that does not outlive this one, on free ports, its files in a folder.

    Args:
        values: of the run file, by section.
        store: "durable" is the program as shipped; "memory" the same program with a store in memory.
        settings: flags of the syncer, for example {"base-interval-commits": 1}.
        environment: variables of the process; default: those of this one.
        folder: where its files lie; default: a temporary one, which goes with it.

    Attributes:
        config: the run's.
        address: of the data port, host:port.
        page: URL of the status page.
        process: the process.
    """

    def __init__(
        self,
        values: RunValues,
        *,
        store: StoreKind = "memory",
        settings: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.config: RunConfig = run_config(values)
        self.address = ""
        self.page = ""
        self._temporary = tempfile.TemporaryDirectory(prefix="syncer-rig-") if folder is None else None
        self.folder = folder if folder is not None else Path(self._temporary.name)  # type: ignore[union-attr]
        flags: dict[str, object] = {
            "listen": "127.0.0.1:0",
            "admin-listen": "127.0.0.1:0",
            "http-listen": "127.0.0.1:0",
            "state-dir": self.folder / "state",
            "output-dir": self.folder / "output",
            "log-format": "json",
            **(settings or {}),
        }
        self._command = [sys.executable, "-m", PROGRAM_OF[store]]
        self._command += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        for section, entries in values.items():
            for name, value in entries.items():
                text = value if isinstance(value, str) else json.dumps(value)
                self._command += ["--set", f"{section}.{name}={text}"]
        self._environment = dict(environment) if environment is not None else None
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        """Starts it and waits until it is ready.

        Raises:
            RuntimeError: it does not become ready; with its log.
        """
        log_path = self.folder / "log.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        if lack := lack_of_space(self.folder):
            raise RuntimeError(f"the syncer was not started{lack}")
        with log_path.open("wb") as log:
            self._child = subprocess.Popen(tied(self._command), cwd=ROOT, stderr=log, env=self._environment)
        self.process = psutil.Process(self._child.pid)
        deadline = time.monotonic() + START_SECONDS
        while not self.address:
            for entry in self.log("syncer_ready"):
                self.address, self.page = entry["learners"], entry["page"]
            lack = lack_of_space(self.folder)  # its log would come to an end
            if lack or self._child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the syncer did not start{lack}; its log:\n{log_path.read_text()}")
            time.sleep(0.02)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        if self._temporary is not None:
            self._temporary.cleanup()

    def log(self, event: str) -> list[dict[str, Any]]:
        """The log lines of an event so far."""
        text = (self.folder / "log.jsonl").read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1].splitlines()
        entries = [json.loads(line) for line in whole if line.startswith("{")]
        return [entry for entry in entries if entry.get("event") == event]

    def cpu_seconds(self) -> float:
        """Processor time so far, user and system, all threads."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Resident memory now."""
        return int(self.process.memory_info().rss)

    def library_bytes(self) -> int:
        """Resident pages of files now: program and libraries, which the system can take back at any time."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("RssFile:")[1].split()[0])

    def peak_bytes(self) -> int:
        """Most resident memory since the start, or since `reset_peak`."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split("VmHWM:")[1].split()[0])

    def reset_peak(self) -> None:
        """The peak counts from now on."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def measured(self) -> Measurement:
        """Context manager: what its block takes, in `.usage` afterwards."""
        return Measurement(self)


class Measurement:
    """Takes wall time, processor time of both processes, and the syncer's peak memory of a block."""

    usage: Usage

    def __init__(self, syncer: SyncerProcess) -> None:
        self._syncer = syncer

    def __enter__(self) -> Self:
        self._syncer.reset_peak()
        self._before = (own_cpu_seconds(), self._syncer.cpu_seconds())
        self._started = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        wall = time.perf_counter() - self._started
        own, syncer = own_cpu_seconds() - self._before[0], self._syncer.cpu_seconds() - self._before[1]
        self.usage = Usage(wall, own, syncer, self._syncer.peak_bytes())


def own_cpu_seconds() -> float:
    """Processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
