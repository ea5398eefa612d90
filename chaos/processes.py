"""The processes of a chaos run: started, killed, suspended, started again by a supervisor, never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from chaos.ledger_file import holds_run
from chaos.plan import ROGUE, STEP_SECONDS, Plan
from chaos.schedule import LEARNER_POINTS, SYNCER, SYNCER_POINTS
from decoupled_diloco.runtime import failpoints

STOP_SECONDS: Final = 15.0
PARDON_SECONDS: Final = 0.5
"""A process that ended without being asked to is started again after this long, as a service would be."""
CHECKPOINT_INTERVAL_STEPS: Final = 30
"""Often enough for a process that is to die in the middle of a checkpoint."""
NEVER: Final = float("inf")


@dataclass(slots=True)
class Program:
    """One process that is kept running.

    Attributes:
        arguments: after the interpreter's `-m`; the module first.
        environment: on top of this process's own.
        clock_off_seconds: how far its wall clock is off.
        restart_at: when the supervisor starts it again, while it is down.
        is_wanted: whether it shall run at all.
    """

    arguments: list[str]
    environment: dict[str, str]
    clock_off_seconds: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restart_at: float = NEVER
    is_wanted: bool = True

    @property
    def is_up(self) -> bool:
        """Whether it runs (or is suspended)."""
        return self.process is not None and self.process.poll() is None


@dataclass(slots=True)
class Exit:
    """A process has ended; `was_meant` if the chaos run had killed it."""

    t: float
    name: str
    code: int
    was_meant: bool


@dataclass(slots=True)
class Processes:
    """All processes of one run.

    Attributes:
        plan: the run.
        syncer_ports: data, admin, HTTP.
        learner_syncer: the address at which each participant reaches the syncer: its own link of the proxy.
        peers: by learner: where it serves its peers, and the address that they are told, a link as well.
        restores_from_mirror: the syncer's disk was lost, and its first start elsewhere has not gone on from the mirror.
    """

    plan: Plan
    syncer_ports: tuple[int, int, int]
    learner_syncer: Mapping[str, str]
    peers: Mapping[str, tuple[str, str]]
    restores_from_mirror: bool = False
    programs: dict[str, Program] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)
    _meant: set[str] = field(default_factory=set)
    _untold: list[Exit] = field(default_factory=list)
    """Exits that no look has shown yet."""

    # ---- what runs ---------------------------------------------------------------------------------------------------

    def start_syncer(self) -> None:
        """Starts the syncer."""
        rules = [self._kill_rule(SYNCER, point) for point in SYNCER_POINTS]
        rules.append(f"commit.before_payload_sync=enospc@{self.plan.full_flag.absolute()}")
        rules.append(f"mirror.before_manifest=enospc@{self.plan.mirror_flag.absolute()}")
        self._start(SYNCER, Program(self._syncer_arguments(), {failpoints.VARIABLE: ",".join(rules)}))

    def _syncer_arguments(self) -> list[str]:
        """As of now: its ports may have changed, and it may have to go on from the mirror."""
        data, admin, http = (f"127.0.0.1:{port}" for port in self.syncer_ports)
        plan = self.plan
        arguments = ["syncer_service", "--run-file", str(plan.run_file), "--listen", data, "--admin-listen", admin]
        arguments += ["--http-listen", http, "--state-dir", str(plan.state_dir), "--mirror-url", str(plan.mirror)]
        arguments += ["--output-dir", str(plan.folder / "output")]
        arguments += ["--checkpoint-interval-steps", str(CHECKPOINT_INTERVAL_STEPS)]
        if self.restores_from_mirror and not holds_run(plan.state_dir):
            arguments += ["--restore-from", str(plan.mirror)]
        return arguments

    def start_learner(self, name: str) -> None:
        """Starts a learner, with nothing but its id."""
        arguments = ["learner_service", "--run-file", str(self.plan.run_file), "--learner-id", name]
        arguments += ["--syncer", self.learner_syncer[name], "--cache-dir", str(self.plan.folder.parent / "cache")]
        arguments += ["--journal", str(self.plan.journal(name)), "--step-seconds-min", str(STEP_SECONDS)]
        listen, advertise = self.peers[name]
        arguments += ["--peer-listen", listen, "--peer-advertise", advertise, "--peer-recovery-seconds", "5"]
        arguments += ["--verify-applied", "--drain-seconds", "10"]
        rules = [self._kill_rule(name, point) for point in LEARNER_POINTS]
        self._start(name, Program(arguments, {failpoints.VARIABLE: ",".join(rules)}))

    def start_rogue(self, mode: str) -> None:
        """Starts the participant that misbehaves; it is not started again by itself."""
        arguments = ["chaos.rogue", mode, "--run-file", str(self.plan.run_file), "--learner-id", ROGUE]
        arguments += ["--syncer", self.learner_syncer[ROGUE], "--journal", str(self.plan.journal(ROGUE))]
        self._start(ROGUE, Program(arguments, {}))

    def _kill_rule(self, name: str, point: str) -> str:
        return f"{point}=kill@{self.plan.flag(name, point).absolute()}"

    def _start(self, name: str, program: Program) -> None:
        self.programs[name] = program
        self._launch(name)

    def _launch(self, name: str) -> None:
        program = self.programs[name]
        if name == SYNCER:
            program.arguments = self._syncer_arguments()
        command = [sys.executable, "-m"]
        if program.clock_off_seconds:
            command += ["chaos.wrong_clock", str(program.clock_off_seconds)]
        flags = os.environ.get("XLA_FLAGS", "")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1".strip(),
            "OMP_NUM_THREADS": "1",
            **program.environment,
        }
        with self.plan.log(name).open("ab") as log:
            program.process = subprocess.Popen(
                [*command, *program.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        program.started_at, program.restart_at = time.monotonic(), NEVER

    # ---- what is done to it ------------------------------------------------------------------------------------------

    def is_up(self, name: str) -> bool:
        """Whether a process runs."""
        return name in self.programs and self.programs[name].is_up

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal, if the process is there."""
        program = self.programs.get(name)
        if program is not None and program.is_up:
            assert program.process is not None
            program.process.send_signal(number)

    def kill(self, name: str, down_seconds: float) -> None:
        """SIGKILL, if it is up; the supervisor starts it again after so long."""
        program = self.programs[name]
        if program.process is not None:
            self.expect_death(name)
            self.signal(name, signal.SIGKILL)
            program.process.wait()
            self._reap()
        program.restart_at = time.monotonic() + down_seconds

    def expect_death(self, name: str) -> None:
        """The next end of this process is meant."""
        self._meant.add(name)

    def pardon(self, name: str) -> None:
        """It is not to die after all."""
        self._meant.discard(name)

    def look(self) -> list[Exit]:
        """What has ended since the last look; starts again whatever is due."""
        self._reap()
        news, self._untold = self._untold, []
        return news

    def _reap(self) -> None:
        """Takes down what has ended, for the next look."""
        now = time.monotonic()
        for name, program in self.programs.items():
            if program.process is not None and (code := program.process.poll()) is not None:
                was_meant = name in self._meant
                self._meant.discard(name)
                program.process = None
                self._untold.append(Exit(now, name, code, was_meant))
                self.exits.append(self._untold[-1])
                if program.is_wanted:
                    program.restart_at = now + PARDON_SECONDS
            if program.process is None and now >= program.restart_at:
                self._launch(name)

    def retire(self, *names: str) -> None:
        """From now on these processes are let end."""
        for name in names:
            if name in self.programs:
                self.programs[name].is_wanted = False
                self.programs[name].restart_at = NEVER

    def stop_all(self) -> None:
        """Asks all to stop, then makes them."""
        self.retire(*self.programs)
        running = [program.process for program in self.programs.values() if program.process is not None]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> tuple[int, ...]:
    """Ports of the loopback interface that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = tuple(opened.getsockname()[1] for opened in sockets)
    for opened in sockets:
        opened.close()
    return ports
