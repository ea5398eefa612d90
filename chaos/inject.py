"""Does what the schedule says, and undoes it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from chaos.disk import Disk
from chaos.plan import ROGUE, Plan
from chaos.processes import Exit, Processes
from chaos.proxy import BOTH, FAIR, Conditions, Direction, Link
from chaos.schedule import Fault

AT_A_START: Final = {"join.after_answer", "recovery.after_fragment", "recovery.after_part"}
"""Failpoints that a process comes to only when it begins: it is killed first, and then again."""
POINT_SECONDS_MAX: Final = 12.0
"""A process that has not come to a failpoint after this long is let off."""


@dataclass(slots=True)
class Done:
    """A fault as it happened; instants of the machine's monotonic clock.

    Attributes:
        began_at: when it was done; for a failpoint: when the process died of it. None: it never came to it.
        ended_at: when it was undone, or the process was started again.
        note: what was different from the schedule.
    """

    fault: Fault
    began_at: float | None = None
    ended_at: float | None = None
    note: str = ""


@dataclass(slots=True)
class Injector:
    """The hands of a chaos run.

    Attributes:
        plan: the run.
        processes: what it is done to.
        links: every participant's way to the syncer, and its peers' way to it.
        disk: what the syncer's state lies on.
        lose_disk: takes the syncer's disk away and has it start elsewhere; returns what is to be said of it.
        say: tells people what is done.
    """

    plan: Plan
    processes: Processes
    links: Mapping[str, tuple[Link, ...]]
    disk: Disk
    lose_disk: Callable[[float], str]
    say: Callable[[str], None]
    done: list[Done] = field(default_factory=list)
    _conditions: dict[str, dict[int, Conditions]] = field(default_factory=dict)
    _dying: dict[str, Done] = field(default_factory=dict)
    _undo: list[tuple[float, Callable[[], None], Done]] = field(default_factory=list)

    # ---- the schedule ------------------------------------------------------------------------------------------------

    def begin(self, fault: Fault) -> None:
        """Does a fault."""
        done = Done(fault)
        self.done.append(done)
        if fault.victim != ROGUE and not self.processes.is_up(fault.victim):
            done.note = "its victim was down already"
        else:
            self._begin(done)
        self.say(f"{fault}" + (f"  ({done.note})" if done.note else ""))

    def turn(self) -> None:
        """Undoes what is due; sees to processes that were to die at a point."""
        now = time.monotonic()
        for ended in self.processes.look():
            self._ended(ended)
        for entry in [entry for entry in self._undo if entry[0] <= now]:
            self._undo.remove(entry)
            _, undo, done = entry
            undo()
            if done.began_at is not None:
                done.ended_at = time.monotonic()

    def undo_all(self) -> None:
        """Undoes everything at once."""
        self._undo = [(0.0, undo, done) for _, undo, done in self._undo]
        self.turn()
        for link in (link for links in self.links.values() for link in links):
            link.heal()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is waiting to be undone."""
        return not self._undo

    # ---- the kinds ---------------------------------------------------------------------------------------------------

    def _begin(self, done: Done) -> None:
        fault, victim = done.fault, done.fault.victim
        match fault.kind:
            case "kill-learner" | "kill-syncer":
                self._kill(done)
            case "kill-learner-at" | "kill-syncer-at":
                self._kill_at(done)
            case "suspend-learner" | "suspend-syncer":
                self.processes.signal(victim, signal.SIGSTOP)
                self._began(done, lambda: self.processes.signal(victim, signal.SIGCONT))
            case "reset":
                for link in self.links[victim]:
                    link.reset()
                self._began(done, lambda: None)
            case "duplicate" | "nan" | "huge":
                self._misbehave(done)
            case "disk-full":
                self.disk.fill()
                self._began(done, self.disk.empty)
            case "disk-lost":
                self.plan.mirror_flag.touch()
                self._undo.append((time.monotonic() + float(fault.choice), lambda: self._lose_disk(done), done))
            case "wrong-clock":
                self.processes.programs[victim].clock_off_seconds = float(fault.choice)
                self._kill(done)
            case _:
                self._degrade(done, conditions_of(fault))

    def _began(self, done: Done, undo: Callable[[], None]) -> None:
        done.began_at = time.monotonic()
        self._undo.append((done.began_at + done.fault.seconds, undo, done))

    def _kill(self, done: Done) -> None:
        done.began_at = time.monotonic()
        self.processes.kill(done.fault.victim, done.fault.seconds)
        self._undo.append((done.began_at + done.fault.seconds, lambda: None, done))

    def _kill_at(self, done: Done) -> None:
        victim, point = done.fault.victim, done.fault.choice
        if victim in self._dying:
            done.note = "it was to die at another point already"
            return
        flag = self.plan.flag(victim, point)
        flag.touch()
        if point in AT_A_START:
            self.processes.kill(victim, 0.2)
        self.processes.expect_death(victim)
        self._dying[victim] = done
        self._undo.append((time.monotonic() + POINT_SECONDS_MAX, lambda: self._let_off(done), done))

    def _ended(self, ended: Exit) -> None:
        done = self._dying.pop(ended.name, None)
        if done is None:
            return
        self.plan.flag(ended.name, done.fault.choice).unlink(missing_ok=True)
        self._undo = [entry for entry in self._undo if entry[2] is not done]
        done.began_at = ended.t
        self.processes.programs[ended.name].restart_at = ended.t + done.fault.seconds
        self._undo.append((ended.t + done.fault.seconds, lambda: None, done))
        self.say(f"{'':10}  {ended.name} died at {done.fault.choice}")

    def _let_off(self, done: Done) -> None:
        victim = done.fault.victim
        self._dying.pop(victim, None)
        self.plan.flag(victim, done.fault.choice).unlink(missing_ok=True)
        self.processes.pardon(victim)
        done.note = "the process did not come to this point"

    def _lose_disk(self, done: Done) -> None:
        """The disk that is lost, and the one elsewhere, is not full any more."""
        self.disk.empty()
        done.note = self.lose_disk(done.fault.seconds)
        self.plan.mirror_flag.unlink(missing_ok=True)
        self.say(f"{'':10}  {done.note}")
        self._began(done, lambda: None)

    def _misbehave(self, done: Done) -> None:
        if self.processes.is_up(ROGUE):
            done.note = "another one misbehaves already"
            return
        self.processes.start_rogue(done.fault.kind)
        self.processes.retire(ROGUE)
        self._began(done, lambda: self.processes.signal(ROGUE, signal.SIGTERM))

    def _degrade(self, done: Done, conditions: Conditions) -> None:
        victim, key = done.fault.victim, id(done)
        active = self._conditions.setdefault(victim, {})
        active[key] = conditions
        self._impose(victim)

        def heal() -> None:
            del active[key]
            self._impose(victim)

        self._began(done, heal)

    def _impose(self, victim: str) -> None:
        for link in self.links[victim]:
            link.impose(combined(self._conditions[victim].values()))


def conditions_of(fault: Fault) -> Conditions:
    """How a link behaves under a fault of the network."""
    match fault.kind:
        case "partition":
            return Conditions(held=BOTH, is_cut=True)
        case "deaf":
            return Conditions(held=frozenset({Direction(fault.choice)}))
        case "throttle":
            return Conditions(bytes_per_second=float(fault.choice))
        case "latency":
            return Conditions(latency_seconds=float(fault.choice))
        case "stall":
            return Conditions(held=BOTH)
        case "cut":
            return Conditions(break_after_bytes=int(fault.choice))
        case "corrupt":
            return Conditions(flip_every_bytes=int(fault.choice))
    raise ValueError(f"kind = {fault.kind!r}: nobody knows how to do that")


def combined(active: Iterable[Conditions]) -> Conditions:
    """A link under several faults at once: each of them holds."""
    conditions = [FAIR, *active]
    rates = [c.bytes_per_second for c in conditions if c.bytes_per_second]
    windows = [c.window_bytes for c in conditions if c.window_bytes]
    flips = [c.flip_every_bytes for c in conditions if c.flip_every_bytes]
    breaks = [c.break_after_bytes for c in conditions if c.break_after_bytes]
    return Conditions(
        latency_seconds=max(c.latency_seconds for c in conditions),
        bytes_per_second=min(rates, default=0.0),
        window_bytes=min(windows, default=0),
        held=frozenset().union(*(c.held for c in conditions)),
        is_cut=any(c.is_cut for c in conditions),
        flip_every_bytes=min(flips, default=0),
        break_after_bytes=min(breaks, default=0),
    )
