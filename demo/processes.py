"""The demo's processes: started with a log file each, killed, suspended, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from demo.plan import Plan

STOP_SECONDS = 15.0


class DemoError(Exception):
    """The demo cannot go on; the text says why and where to look."""


@dataclass(slots=True)
class Addresses:
    """Free loopback addresses of the syncer."""

    data: str
    admin: str
    http: str

    @staticmethod
    def free() -> Addresses:
        """Picks three that nobody listens on now."""
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        texts = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
        for opened in sockets:
            opened.close()
        return Addresses(*texts)


@dataclass(slots=True)
class Processes:
    """All processes of one demo."""

    plan: Plan
    addresses: Addresses
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started_at: dict[str, float] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        """Compiled programs and tokenised text; kept between demos."""
        return self.plan.folder / "cache"

    def environment(self) -> dict[str, str]:
        """One thread per learner computes: many on a few cores only get in each other's way."""
        flags = os.environ.get("XLA_FLAGS", "")
        return os.environ | {
            "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
            "XLA_FLAGS": f"{flags} --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1".strip(),
            "OMP_NUM_THREADS": "1",
        }

    def start_syncer(self) -> None:
        """Starts the syncer and waits until it answers."""
        addresses, folder = self.addresses, self.plan.folder
        arguments = ["--listen", addresses.data, "--admin-listen", addresses.admin, "--http-listen", addresses.http]
        arguments += ["--output-dir", str(folder), "--state-dir", str(folder / "state"), "--no-exit-when-finished"]
        self._start("syncer", "syncer_service", arguments)

    def start_learner(self, name: str, *settings: str) -> None:
        """Starts one learner (again), with settings of its own."""
        own = ["--learner-id", name, "--peer-listen", "127.0.0.1:0"]
        self._start(name, "learner_service", [*own, *self._participant(), *settings])

    def start_evaluator(self) -> None:
        """Starts the evaluator."""
        arguments = ["--interval-steps", "1", "--assets-dir", str(self.plan.folder), *self._participant()]
        self._start("evaluator", "learner_service.evaluator", arguments)

    def _participant(self) -> list[str]:
        return ["--syncer", self.addresses.data, "--cache-dir", str(self.cache)]

    def _start(self, name: str, module: str, arguments: list[str]) -> None:
        log = (self.plan.folder / "logs" / f"{name}.log").open("ab")
        command = [sys.executable, "-m", module, "--run-file", str(self.plan.run_file), *arguments]
        self.running[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment()
        )
        self.started_at[name] = time.monotonic()
        log.close()

    def warm(self) -> None:
        """Tokenises the text and compiles everything, once, into the cache.

        Raises:
            DemoError: it failed.
        """
        command = [sys.executable, "-m", "learner_service", "warm", "--run-file", str(self.plan.run_file)]
        command += ["--cache-dir", str(self.cache)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment(), check=False)
        if done.returncode:
            raise DemoError(f"the warm-up failed:\n{done.stderr.strip()}")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to one process."""
        self.running[name].send_signal(number)

    def failed(self) -> str | None:
        """A process that ended by itself with an error, in words."""
        for name, process in self.running.items():
            code = process.poll()
            if code not in (None, 0, -signal.SIGKILL):
                tail = self._log_tail(name)
                return f"{name} ended with exit code {code}; the end of {self.log(name)}:\n{tail}"
        return None

    def log(self, name: str) -> Path:
        """A process's log file."""
        return self.plan.folder / "logs" / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-8:])

    def stop_all(self) -> None:
        """Asks all to stop, then makes them."""
        for process in self.running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.running.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.running.clear()
