"""Random walks whose events and effects go to a tape, as the driver of a syncer does it."""

from __future__ import annotations

from pathlib import Path

from decoupled_diloco.core import events as ev
from decoupled_diloco.runtime.clock import ManualClock
from syncer_service.tape import EventTape, open_tape
from syncer_service.tape_file import Beginning, tape_files
from tests.simulation.random_walk import Walk
from tests.simulation.watched_world import WatchedWorld


def taped(world: WatchedWorld, tape: EventTape, clock: ManualClock) -> None:
    """Connects a world's machine to a tape."""
    handle = world._handle

    def handle_taped(event: ev.Event) -> None:
        clock.advance_to(world.now)
        tape.event(world.now, event)
        before = len(world.effects)
        handle(event)
        tape.effects([effect for _, effect in world.effects[before:]])

    world._handle = handle_taped  # type: ignore[method-assign]


def walk_on_tape(seed: int, folder: Path, seconds: float = 30.0) -> Walk:
    """A walk of which the folder holds the tape."""
    walk, clock = Walk(seed), ManualClock()
    beginning = Beginning("new", 0.0)
    machine = walk.world.syncer
    tape = open_tape(folder, machine, beginning, epoch=3, software_version="1.2", clock=clock)
    assert tape is not None
    taped(walk.world, tape, clock)
    walk.run(seconds)
    tape.close()
    walk.figures = tape.figures()  # type: ignore[attr-defined]
    return walk


def files_of(folder: Path) -> list[Path]:
    return tape_files(folder / "tape")
