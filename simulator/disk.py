"""A disk that keeps what was synced, and little else, when the power goes.

A file is a list of records that is only appended to. A record is durable once its file was synced. At a crash an
unsynced tail is lost, survives, or survives torn, as the world's draw wants it; a record may also rot later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class DiskFullError(Exception):
    """There is no room for one more record."""


@dataclass(slots=True)
class Record:
    """What was appended at once. `damaged`: torn or rotten, as its digest shows to whoever reads it."""

    content: Any
    damaged: bool = False


@dataclass(slots=True)
class SimulatedFile:
    """One file.

    Attributes:
        records: what a reader sees, in order.
        durable_count: how many of them a crash leaves alone.
    """

    records: list[Record] = field(default_factory=list)
    durable_count: int = 0


class SimulatedDisk:
    """All files of one volume, by name.

    Attributes:
        full: whether every append fails.
        is_rotten: a synced record was damaged, and no syncer has started since.
        is_mirror: it is a copy that may lack the newest records; nobody has started on it yet.
    """

    def __init__(self) -> None:
        self.files: dict[str, SimulatedFile] = {}
        self.full = self.is_mirror = self.is_rotten = False

    def file(self, name: str) -> SimulatedFile:
        """The file of that name; an empty one if it was never written to."""
        return self.files.setdefault(name, SimulatedFile())

    def append(self, name: str, content: Any) -> None:
        """Writes one more record, not durable yet.

        Raises:
            DiskFullError: there is no room.
        """
        if self.full:
            raise DiskFullError("no space left on device")
        self.file(name).records.append(Record(content))

    def sync(self, name: str) -> None:
        """Makes all records of a file durable."""
        file = self.file(name)
        file.durable_count = len(file.records)

    def rot(self, name: str, index: int) -> None:
        """Damages a record, synced or not."""
        self.file(name).records[index].damaged = self.is_rotten = True

    def crash(self, draw: Callable[[], float]) -> None:
        """The power goes: of every unsynced tail some records stay, the last of them maybe torn."""
        for name in sorted(self.files):
            file = self.files[name]
            unsynced = len(file.records) - file.durable_count
            if unsynced:
                kept = file.durable_count + int(draw() * (unsynced + 1))
                del file.records[kept:]
                if kept > file.durable_count and draw() < 0.5:
                    file.records[-1].damaged = True
                file.durable_count = len(file.records)

    def copy(self, marks: dict[str, int]) -> SimulatedDisk:
        """Another disk with the first records of every file, as they were written: `marks` says how many, by name."""
        other = SimulatedDisk()
        other.is_mirror = True
        for name, count in marks.items():
            records = [Record(record.content) for record in self.file(name).records[:count]]
            other.files[name] = SimulatedFile(records, len(records))
        return other
