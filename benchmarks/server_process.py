"""A server of a benchmark in a process of its own, so that both ends are measured apart.

The module that it runs prints one line, the port on the loopback that it listens on, and serves until it is killed.
"""

from __future__ import annotations

import subprocess
import sys
from types import TracebackType
from typing import Self

import psutil

from benchmarks.syncer_rig import ROOT
from benchmarks.tied import tied


class ServerProcess:
    """A running server, as a context.

    Args:
        module: run as `python -m`.
        arguments: of its command line.

    Attributes:
        port: where it listens.
    """

    port: int

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]

    def __enter__(self) -> Self:
        self._child = subprocess.Popen(
            tied(self._command), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._process = psutil.Process(self._child.pid)
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line.strip().isdigit():
            self._end()
            raise RuntimeError(f"{' '.join(self._command)} did not start; it said {line!r}")
        self.port = int(line)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        with self._child:
            self._child.kill()

    def cpu_seconds(self) -> float:
        """Processor time so far, user and system, all threads."""
        times = self._process.cpu_times()
        return float(times.user + times.system)
