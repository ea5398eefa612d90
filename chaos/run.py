"""One chaos run from the start of its processes to its verdict."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from chaos.checker import Violation, check
from chaos.disk import Disk
from chaos.evidence import Evidence, read_journals
from chaos.inject import Injector
from chaos.ledger_file import read_ledger
from chaos.mirror_lag import compare_loss, mirror_lag, mirrored_count
from chaos.plan import ROGUE, Plan
from chaos.processes import PARDON_SECONDS, Exit, Processes, free_ports
from chaos.proxy import Proxy
from chaos.schedule import SYNCER
from chaos.watch import Sample, Watch
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.run_file import resolve_run
from syncer_service.tape import FOLDER as TAPE_FOLDER
from syncerctl.admin_client import AdminClient
from syncerctl.settings import ConnectionSettings

HOST: Final = "127.0.0.1"
TURN_SECONDS: Final = 0.05
"""Between two looks at what is to be done."""
START_SECONDS_MAX: Final = 120.0
"""For all learners to be in the rounds; the first of all runs compiles."""
HEAL_SECONDS_MAX: Final = 60.0
"""After the last fault was undone: until every fragment was published again, with every learner merged again."""
END_SECONDS_MAX: Final = 60.0
"""For all processes to end after the run was told to finish."""


class ChaosError(Exception):
    """The run could not be made; the text says why and where to look."""


@dataclass(slots=True)
class Outcome:
    """What one run has come to."""

    plan: Plan
    injector: Injector
    samples: list[Sample]
    violations: list[Violation]
    evidence: Evidence
    began_at: float
    ended_at: float
    heal_seconds: float | None = None
    notes: list[str] = field(default_factory=list)


class Run:
    """The run of a plan. Used once.

    Args:
        plan: what is to be done.
        say: tells people how it goes.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._violations: list[Violation] = []
        self._heal_seconds: float | None = None
        self._lost_states: list[Path] = []
        self._notes: list[str] = []

    def make(self) -> Outcome:
        """Starts everything, does the schedule, lets the run heal, ends it, and judges it.

        Raises:
            ChaosError: the run did not come to stand before the first fault.
        """
        plan = self._plan
        shutil.rmtree(plan.folder, ignore_errors=True)
        plan.write()
        self._policy = resolve_run(RunConfig, run_file=plan.run_file).value.to_policy()
        began_at = time.monotonic()
        with ExitStack() as stack:
            disk = stack.enter_context(Disk(plan.disk, plan.full_flag))
            proxy = stack.enter_context(Proxy())
            ports = free_ports(3 + len(plan.learners))
            to_syncer = {name: proxy.link((HOST, ports[0])) for name in (*plan.learners, ROGUE)}
            to_peer = {name: proxy.link((HOST, port)) for name, port in zip(plan.learners, ports[3:], strict=True)}
            self._links = {name: (link, *filter(None, [to_peer.get(name)])) for name, link in to_syncer.items()}
            self._processes = Processes(
                plan,
                (ports[0], ports[1], ports[2]),
                {name: link.address for name, link in to_syncer.items()},
                {name: (f"{HOST}:{link.target[1]}", link.address) for name, link in to_peer.items()},
            )
            stack.callback(self._processes.stop_all)
            self._watch = stack.enter_context(Watch(self._admin_address))
            self._injector = Injector(plan, self._processes, self._links, disk, self._lose_disk, self._say)
            self._stand()
            self._do_faults()
            self._heal()
            self._finish()
            kept = shutil.copytree(plan.state_dir, plan.folder / "state", dirs_exist_ok=True)
        ended_at = time.monotonic()
        evidence = Evidence(
            read_journals(sorted((plan.folder / "journals").glob("*.jsonl"))),
            read_ledger([*self._lost_states, kept], self._policy),
            self._disturbed(),
        )
        judged_here = (*self._violations, *self._unexpected_exits(), *self._faults_in_logs())
        replayed = [text for folder in [*self._lost_states, kept] for text in _replayed(folder / TAPE_FOLDER)]
        violations = [*judged_here, *replayed, *check(evidence)]
        return Outcome(
            plan,
            self._injector,
            self._watch.samples,
            violations,
            evidence,
            began_at,
            ended_at,
            self._heal_seconds,
            self._notes,
        )

    # ---- phases ------------------------------------------------------------------------------------------------------

    def _stand(self) -> None:
        """All processes are there, and every learner is in the rounds."""
        self._processes.start_syncer()
        for name in self._plan.learners:
            self._processes.start_learner(name)

        def stands() -> bool:
            sample = self._watch.newest
            return sample is not None and all(
                name in sample.learners and sample.learners[name].merged_count > 0 for name in self._plan.learners
            )

        if not self._wait(stands, START_SECONDS_MAX):
            raise ChaosError(f"the run does not come to stand; see {self._plan.folder / 'logs'}")
        if self._processes.exits:
            ended = self._processes.exits[0]
            raise ChaosError(f"{ended.name} ended with exit code {ended.code}; see {self._plan.log(ended.name)}")

    def _do_faults(self) -> None:
        began = time.monotonic()
        for fault in self._plan.faults:
            self._pass_time(began + fault.at_seconds)
            self._injector.begin(fault)
        self._pass_time(began + self._plan.seconds)
        self._wait(lambda: self._injector.is_idle, HEAL_SECONDS_MAX)
        self._injector.undo_all()

    def _heal(self) -> None:
        """Every fragment is published again, with contributions of every learner."""
        began = time.monotonic()

        def baseline() -> Sample | None:
            return next((sample for sample in self._watch.samples if sample.t >= began), None)

        def is_healed() -> bool:
            first, newest = baseline(), self._watch.newest
            if first is None or newest is None:
                return False
            is_published = all(after > before for before, after in zip(first.versions, newest.versions, strict=True))
            return is_published and all(_merged_since(first, newest, name) for name in self._plan.learners)

        if self._wait(is_healed, HEAL_SECONDS_MAX):
            self._heal_seconds = round(time.monotonic() - began, 2)
            return
        newest = self._watch.newest
        seen = f"versions {newest.versions}, learners {newest.learners}" if newest else "nothing answers"
        text = f"{HEAL_SECONDS_MAX:.0f} s after the last fault not every fragment and learner is back: {seen}"
        self._violations.append(Violation("heals", text))

    def _finish(self) -> None:
        """The run ends in good order, with every process."""
        names = (SYNCER, *self._plan.learners)
        self._processes.retire(*names)
        try:
            with AdminClient(ConnectionSettings(address=self._admin_address())) as admin:
                admin.finish("the chaos run is over")
        except (UnreachableError, PeerError) as error:
            self._violations.append(Violation("ends in order", f"the syncer could not be told to finish: {error}"))
            return
        if not self._wait(lambda: not any(self._processes.is_up(name) for name in names), END_SECONDS_MAX):
            left = [name for name in names if self._processes.is_up(name)]
            self._violations.append(
                Violation(
                    "ends in order", f"{END_SECONDS_MAX:.0f} s after the run was told to finish, {left} still run"
                )
            )

    def _pass_time(self, until: float) -> None:
        self._wait(lambda: time.monotonic() >= until, self._plan.seconds)

    def _wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Turns until a condition holds or the time is over; returns whether it holds."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                return False
            self._injector.turn()
            time.sleep(TURN_SECONDS)
        return True

    def _admin_address(self) -> str:
        return f"{HOST}:{self._processes.syncer_ports[1]}"

    def _lose_disk(self, down_seconds: float) -> str:
        """Kills the syncer, takes its disk, and has it start at other ports from the mirror; returns what was lost."""
        plan, processes = self._plan, self._processes
        shown = mirror_lag(processes.syncer_ports[2])
        processes.kill(SYNCER, down_seconds)
        lost = plan.lost_state(len(self._lost_states) + 1)
        shutil.copytree(plan.state_dir, lost)
        shutil.rmtree(plan.state_dir)
        self._lost_states.append(lost)
        processes.restores_from_mirror = True
        data, admin, http = free_ports(3)
        processes.syncer_ports = (data, admin, http)
        for link in (self._links[name][0] for name in (*plan.learners, ROGUE)):
            link.target = (HOST, data)
        ledger = read_ledger([lost], self._policy)
        text, is_kept = compare_loss(ledger, mirrored_count(plan.mirror), shown)
        self._notes.append(text)
        if not is_kept:
            self._violations.append(Violation("loss within the lag", text))
        return text

    # ---- what is judged besides the evidence -------------------------------------------------------------------------

    def _faults_in_logs(self) -> list[Violation]:
        """What a process itself calls a fault of the program: an exception in its log."""
        return [
            Violation("no faults logged", f"{name}: {line[:300]}")
            for name in (SYNCER, *self._plan.learners)
            for line in self._plan.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
            if '"exception":' in line or line.startswith("Traceback")
        ]

    def _unexpected_exits(self) -> list[Violation]:
        """Processes that ended by themselves, other than well."""
        return [
            Violation("processes live", f"{ended.name} ended with exit code {ended.code}; see its log")
            for ended in self._processes.exits
            if not ended.was_meant and ended.code != 0 and ended.name != ROGUE and not self._had_no_disk(ended)
        ]

    def _had_no_disk(self, ended: Exit) -> bool:
        """Whether it is the syncer, and could not start because its disk took nothing."""
        return ended.name == SYNCER and any(
            done.fault.kind == "disk-full"
            and done.began_at is not None
            and done.began_at <= ended.t <= (done.ended_at or float("inf")) + PARDON_SECONDS
            for done in self._injector.done
        )

    def _disturbed(self) -> tuple[tuple[str, float, float], ...]:
        """When processes were suspended."""
        return tuple(
            (done.fault.victim, done.began_at, done.ended_at or float("inf"))
            for done in self._injector.done
            if done.fault.kind.startswith("suspend") and done.began_at is not None
        )


def _replayed(tapes: Path) -> list[Violation]:
    """The tapes of all starts of the syncer, driven through a fresh machine: it must decide the same."""
    command = [sys.executable, "-m", "syncer_service.replay", str(tapes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    said = "; ".join((done.stdout + done.stderr).strip().splitlines()[-6:])
    return [Violation("tape replays", f"replay ended with exit code {done.returncode}: {said}")]


def _merged_since(first: Sample, newest: Sample, learner: str) -> bool:
    before, after = first.learners.get(learner), newest.learners.get(learner)
    return after is not None and after.merged_count > (before.merged_count if before is not None else 0)
