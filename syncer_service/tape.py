"""The event tape: every event of the machine and the effects it gave, kept in files for replays.

The driver only puts them into a bounded queue. A thread of its own encodes and writes, twice a second. Nothing ever
waits for it: when the queue is full because the disk is, events are missed. Their number is logged and exported; the
file ends there, and once there is room a new one begins with the whole machine as it stands then. In the same way a
file that has grown to its share is followed by the next one. The oldest files are deleted first.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from decoupled_diloco.core.effects import Effect
from decoupled_diloco.core.events import Event
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.tape_file import (
    SUFFIX,
    Beginning,
    TapeHeader,
    TapeWriter,
    captured,
    captured_beginning,
    end_line,
    following,
    header_line,
    record_line,
    tape_files,
)

FOLDER: Final = "tape"
"""Where the files are, below the state directory."""

BYTES_MAX: Final = 512 * 1024**2
"""Bytes of all files of a run together, unless the settings say otherwise."""

FILES_SHARE: Final = 8
"""A file is followed by the next one when it has this part of those bytes."""

QUEUE_EVENTS_MAX: Final = 32768
"""Events that may wait for the disk; beyond that they are missed."""

WRITE_SECONDS: Final = 0.5
"""How often what waits is written."""

CAPTURE_SECONDS_MIN: Final = 10.0
"""Time between two captures of the machine; each takes some milliseconds of the event loop (benchmarks/tape.py)."""

CLOSE_SECONDS_MAX: Final = 10.0
"""How long an end waits for the disk."""

LINES_TEXT_MAX: Final = 256 * 1024
"""Characters that are compressed at once."""

_SEQUENCE: Final = re.compile(r"(\d+)-\d+" + re.escape(SUFFIX))

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TapeFigures:
    """What the tape says of itself; counts since the process began.

    Attributes:
        written_bytes: Bytes of files.
        missed_count: Events that are on no file.
        waiting_count: Entries that wait for the disk.
    """

    written_bytes: int = 0
    missed_count: int = 0
    waiting_count: int = 0


@dataclass(frozen=True, slots=True)
class _Capture:
    at: float
    content: bytes


_Entry = tuple[float, Event] | list[Effect] | Beginning | _Capture | None
"""An event; the effects of the event before; where a file begins; None: events were missed here."""


class _Lines:
    """Lines that will be compressed together."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._length = 0

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._length += len(line)

    @property
    def are_many(self) -> bool:
        return self._length >= LINES_TEXT_MAX

    def take(self) -> str:
        text = "".join(self._lines)
        self._lines, self._length = [], 0
        return text


class EventTape:
    """A tape that is being written (the driver's `Tape`). `event` and `effects` are for the driver's thread.

    Args:
        folder: Of the files; it is made.
        machine: The machine, which the driver's thread captures where a new file has to begin.
        header: Of the first file.
        clock: Instants.
        bytes_max: Most bytes of all files in the folder.
        queue_events_max: Most events that wait.
    """

    def __init__(
        self,
        folder: Path,
        machine: SyncerMachine,
        header: TapeHeader,
        clock: Clock,
        bytes_max: int = BYTES_MAX,
        queue_events_max: int = QUEUE_EVENTS_MAX,
    ) -> None:
        self._folder = folder
        self._machine = machine
        self._header = header
        self._clock = clock
        self._bytes_max = bytes_max
        self._file_bytes_max = bytes_max // FILES_SHARE
        self._entries_max = 2 * queue_events_max
        self._queue: deque[_Entry] = deque([header.beginning])
        self._is_recording = True
        self._captured_at = header.beginning.at
        self._missed_count = 0
        """Missed by the driver's thread."""
        self._lost_count = 0
        """Missed by the writing thread."""
        self._told_count = 0
        self._closed_bytes = 0
        self._is_capture_wanted = False
        self._writer: TapeWriter | None = None
        self._event: tuple[float, Event] | None = None
        """The newest one whose effects have not come."""
        self._is_stuck = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write_for_ever, name="tape", daemon=True)
        self._thread.start()

    def figures(self) -> TapeFigures:
        """What was written and what was missed; any thread may ask."""
        writer = self._writer
        size = self._closed_bytes + (writer.size_bytes if writer is not None else 0)
        return TapeFigures(size, self._missed_count + self._lost_count, len(self._queue))

    def close(self) -> None:
        """Writes what waits, as far as the disk takes it, and ends. Nobody may call `event` any more."""
        self._stopping.set()
        self._thread.join(CLOSE_SECONDS_MAX)
        if self._thread.is_alive():
            log.error("tape_not_ended", reason=f"the disk did not answer within {CLOSE_SECONDS_MAX:.0f} s")

    # ---- the driver's thread -----------------------------------------------------------------------------------------

    def event(self, now: float, event: Event) -> None:
        """The machine is about to handle an event."""
        if self._is_capture_wanted:
            self._capture(now)
        if not self._is_recording:
            self._missed_count += 1
        elif len(self._queue) >= self._entries_max:
            self._miss()
        else:
            self._queue.append((now, event))

    def effects(self, effects: list[Effect]) -> None:
        """What the newest event gave. Nobody changes the list afterwards."""
        if self._is_recording:
            self._queue.append(effects)

    def _capture(self, now: float) -> None:
        """Begins a new file with this very event."""
        self._is_capture_wanted = False
        self._captured_at = now
        try:
            content = captured(self._machine)
        except Exception as error:  # whatever it is: a tape that fails must not end the run
            log.error("tape_machine_not_captured", reason=f"{type(error).__name__}: {error}")
            return
        self._queue.append(_Capture(now, content))
        self._is_recording = True

    def _miss(self) -> None:
        self._missed_count += 1
        self._is_recording = False
        self._queue.append(None)

    # ---- the writing thread ------------------------------------------------------------------------------------------

    def _write_for_ever(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.wait(WRITE_SECONDS)
            self._write_waiting()
            self._want_capture_if_due()
        lines = _Lines()
        self._take_effects(None, lines)  # of an event whose handling raised
        self._put_text(lines.take())
        self._end("the syncer stopped")

    def _write_waiting(self) -> None:
        """Writes all that waits now, unless the disk does not take it."""
        lines = _Lines()
        for _ in range(len(self._queue)):
            entry = self._queue[0]
            if lines.are_many or not isinstance(entry, (tuple, list)):
                self._put_text(lines.take())
            if self._is_stuck and not self._try_again():
                return
            self._queue.popleft()
            if isinstance(entry, tuple):
                self._event = entry
            elif isinstance(entry, list):
                self._take_effects(entry, lines)
            else:
                self._turn(entry)
        self._put_text(lines.take())

    def _take_effects(self, effects: list[Effect] | None, lines: _Lines) -> None:
        """Adds the line of the newest event, now that it is known what came of it."""
        event, self._event = self._event, None
        if event is None:
            return
        if self._writer is None:
            self._lost_count += 1
            return
        try:
            lines.add(record_line(*event, effects))
        except (TypeError, ValueError) as error:
            self._lost_count += 1
            reason = f"{type(event[1]).__name__} could not be written down: {error}"
            log.error("tape_event_not_written", reason=reason)
            self._put_text(lines.take())
            self._end(reason)

    def _turn(self, entry: Beginning | _Capture | None) -> None:
        """Ends a file, and begins the next one."""
        if entry is None:
            self._end("events were missed: the disk did not keep up")
            return
        self._event = None
        if self._writer is not None:
            self._end("it has its share of bytes; the next file goes on")
        beginning = entry if isinstance(entry, Beginning) else captured_beginning(entry.at, entry.content)
        wall_time = self._clock.wall_time() - (self._clock.now() - beginning.at)
        missed = self._missed_count + self._lost_count
        header = following(self._header, beginning, wall_time, missed - self._told_count)
        try:
            self._writer = self._opened()
        except OSError as error:
            log.error("tape_not_written", folder=str(self._folder), reason=str(error))
            return
        if missed > self._told_count:
            log.warning("tape_missed_events", missed=missed - self._told_count, file=self._writer.path.name)
        self._told_count = missed
        self._put_text(header_line(header))

    def _opened(self) -> TapeWriter:
        """The next file; the oldest ones make room for it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        files = tape_files(self._folder)
        sizes = {path: path.stat().st_size for path in files}
        while files and sum(sizes.values()) > self._bytes_max - self._file_bytes_max:
            oldest = files.pop(0)
            oldest.unlink()
            del sizes[oldest]
        numbers = [int(match[1]) for path in sizes if (match := _SEQUENCE.fullmatch(path.name))]
        number = max(numbers, default=0) + 1
        return TapeWriter(self._folder / f"{number:06d}-{self._header.epoch}{SUFFIX}")

    def _put_text(self, text: str) -> None:
        if text and self._writer is not None:
            try:
                self._writer.add(text)
            except OSError as error:
                self._is_stuck = True
                log.error("tape_not_written", file=self._writer.path.name, reason=str(error))

    def _try_again(self) -> bool:
        """Whether the disk takes what it did not take before."""
        try:
            if self._writer is not None:
                self._writer.flush()
        except OSError:
            return False
        self._is_stuck = False
        log.info("tape_written_again")
        return True

    def _end(self, reason: str) -> None:
        """Closes the file, if there is one. What the disk does not take is lost; the file is readable without it."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            if not self._is_stuck:
                writer.add(end_line(reason))
            writer.close()
        except OSError as error:
            log.error("tape_not_ended", file=writer.path.name, reason=str(error))
        self._is_stuck = False
        self._closed_bytes += writer.size_bytes

    def _want_capture_if_due(self) -> None:
        """Asks the driver's thread for the machine, where a new file has to begin."""
        is_full = self._writer is not None and self._writer.size_bytes >= self._file_bytes_max
        if (is_full or self._writer is None) and self._clock.now() >= self._captured_at + CAPTURE_SECONDS_MIN:
            self._is_capture_wanted = True


def open_tape(
    state_dir: Path,
    machine: SyncerMachine,
    beginning: Beginning,
    *,
    epoch: int,
    software_version: str,
    clock: Clock,
    bytes_max: int = BYTES_MAX,
) -> EventTape | None:
    """Begins the tape of one start of the syncer; for `Driver.record`, before the driver runs.

        beginning = Beginning("new", clock.now(), initial_from_file=...)
        beginning = Beginning("restored", now, initial_from_file=..., state=restored.state, newer=tuple(restored.newer))
        tape = open_tape(settings.state_dir, machine, beginning, epoch=..., software_version=..., clock=clock,
                         bytes_max=settings.tape_bytes_max)

    Nothing that goes wrong with the disk is raised: it is logged, counted (`EventTape.figures`), and tried again.

    Args:
        state_dir: The run's state directory; the files are in its folder "tape".
        machine: The machine, as it stands before its first event.
        beginning: How it got there: built from exactly these values (`Beginning.machine` does the same in a replay),
            and restored at exactly this instant.
        epoch: Start count of the syncer.
        software_version: Of this release.
        clock: The driver's clock.
        bytes_max: Most bytes of all files together; 0: no tape.

    Returns:
        The tape, which has to be closed once the driver has ended; None if there shall be none.
    """
    if bytes_max == 0:
        return None
    wall_time = clock.wall_time() - (clock.now() - beginning.at)
    header = TapeHeader(software_version, epoch, wall_time, machine.policy, beginning)
    return EventTape(state_dir / FOLDER, machine, header, clock, bytes_max)
