"""Random walks whose events and effects go to a tape, as the driver of a syncer does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.clock import ManualClock
from syncer_service.tape import TapeFigures, open_tape
from syncer_service.tape_file import Beginning, tape_files
from tests.simulation.random_walk import Walk


@dataclass(frozen=True, slots=True)
class TapedWalk:
    """What is on the tape, and the machine that it was taken of, at its end."""

    machine: SyncerMachine
    events: list[tuple[float, ev.Event]]
    effects: list[fx.Effect]
    figures: TapeFigures


def walk_on_tape(seed: int, folder: Path, seconds: float = 30.0) -> TapedWalk:
    """A walk of which the folder holds the tape."""
    world = Walk(seed).run(seconds)
    machine, clock = SyncerMachine(world.policy), ManualClock()
    beginning = Beginning("new", 0.0)
    tape = open_tape(folder, machine, beginning, epoch=3, software_version="1.2", clock=clock)
    assert tape is not None
    effects: list[fx.Effect] = []
    for now, event in world.tape:
        tape.event(now, event)
        given = machine.handle(event, now)
        tape.effects(given)
        effects += given
    tape.close()
    return TapedWalk(machine, world.tape, effects, tape.figures())


def files_of(folder: Path) -> list[Path]:
    return tape_files(folder / "tape")
