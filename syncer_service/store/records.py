"""Payload records: how one version of one fragment lies in a file.

    prefix   magic, format version, length of the header, length of the body, digest of prefix and header
    header   JSON: whose record it is, which version, what the sections are
    body     the sections, float32, little-endian, one after the other

A *base* holds theta, momentum and residual; one that is all zeros is left out. A *delta* holds the merged delta of a
round with what else `outer_step` needs to make the version from the one before. Every byte is covered by an xxh3-128
digest, so a record that is torn, cut, flipped or of another run is told from a whole one.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

import numpy as np
import xxhash

from decoupled_diloco.arrays.digest import state_digest, vector_digest
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.plain import PlainError, from_plain, to_plain
from syncer_service.store.interface import FragmentCommit, MergedDelta

MAGIC: Final = b"DDLCrec\n"
FORMAT_VERSION: Final = 1
HEADER_BYTES_MAX: Final = 1 << 20

_COVERED: Final = struct.Struct("<8sIIQ")
_DIGEST_BYTES: Final = 16
PREFIX_BYTES: Final = _COVERED.size + _DIGEST_BYTES

STATE_SECTIONS: Final = ("theta", "momentum", "residual")


class DamageKind(StrEnum):
    """What is wrong with a record."""

    MISSING = "missing"
    TORN = "torn"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    UNREADABLE = "unreadable"


class DamageError(Exception):
    """A record is not what was written.

    Attributes:
        kind: What kind of damage.
    """

    def __init__(self, kind: DamageKind, text: str) -> None:
        self.kind = kind
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose records they are.

    Attributes:
        store: Identity of the state directory, drawn when it was made.
        run: Id of the run, for messages.
    """

    store: str
    run: str


@dataclass(frozen=True, slots=True)
class Section:
    """One vector of a record's body."""

    name: str
    byte_count: int
    digest: str


@dataclass(frozen=True, slots=True)
class OuterArguments:
    """What `outer_step` needs besides the delta."""

    base: Version
    learning_rate: float
    momentum: float
    download_encoding: str


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of itself.

    Attributes:
        owner: Whose it is.
        fragment: Of which fragment.
        kind: "base" or "delta".
        version: The version that it makes, with the digest of theta.
        state_digest: xxh3-128 over theta, momentum and residual of that version.
        global_step: As in `FragmentCommit`.
        round: The round that committed it; 0 for initial parameters and roll-backs.
        element_count: Length of the fragment's vectors.
        sections: The vectors of the body, in order.
        outer: For a delta: how it is applied.
    """

    owner: Owner
    fragment: int
    kind: Literal["base", "delta"]
    version: Version
    state_digest: str
    global_step: int
    round: int
    element_count: int
    sections: tuple[Section, ...]
    outer: OuterArguments | None = None

    @property
    def body_bytes(self) -> int:
        """Length of the body."""
        return sum(section.byte_count for section in self.sections)


@dataclass(frozen=True, slots=True)
class Record:
    """A record in memory: what is to be written, piece by piece.

    Attributes:
        pieces: Prefix and header, then the sections.
    """

    pieces: tuple[memoryview, ...]

    @property
    def byte_count(self) -> int:
        """Length of the whole record."""
        return sum(piece.nbytes for piece in self.pieces)


def base_record(owner: Owner, commit: FragmentCommit, round_number: int) -> Record:
    """The record of a whole state."""
    vectors = {name: getattr(commit.state, name) for name in STATE_SECTIONS}
    return _record(owner, commit, round_number, {name: v for name, v in vectors.items() if not _is_zero(v)}, None)


def delta_record(owner: Owner, commit: FragmentCommit, round_number: int, base: Version, merged: MergedDelta) -> Record:
    """The record of one round's merged delta.

    Args:
        owner: Whose it is.
        commit: What it makes.
        round_number: The round.
        base: The version that it makes it from.
        merged: The delta with the arguments of the outer step.
    """
    outer = OuterArguments(base, merged.learning_rate, merged.momentum, merged.download_encoding)
    return _record(owner, commit, round_number, {"delta": merged.delta}, outer)


def _record(
    owner: Owner,
    commit: FragmentCommit,
    round_number: int,
    vectors: dict[str, FloatVector],
    outer: OuterArguments | None,
) -> Record:
    plain = {name: np.ascontiguousarray(vector, "<f4") for name, vector in vectors.items()}
    header = RecordHeader(
        owner=owner,
        fragment=commit.fragment,
        kind="base" if outer is None else "delta",
        version=commit.version,
        state_digest=state_digest(commit.state),
        global_step=commit.global_step,
        round=round_number,
        element_count=commit.state.theta.size,
        sections=tuple(Section(name, v.nbytes, _digest(v)) for name, v in plain.items()),
        outer=outer,
    )
    text = json.dumps(to_plain(header), separators=(",", ":")).encode()
    covered = _COVERED.pack(MAGIC, FORMAT_VERSION, len(text), header.body_bytes)
    head = covered + xxhash.xxh3_128_digest(covered + text) + text
    return Record((memoryview(head), *(v.view(np.uint8).data for v in plain.values())))


def _is_zero(vector: FloatVector) -> bool:
    """Bit for bit: a minus zero is no zero."""
    return not np.ascontiguousarray(vector).view(np.uint32).any()


def _digest(vector: FloatVector) -> str:
    return str(xxhash.xxh3_128_hexdigest(vector.view(np.uint8).data))


def read_header(descriptor: int, offset: int) -> tuple[RecordHeader, int]:
    """Reads and verifies what a record says of itself.

    Args:
        descriptor: The open file.
        offset: Where the record begins.

    Returns:
        The header, and where the body begins.

    Raises:
        DamageError: It is not whole.
    """
    prefix = _pread(descriptor, PREFIX_BYTES, offset, "the beginning")
    magic, format_version, header_bytes, body_bytes = _COVERED.unpack_from(prefix)
    if magic != MAGIC:
        raise DamageError(DamageKind.CORRUPT, f"no record begins at byte {offset}")
    if format_version > FORMAT_VERSION:
        raise DamageError(
            DamageKind.FOREIGN,
            f"the record at byte {offset} has format {format_version}; this release reads up to {FORMAT_VERSION}",
        )
    if header_bytes > HEADER_BYTES_MAX:
        raise DamageError(DamageKind.CORRUPT, f"the record at byte {offset} has a header of {header_bytes} bytes")
    text = _pread(descriptor, header_bytes, offset + PREFIX_BYTES, "the header")
    if xxhash.xxh3_128_digest(prefix[: _COVERED.size] + text) != prefix[_COVERED.size :]:
        raise DamageError(DamageKind.CORRUPT, f"the header of the record at byte {offset} has another digest")
    try:
        header = from_plain(RecordHeader, json.loads(text))
    except (PlainError, ValueError) as error:
        raise DamageError(DamageKind.CORRUPT, f"the header at byte {offset} cannot be read: {error}") from error
    if header.body_bytes != body_bytes:
        raise DamageError(DamageKind.CORRUPT, f"the record at byte {offset} contradicts itself about its length")
    return header, offset + PREFIX_BYTES + header_bytes


def read_vectors(descriptor: int, header: RecordHeader, body_offset: int) -> dict[str, FloatVector]:
    """Reads and verifies a record's sections, by name.

    Raises:
        DamageError: They are not whole.
    """
    found = {}
    for section in header.sections:
        vector = np.empty(section.byte_count // 4, "<f4")
        _read_into(descriptor, vector.view(np.uint8).data, body_offset, f"section {section.name}")
        if _digest(vector) != section.digest:
            raise DamageError(
                DamageKind.CORRUPT, f"section {section.name} at byte {body_offset} has another digest than was written"
            )
        found[section.name] = vector.astype(np.float32, copy=False)
        body_offset += section.byte_count
    return found


def base_state(header: RecordHeader, vectors: dict[str, FloatVector]) -> FragmentState:
    """The state in a base record; what is not there is all zeros."""
    zeros = np.zeros(0 if len(vectors) == len(STATE_SECTIONS) else header.element_count, np.float32)
    return FragmentState(*(vectors.get(name, zeros) for name in STATE_SECTIONS))


def check_state(header: RecordHeader, state: FragmentState) -> None:
    """Compares a state with what its record says of it.

    Raises:
        DamageError: Other bits.
    """
    if vector_digest(state.theta) != header.version.digest or state_digest(state) != header.state_digest:
        raise DamageError(DamageKind.CORRUPT, f"version {header.version} comes out with another digest than it had")


def _pread(descriptor: int, count: int, offset: int, what: str) -> bytes:
    buffer = bytearray(count)
    _read_into(descriptor, memoryview(buffer), offset, what)
    return bytes(buffer)


def _read_into(descriptor: int, target: memoryview, offset: int, what: str) -> None:
    done = 0
    while done < target.nbytes:
        try:
            count = os.preadv(descriptor, [target[done:]], offset + done)
        except OSError as error:
            raise DamageError(
                DamageKind.UNREADABLE, f"{what} of a record cannot be read at byte {offset + done}: {error.strerror}"
            ) from error
        if count == 0:
            text = f"the file ends at byte {offset + done}, inside {what} of a record"
            raise DamageError(DamageKind.TORN, text)
        done += count


def write_pieces(descriptor: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Writes pieces one after the other from `offset` on.

    Raises:
        OSError: No room, or the disk fails; part of it may be written.
    """
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            done += os.pwrite(descriptor, piece[done:], offset + done)
        offset += piece.nbytes
