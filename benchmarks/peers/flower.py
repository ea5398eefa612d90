"""Flower as deployed: a SuperLink and a SuperNode that run an app whose client sends back what the server sent.

All of its processes count: the two, the server app, and the client app that the SuperNode starts for every message.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.peers.loopback import LOOPBACK, WAIT_SECONDS, Line, Vector, accept, listen
from benchmarks.peers.usage import resident_bytes
from benchmarks.tied import tied

APP = Path(__file__).parent / "flower_app"
POLL_SECONDS = 0.05


class Tree:
    """Processes with all their descendants, also those that come and go while it watches."""

    def __init__(self, roots: list[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in roots]
        self._cpu: dict[int, float] = {}
        self._is_over = threading.Event()
        self.peak_bytes = 0
        self.base_bytes = 0
        self.resident()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            self.resident()

    def resident(self) -> int:
        """Resident memory of all of them now; takes note of what they have used."""
        resident = 0
        for root in self._roots:
            for process in [root, *root.children(recursive=True)]:
                try:
                    times = process.cpu_times()
                    resident += resident_bytes(process.pid)
                    self._cpu[process.pid] = times.user + times.system
                except (psutil.Error, OSError, IndexError):
                    continue  # it has ended meanwhile
        self.peak_bytes = max(self.peak_bytes, resident)
        return resident

    def cpu_seconds(self) -> float:
        """Processor time of all of them so far; what a process took after the last look at it is missing."""
        self.resident()
        return sum(self._cpu.values())

    def close(self) -> None:
        """Ends the processes."""
        self._is_over.set()
        for root in self._roots:
            for process in [*root.children(recursive=True), root]:
                process.kill()
        for root in self._roots:
            root.wait()


class Near:
    """Runs the app; the server end times itself."""

    def __init__(self, address: str, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-flower-")
        home = Path(self._folder.name)
        port, node_port = _free_ports(2)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "local"\n[superlink.local]\naddress = "{LOOPBACK}:{port}"\ninsecure = true\n'
        )
        programs = Path(sys.executable).parent
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        self._environment = os.environ | {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "PATH": path}
        self._environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        listener, line_address = listen()
        link = f"{LOOPBACK}:{port}"
        commands = (
            ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", str(port)],
            ["flower-supernode", "--insecure", "--superlink", link, "--port", str(node_port)],
        )
        self._processes = [self._start(programs, command) for command in commands]
        self._tree = Tree([process.pid for process in self._processes])
        try:
            self._submit(programs, f'address="{line_address}" count={count}')
            self._line = Line(accept(listener))
            self._line.hear()
            self._tree.base_bytes = self._tree.resident() - 4 * count  # the server app has its payload
        except BaseException:
            self._tree.close()
            raise
        self.measured: dict[str, Any] = {}

    def _start(self, programs: Path, command: list[str]) -> subprocess.Popen[bytes]:
        program, *arguments = command
        return subprocess.Popen(
            tied([str(programs / program), *arguments]), env=self._environment, stdin=subprocess.DEVNULL
        )

    def _submit(self, programs: Path, run_config: str) -> None:
        """Runs the app once the SuperLink takes it.

        Raises:
            RuntimeError: it does not.
        """
        command = [str(programs / "flwr"), "run", str(APP), "local", "--run-config", run_config]
        deadline = time.monotonic() + WAIT_SECONDS
        while subprocess.run(command, env=self._environment, check=False).returncode:
            if time.monotonic() > deadline:
                raise RuntimeError("the SuperLink does not take the app")
            time.sleep(POLL_SECONDS)

    def round_trip(self, payload: Vector) -> Vector:
        """One message there and its reply back; the payload is the app's own, of the same size."""
        before = self._tree.cpu_seconds()
        self._line.say("go")
        seconds, self._is_equal = self._line.hear()
        used = self._tree.cpu_seconds() - before
        nothing = {"cpu_seconds": 0.0, "peak_bytes": 0, "base_bytes": 0}
        usage = {"cpu_seconds": used, "peak_bytes": self._tree.peak_bytes, "base_bytes": self._tree.base_bytes}
        self.measured = {"seconds": seconds, **usage, "far": nothing}
        return np.empty(0, np.float32)

    def check(self, sent: Vector, got: Vector) -> bool:
        """Whether the server app got back what it had sent."""
        return bool(self._is_equal)

    def close(self) -> None:
        """Ends all processes."""
        self._tree.close()
        self._folder.cleanup()


def _free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    listeners = [listen() for _ in range(count)]
    ports = [int(address.rsplit(":", 1)[1]) for _, address in listeners]
    for listener, _ in listeners:
        listener.close()
    return ports
