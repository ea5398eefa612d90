"""Drives a machine along a tape and compares what it decides with what was recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from decoupled_diloco.core.effects import Effect
from decoupled_diloco.core.plain import tagged
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.tape_file import TapeFile, TapeRecord, line_of

EVENTS_SHOWN: Final = 8
"""Events before a difference that are shown with it."""

Plain = dict[str, Any]
"""An event or effect as a tape has it, with its class under "type"."""

Watch = Callable[[TapeRecord, list[Effect]], None]
"""Gets every record that was replayed, with the effects of now."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event after which a replay goes another way.

    Attributes:
        number: Of the event in its file, from 1.
        record: The event, with the effects of then.
        now: The effects of now; None if the machine raised.
        fault: What it raised.
        before: The events before it, oldest first.
    """

    number: int
    record: TapeRecord
    now: list[Plain] | None
    fault: BaseException | None
    before: tuple[TapeRecord, ...]


@dataclass(slots=True)
class Replay:
    """What became of a replay.

    Attributes:
        machine: As it stands after the newest event.
        event_count: Events that were replayed.
        effect_count: Effects that they gave.
        first_at: Instant of the first event.
        newest_at: Instant of the newest event.
        is_stopped: Whether it was stopped before the end of the tape.
        difference: The first one, where the replay ends; None if all is as it was.
    """

    machine: SyncerMachine
    event_count: int = 0
    effect_count: int = 0
    first_at: float = 0.0
    newest_at: float = 0.0
    is_stopped: bool = False
    difference: Difference | None = None
    _before: deque[TapeRecord] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))

    def step(self, record: TapeRecord, *, compare: bool = True) -> list[Effect]:
        """Replays one event and compares; the effects of now."""
        self.event_count += 1
        self.first_at = self.first_at if self.event_count > 1 else record.at
        self.newest_at = record.at
        try:
            effects = self.machine.handle(record.event, record.at)
        except Exception as error:
            self.difference = Difference(self.event_count, record, None, error, tuple(self._before))
            return []
        self.effect_count += len(effects)
        if compare and record.effects is not None:
            now = [tagged(effect) for effect in effects]
            if line_of(now) != line_of(record.effects):  # as texts: -0.0 is not 0.0
                self.difference = Difference(self.event_count, record, now, None, tuple(self._before))
        self._before.append(record)
        return effects


def replay(tape: TapeFile, *, until: float | None = None, watch: Watch | None = None, compare: bool = True) -> Replay:
    """Replays a tape up to its end, an instant, or the first difference.

    Args:
        tape: The tape.
        until: The last instant whose events are replayed; all by default.
        watch: Told of every event.
        compare: Whether a difference ends the replay; without it only a fault does.

    Raises:
        TapeError: The tape holds what this release does not know.
    """
    result = Replay(tape.machine())
    for record in tape:
        if until is not None and record.at > until:
            result.is_stopped = True
            break
        effects = result.step(record, compare=compare)
        if watch is not None:
            watch(record, effects)
        if result.difference is not None:
            result.is_stopped = True
            break
    return result
