"""Files of the event tape: what the syncer's machine was told, when, and what it decided.

A file is standalone: it says where the machine began and then has every event of it, without a gap. It holds JSON
lines, in gzip (`zcat` reads it) or as plain text:

    {"format": 1, "software_version": ..., "policy": {...}, "beginning": {"began": "new", ...}, ...}    `TapeHeader`
    {"t": 17.25, "event": {"type": "ProgressReported", ...}, "effects": [{"type": "Note", ...}, ...]}   any number
    {"end": "the syncer stopped"}                                                                       if it was ended

`effects` is null where the machine never came back with any: it raised, or the process was killed. The gzip stream is
flushed with every write, so a file that was cut off is readable up to the last flush.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from decoupled_diloco.core.effects import CommitRound, Effect
from decoupled_diloco.core.events import Event
from decoupled_diloco.core.plain import PlainError, from_plain, from_tagged, tagged, to_plain
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine

FORMAT: Final = 1
"""Counts the changes of the layout above."""

SUFFIX: Final = ".tape"

MEMBER_BYTES: Final = 8 * 1024**2
"""Text in one gzip member; a checksum stands at the end of each."""

_GZIP: Final = 16 + zlib.MAX_WBITS
_GZIP_MAGIC: Final = b"\x1f\x8b"
_READ_BYTES: Final = 16 * 1024

_CAPTURED_MODULES: Final = "decoupled_diloco.core."
_CAPTURED_BUILTINS: Final = frozenset({("collections", "deque"), ("builtins", "set"), ("builtins", "frozenset")})


class TapeError(ValueError):
    """A file is no tape, or one that cannot be replayed; the message says why."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a machine stood before the first event of a file.

    Attributes:
        began: "new" (a run's first start), "restored" (from durable state), or "captured" in the middle of a process.
        at: The instant at which it was restored or captured.
        initial_from_file: As given to the machine.
        fragment_shares: As given to the machine.
        state: What it was restored from.
        newer: Committed rounds that were booked on top of the state.
        captured: The whole machine in memory (pickle in base64); only the release that wrote it can surely read it.
    """

    began: Literal["new", "restored", "captured"]
    at: float
    initial_from_file: bool = False
    fragment_shares: tuple[float, ...] | None = None
    state: RunState | None = None
    newer: tuple[CommitRound, ...] = ()
    captured: str = ""

    def machine(self, policy: Policy) -> SyncerMachine:
        """Builds the machine anew.

        Raises:
            TapeError: It was captured by a release whose machine is another one.
        """
        if self.began == "captured":
            return _released(base64.b64decode(self.captured))
        machine = SyncerMachine(policy, self.fragment_shares, initial_from_file=self.initial_from_file)
        if self.state is not None:
            machine.restore(self.state, self.newer, self.at)
        return machine


@dataclass(frozen=True, slots=True)
class TapeHeader:
    """The first line of a file.

    Attributes:
        software_version: Release of the syncer that wrote it.
        epoch: Start count of that syncer.
        wall_time: Seconds since 1970 UTC at `beginning.at`, for display.
        policy: The run's policy.
        beginning: Where the machine began.
        missed_count: Events between the file before and this one that are on no tape.
        format: Layout of the file.
    """

    software_version: str
    epoch: int
    wall_time: float
    policy: Policy
    beginning: Beginning
    missed_count: int = 0
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class TapeRecord:
    """One event, and the effects that it gave as plain values (None: see above)."""

    at: float
    event: Event
    effects: list[dict[str, Any]] | None


# ---- capturing a machine ---------------------------------------------------------------------------------------------


def captured(machine: SyncerMachine) -> bytes:
    """The whole machine in memory, for `Beginning.captured` (not yet in base64)."""
    return pickle.dumps(machine, pickle.HIGHEST_PROTOCOL)


class _CoreUnpickler(pickle.Unpickler):
    """Makes nothing but values of the core, so that a tape from anywhere can be opened."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CAPTURED_BUILTINS:
            return super().find_class(module, name)
        found = super().find_class(module, name) if module.startswith(_CAPTURED_MODULES) and "." not in name else None
        if not isinstance(found, type) or found.__module__ != module:
            raise TapeError(f"the tape's captured machine holds {module}.{name}, which is no class of the core")
        return found


def _released(content: bytes) -> SyncerMachine:
    try:
        machine = _CoreUnpickler(io.BytesIO(content)).load()
    except TapeError:
        raise
    except Exception as error:
        raise TapeError(f"the tape's captured machine cannot be read by this release: {error}") from error
    if not isinstance(machine, SyncerMachine):
        raise TapeError(f"the tape's captured machine is a {type(machine).__name__}")
    return machine


# ---- writing ---------------------------------------------------------------------------------------------------------


def line_of(value: Any) -> str:
    """A plain value as one line; numbers come back with the same bits."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False) + "\n"


def record_line(at: float, event: Event, effects: list[Effect] | None) -> str:
    """The line of one event.

    Raises:
        TypeError: It holds something that the core does not speak in.
    """
    plain = None if effects is None else [tagged(effect) for effect in effects]
    return line_of({"t": at, "event": tagged(event), "effects": plain})


def header_line(header: TapeHeader) -> str:
    """The line of a header."""
    return line_of(to_plain(header))


def end_line(reason: str) -> str:
    """The last line."""
    return line_of({"end": reason})


class TapeWriter:
    """Writes the lines of one new file. What could not be written (a full disk) is kept and tried again.

    Raises:
        OSError: The file cannot be made, or exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = 0
        """With what is yet to be written."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._pending = b""
        self._compressor = zlib.compressobj(wbits=_GZIP)
        self._member_bytes = 0

    def add(self, text: str) -> None:
        """Compresses whole lines and writes them.

        Raises:
            OSError: The disk does not take them now; `flush` tries again. Nothing is lost, and nothing must be added
                meanwhile.
        """
        content = text.encode()
        compressed = self._compressor.compress(content)
        self._member_bytes += len(content)
        if self._member_bytes >= MEMBER_BYTES:
            compressed += self._next_member()
        else:
            compressed += self._compressor.flush(zlib.Z_SYNC_FLUSH)
        self._pending += compressed
        self.size_bytes += len(compressed)
        self.flush()

    def flush(self) -> None:
        """Writes what is pending.

        Raises:
            OSError: As `add` does.
        """
        while self._pending:
            written = os.write(self._file, self._pending)
            self._pending = self._pending[written:]

    def close(self) -> None:
        """Ends the file, as far as the disk takes it."""
        last = self._next_member()
        self._pending += last
        self.size_bytes += len(last)
        try:
            self.flush()
        finally:
            os.close(self._file)

    def _next_member(self) -> bytes:
        rest = self._compressor.flush(zlib.Z_FINISH)
        self._compressor, self._member_bytes = zlib.compressobj(wbits=_GZIP), 0
        return rest


# ---- reading ---------------------------------------------------------------------------------------------------------


class TapeFile:
    """A file to be read, once.

    Args:
        path: The file.

    Raises:
        TapeError: It is no tape of a layout that this release knows.
        OSError: It cannot be read.

    Attributes:
        header: Its first line.
        ended: How it ends, in words; known when all records were read.
        is_whole: Whether it was ended by its syncer and nothing of it is damaged; known then, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ended = ""
        self.is_whole = False
        self._cut = "it was cut off: its syncer was killed, or still writes"
        self._lines = self._read()
        try:
            self.header = _header(json.loads(next(self._lines, "")))
        except (PlainError, json.JSONDecodeError, TypeError, AttributeError) as error:
            raise TapeError(f"{path}: this is no tape: {error}") from None
        except TapeError as error:
            raise TapeError(f"{path}: {error}") from None

    def machine(self) -> SyncerMachine:
        """A machine that stands where this file begins.

        Raises:
            TapeError: As `Beginning.machine` does.
        """
        return self.header.beginning.machine(self.header.policy)

    def __iter__(self) -> Iterator[TapeRecord]:
        """The records that are there.

        Raises:
            TapeError: An event is none that this release knows.
        """
        for number, line in enumerate(self._lines, 2):
            try:
                plain = json.loads(line)
            except json.JSONDecodeError as error:
                self.ended = f"line {number} is damaged: {error}"
                return
            if "end" in plain:
                self.ended, self.is_whole = plain["end"], True
                return
            try:
                yield TapeRecord(float(plain["t"]), from_tagged(Event, plain["event"], "event"), plain["effects"])
            except (PlainError, KeyError) as error:
                raise TapeError(f"{self.path}, line {number}: {error}") from None
        self.ended = self._cut

    def _read(self) -> Iterator[str]:
        """Whole lines; what is cut or damaged ends them."""
        rest = b""
        for piece in self._pieces():
            *lines, rest = (rest + piece).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)

    def _pieces(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            content = file.read(_READ_BYTES)
            if not content.startswith(_GZIP_MAGIC):
                while content:
                    yield content
                    content = file.read(_READ_BYTES)
                return
            member = zlib.decompressobj(wbits=_GZIP)
            while content:
                try:
                    yield member.decompress(content)
                except zlib.error as error:
                    self._cut = f"it is damaged before byte {file.tell()}: {error}"
                    return
                content = member.unused_data
                if member.eof:
                    member = zlib.decompressobj(wbits=_GZIP)
                content = content or file.read(_READ_BYTES)


def _header(plain: dict[str, Any]) -> TapeHeader:
    layout = plain.get("format")
    if layout != FORMAT:
        raise TapeError(f"it has the format {layout}, and this release reads {FORMAT}")
    return from_plain(TapeHeader, plain, "header")


def tape_files(folder: Path) -> list[Path]:
    """The files of a tape in the order in which they were begun."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def captured_beginning(at: float, content: bytes) -> Beginning:
    """The beginning of a file that a running machine's capture stands at."""
    return Beginning("captured", at, captured=base64.b64encode(content).decode())


def following(header: TapeHeader, beginning: Beginning, wall_time: float, missed_count: int) -> TapeHeader:
    """The header of the next file of the same syncer."""
    return replace(header, beginning=beginning, wall_time=wall_time, missed_count=missed_count)
