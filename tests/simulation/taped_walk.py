"""Random walks whose events and effects go to tapes, as the driver of a syncer does it; a tape for every machine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.clock import ManualClock
from simulator.walk import Walk
from syncer_service.tape import EventTape, open_tape
from syncer_service.tape_file import Beginning, tape_files


@dataclass(slots=True)
class Taped:
    """A machine on tape: what it was told and what it gave."""

    machine: SyncerMachine
    tape: EventTape
    events: list[tuple[float, ev.Event]] = field(default_factory=list)
    effects: list[fx.Effect] = field(default_factory=list)


class Recorder:
    """Stands between a walk and every machine that it makes."""

    def __init__(self, folder: Path) -> None:
        self.taped: list[Taped] = []
        self._folder = folder
        self._taped: dict[int, Taped] = {}
        self._restored: dict[int, Beginning] = {}
        self._machines: list[SyncerMachine] = []
        """All that were restored: one that is gone would lend its id to another one."""
        self._handle, self._restore = SyncerMachine.handle, SyncerMachine.restore

    def restore(
        self, machine: SyncerMachine, state: RunState, newer: Iterable[fx.CommitRound], now: float
    ) -> list[fx.Effect]:
        commits = tuple(newer)
        self._machines.append(machine)
        self._restored[id(machine)] = Beginning("restored", now, state=state, newer=commits)
        return self._restore(machine, state, commits, now)

    def handle(self, machine: SyncerMachine, event: ev.Event, now: float) -> list[fx.Effect]:
        taped = self._taped.get(id(machine)) or self._begin(machine, now)
        taped.tape.event(now, event)
        effects = self._handle(machine, event, now)
        taped.tape.effects(effects)
        taped.events.append((now, event))
        taped.effects += effects
        return effects

    def _begin(self, machine: SyncerMachine, now: float) -> Taped:
        beginning = self._restored.get(id(machine), Beginning("new", now))
        epoch, clock = len(self.taped) + 1, ManualClock(now)
        tape = open_tape(self._folder, machine, beginning, epoch=epoch, software_version="1.2", clock=clock)
        assert tape is not None
        self.taped.append(Taped(machine, tape))
        self._taped[id(machine)] = self.taped[-1]
        return self.taped[-1]

    def close(self) -> None:
        for taped in self.taped:
            taped.tape.close()


def walk_on_tape(seed: int, folder: Path, seconds: float = 30.0) -> list[Taped]:
    """A walk of which the folder holds the tapes."""
    recorder = Recorder(folder)
    with (
        mock.patch.object(SyncerMachine, "handle", lambda *arguments: recorder.handle(*arguments)),
        mock.patch.object(SyncerMachine, "restore", lambda *arguments: recorder.restore(*arguments)),
    ):
        Walk(seed).run(seconds)
    recorder.close()
    return recorder.taped


def busy_walk_on_tape(folder: Path, seconds: float = 30.0) -> tuple[Path, Taped]:
    """The first tape of the first walk whose first machine lives for long and commits a few rounds."""
    for seed in range(100, 140):
        first = walk_on_tape(seed, folder / str(seed), seconds)[0]
        commits = sum(isinstance(event, ev.CommitFinished) for _, event in first.events)
        if commits >= 5 and len(first.events) >= 1000:
            return files_of(folder / str(seed))[0], first
    raise AssertionError("no walk commits")


def files_of(folder: Path) -> list[Path]:
    """The tapes in the order in which their machines began; their threads number them as they come to it."""
    return sorted(tape_files(folder / "tape"), key=lambda path: int(path.stem.split("-")[1]))
