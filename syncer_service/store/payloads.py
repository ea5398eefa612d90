"""The payload files of one fragment: segments of records.

A segment begins with a base record; deltas of the rounds after it are appended and replayed with `outer_step` to equal
bits. After `base_interval` commits the next one begins a new segment. A segment is named

    <timeline>.<number>.<epoch>.seg

after the version of its base and the start of the syncer that writes it. A syncer never appends to a segment of another
epoch, so one that was replaced and does not know it yet can spoil nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from decoupled_diloco.arrays.outer import outer_step
from decoupled_diloco.core.ids import Version
from decoupled_diloco.runtime import failpoints
from syncer_service.store import records
from syncer_service.store.interface import FragmentCommit, MergedDelta
from syncer_service.store.records import DamageError, DamageKind, Owner, Record, RecordHeader

SUFFIX: Final = ".seg"
SEGMENTS_KEPT: Final = 2
"""The newest segment and the one before: what a damaged one is replaced by."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a record lies.

    Attributes:
        segment: Name of the file in the fragment's folder.
        offset: Where it begins.
        byte_count: Its length.
    """

    segment: str
    offset: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version as the ledger knows it, with its place."""

    fragment: int
    version: Version
    parent: Version | None
    """The version that its value follows from; None for initial parameters and roll-backs."""
    global_step: int
    round: int
    origin: str
    placement: Placement


@dataclass(slots=True)
class _Segment:
    """The segment that is being appended to."""

    name: str
    size: int
    commit_count: int
    newest: Version
    before: Version | None = None
    """The version before the newest."""


class FragmentFiles:
    """Writes one fragment's segments.

    Args:
        folder: The fragment's folder; made when the first segment is.
        owner: Whose records they are.
        epoch: Of this start.
        base_interval: Commits in one segment, from 1.
    """

    def __init__(self, folder: Path, owner: Owner, epoch: int, base_interval: int) -> None:
        self.folder = folder
        self._owner = owner
        self._epoch = epoch
        self._base_interval = base_interval
        self._open: _Segment | None = None

    def next_is_base(self, parent: Version | None) -> bool:
        """Whether the commit of a version after `parent` begins a new segment."""
        segment = self._open
        return segment is None or segment.commit_count >= self._base_interval or segment.newest != parent

    def append(
        self, commit: FragmentCommit, parent: Version | None, round_number: int, merged: MergedDelta | None
    ) -> Placement:
        """Writes a version and syncs it.

        Args:
            commit: The version.
            parent: The version that it follows from.
            round_number: The round; 0 for none.
            merged: What it follows by; None writes a base.

        Raises:
            OSError: No room, or the disk fails; what was written of it is taken away again.
        """
        if merged is not None and parent is not None and not self.next_is_base(parent):
            placed = self._append_delta(commit, parent, round_number, merged)
            if placed is not None:
                return placed
        return self._begin_segment(commit, round_number, is_round=merged is not None)

    def _append_delta(
        self, commit: FragmentCommit, parent: Version, round_number: int, merged: MergedDelta
    ) -> Placement | None:
        """None: the segment is not as it was left, so that a new one has to be begun."""
        segment = self._open
        assert segment is not None
        record = records.delta_record(self._owner, commit, round_number, parent, merged)
        try:
            descriptor = os.open(self.folder / segment.name, os.O_WRONLY)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(descriptor).st_size != segment.size:
                return None
            self._write(descriptor, record, segment.size, is_round=True)
        finally:
            os.close(descriptor)
        placement = Placement(segment.name, segment.size, record.byte_count)
        segment.size += record.byte_count
        segment.commit_count += 1
        segment.before, segment.newest = segment.newest, commit.version
        return placement

    def _begin_segment(self, commit: FragmentCommit, round_number: int, *, is_round: bool) -> Placement:
        record = records.base_record(self._owner, commit, round_number)
        name = f"{commit.version}.{self._epoch}{SUFFIX}"
        path = self.folder / name
        make_folder(self.folder)
        path.unlink(missing_ok=True)  # left behind by an attempt that failed; never synced data of a failed disk again
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            self._write(descriptor, record, 0, is_round=is_round)
            sync_folder(self.folder)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(descriptor)
        self._open = _Segment(name, record.byte_count, 1, commit.version)
        return Placement(name, 0, record.byte_count)

    def _write(self, descriptor: int, record: Record, offset: int, *, is_round: bool) -> None:
        try:
            head, *body = record.pieces
            records.write_pieces(descriptor, [head], offset)
            if is_round:
                failpoints.hit("commit.in_payload_write")
            records.write_pieces(descriptor, body, offset + head.nbytes)
            if is_round:
                failpoints.hit("commit.before_payload_sync")
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, offset)
            raise
        try:
            os.fsync(descriptor)
        except OSError:
            self._open = None  # what a failed sync leaves in the file cannot be known: never append to it again
            raise
        if is_round:
            failpoints.hit("commit.after_payload_sync")

    def undo(self, placement: Placement) -> None:
        """Takes a record away again that no row names: its transaction failed for want of room."""
        path, segment = self.folder / placement.segment, self._open
        try:
            if placement.offset:
                os.truncate(path, placement.offset)
            else:
                path.unlink(missing_ok=True)
        except OSError:
            segment = None
        if segment is None or segment.before is None:
            self._open = None
            return
        segment.size, segment.newest, segment.before = placement.offset, segment.before, None
        segment.commit_count -= 1

    def abandon(self) -> None:
        """Begins a new segment at the next commit: what the ledger knows of the last record is not sure."""
        self._open = None

    def commit_bytes(self, element_count: int) -> int:
        """Most bytes that the next commit writes, headers included."""
        segment = self._open
        is_delta = segment is not None and segment.commit_count < self._base_interval
        return 4 * element_count * (1 if is_delta else 3) + 4096

    def keep(self, names: Iterable[str]) -> None:
        """Removes all other segments; one that cannot be removed stays until the next time."""
        kept = set(names)
        for name in segment_names(self.folder):
            if name not in kept:
                with contextlib.suppress(OSError):
                    (self.folder / name).unlink()


def segment_names(folder: Path) -> list[str]:
    """The segments in a fragment's folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(SUFFIX))
    except FileNotFoundError:
        return []


def make_folder(folder: Path) -> None:
    """Makes a folder that is still there after a power failure.

    Raises:
        OSError: It cannot be made; ENOTDIR where something else has its name.
    """
    if not folder.is_dir():
        if not folder.parent.exists():
            make_folder(folder.parent)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading ---


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came out of a segment.

    Attributes:
        newest: The newest version that is whole, as it was committed; None if the base is damaged already.
        damage: What ended the replay; None if all is whole.
    """

    newest: FragmentCommit | None
    damage: DamageError | None


def replay(folder: Path, owner: Owner, versions: Sequence[StoredVersion]) -> Replayed:
    """Reads versions of one segment up to the last one, or to the first that is damaged.

    Args:
        folder: The fragment's folder.
        owner: Whose records they have to be.
        versions: All of one segment, in the order of their commits, from its base on.
    """
    path = folder / versions[0].placement.segment
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return Replayed(None, DamageError(DamageKind.MISSING, f"{path} is not there"))
    except OSError as error:
        return Replayed(None, DamageError(DamageKind.UNREADABLE, f"{path} cannot be opened: {error.strerror}"))
    try:
        # The records have digests of their own, so what comes out is compared at the end; only if that fails, at every
        # step, to find the last version that is right.
        found = _replay(descriptor, owner, versions, checks_all=False)
        if found is None:
            found = _replay(descriptor, owner, versions, checks_all=True)
        assert found is not None
    finally:
        os.close(descriptor)
    if found.damage is None:
        return found
    return Replayed(found.newest, DamageError(found.damage.kind, f"{path}: {found.damage}"))


def _replay(descriptor: int, owner: Owner, versions: Sequence[StoredVersion], *, checks_all: bool) -> Replayed | None:
    """None: the newest version has other bits than it had, which shows only at the end."""
    newest: FragmentCommit | None = None
    header: RecordHeader | None = None
    damage: DamageError | None = None
    for stored in versions:
        try:
            commit, next_header = _next(descriptor, owner, stored, newest)
            if checks_all:
                records.check_state(next_header, commit.state)
        except DamageError as found:
            damage = found
            break
        newest, header = commit, next_header
    if newest is not None and header is not None and not checks_all:
        try:
            records.check_state(header, newest.state)
        except DamageError:
            return None
    return Replayed(newest, damage)


def _next(
    descriptor: int, owner: Owner, stored: StoredVersion, before: FragmentCommit | None
) -> tuple[FragmentCommit, RecordHeader]:
    header, body_offset = records.read_header(descriptor, stored.placement.offset)
    _check_identity(header, owner, stored)
    vectors = records.read_vectors(descriptor, header, body_offset)
    payload: memoryview | None = None
    base: Version | None = None
    if header.outer is None:
        state = records.base_state(header, vectors)
    else:
        if before is None or before.version != header.outer.base:
            known = before.version if before else "nothing"
            raise DamageError(
                DamageKind.CORRUPT, f"version {header.version} follows from {header.outer.base}, not {known}"
            )
        step = outer_step(
            before.state,
            vectors["delta"],
            learning_rate=header.outer.learning_rate,
            mu=header.outer.momentum,
            download_encoding=header.outer.download_encoding,
        )
        state, payload = step.state, step.delta_payload
        base = header.outer.base if payload is not None else None
    return FragmentCommit(stored.fragment, stored.version, stored.global_step, state, base, payload), header


def _check_identity(header: RecordHeader, owner: Owner, stored: StoredVersion) -> None:
    """A whole record may still be that of another run, fragment or version."""
    if header.owner.store != owner.store:
        raise DamageError(
            DamageKind.FOREIGN,
            f"the record is of run {header.owner.run} in another state directory, not of run {owner.run} in this one",
        )
    if (header.fragment, header.version) != (stored.fragment, stored.version):
        raise DamageError(
            DamageKind.FOREIGN,
            f"the record is version {header.version} of fragment {header.fragment}, "
            f"where version {stored.version} of fragment {stored.fragment} was written",
        )
