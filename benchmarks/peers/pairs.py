"""Pairs of processes, one pair for each way, that make round trips when they are told to."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from benchmarks.peers.ways import ROOT, Way
from benchmarks.tied import tied

READY_SECONDS: Final = 120.0
"""An end that is not ready after this long has failed."""
TRIP_SECONDS: Final = 180.0
"""The same of a round trip."""


class PairError(Exception):
    """A way that does not work here."""


@dataclass(frozen=True, slots=True)
class Trip:
    """One round trip.

    Attributes:
        seconds: from the start until the near end had the values again.
        cpu_seconds: of both ends, user and system, all threads.
        peak_bytes: resident memory of both ends at their peaks so far.
        base_bytes: of that, what they held before anything was allocated: interpreter and libraries.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    base_bytes: int


class _End:
    """One process."""

    def __init__(self, way: Way, role: str, byte_count: int, address: str = "") -> None:
        command = [str(way.python), "-m", "benchmarks.peers.end", way.module, role, "--bytes", str(byte_count)]
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed in `close`)
        self.process = subprocess.Popen(
            tied([*command, *(["--address", address] if address else [])]),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._title = f"{way.name}, {role} end"
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def order(self) -> None:
        """Sends an order."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PairError(f"{self._title}: it has ended") from None

    def answer(self, seconds_max: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            PairError: there is none.
        """
        try:
            line = self._answers.get(timeout=seconds_max)
        except queue.Empty:
            raise PairError(f"{self._title}: no answer after {seconds_max:g} seconds") from None
        if not line:
            raise PairError(f"{self._title}: it has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> str:
        """The end of what it wrote to standard error, with a heading."""
        self._errors.seek(0)
        return f"--- {self._title} ---\n{self._errors.read()[-2000:]}"

    def close(self) -> None:
        """Ends the process: the end of its standard input first, then by force."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(timeout=10)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


class Pair:
    """Both ends of a way, ready. A context: its processes are there within it.

    Args:
        way: Which.
        byte_count: Of the payload.

    Raises:
        PairError: one of them did not become ready.
    """

    def __init__(self, way: Way, byte_count: int) -> None:
        self.way = way
        self._byte_count = byte_count
        self._ends: list[_End] = []

    def __enter__(self) -> Self:
        try:
            return self._begin()
        except BaseException:
            self._close()
            raise

    def _begin(self) -> Self:
        with self._explained():
            address = ""
            if self.way.has_far:
                self._far = self._started("far")
                address = self._far.answer(READY_SECONDS)["address"]
            self._near = self._started("near", address)
            self._near.answer(READY_SECONDS)
            if self.way.has_far:
                self._far.answer(READY_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Adds what both ends wrote to an error."""
        try:
            yield
        except PairError as error:
            words = "\n".join(end.last_words() for end in self._ends)
            raise PairError(f"{error}\n{words}") from None

    def _started(self, role: str, address: str = "") -> _End:
        end = _End(self.way, role, self._byte_count, address)
        self._ends.append(end)
        return end

    def _close(self) -> None:
        for end in reversed(self._ends):
            end.close()
        self._ends.clear()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ends that were started here."""
        return [end.process.pid for end in self._ends]

    def round_trip(self) -> Trip:
        """One round trip.

        Raises:
            PairError: it failed.
        """
        with self._explained():
            if self.way.has_far:
                self._far.order()
            self._near.order()
            near = self._near.answer(TRIP_SECONDS)
            far = near.get("far")
            if self.way.has_far:
                self._far.order()
                far = self._far.answer(TRIP_SECONDS)
        assert far is not None
        both = {key: near[key] + far[key] for key in ("cpu_seconds", "peak_bytes", "base_bytes")}
        return Trip(near["seconds"], **both)


def installed(way: Way, distribution: str) -> str:
    """Version of a distribution in a way's environment; "" if there is none."""
    program = f"from importlib.metadata import version; print(version({distribution!r}))"
    command = [str(way.python), "-c", program]
    done = subprocess.run(command, cwd=Path("/"), capture_output=True, text=True, check=False)
    return done.stdout.strip()
