"""Rows of the ledger as values: what the syncer restarts from and what the reader of a state directory shows."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import xxhash

from decoupled_diloco.core.effects import Absentee, CloseRound, CommitRound, MergedContribution
from decoupled_diloco.core.ids import Fate, Version
from decoupled_diloco.core.plain import PlainError, from_plain, to_plain
from decoupled_diloco.core.run_state import RunState
from syncer_service.store.interface import RunModel
from syncer_service.store.payloads import Placement, StoredVersion

MERGED: Final = "merged"
ABSENT: Final = "absent"

_VERSION_COLUMNS: Final = (
    "fragment, timeline, number, digest, parent_timeline, parent_number, parent_digest, global_step, round, origin,"
    " segment, record_offset, record_bytes"
)


class RowError(Exception):
    """A row of the ledger is not what was written."""


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerContribution:
    """What became of one learner in one round.

    Attributes:
        round: The round.
        learner: Its id.
        fate: "merged", "absent" (there was none), or a value of `Fate`.
        reason: Why it was absent or refused.
        incarnation: From here on as in `MergedContribution`; None if it was not merged.
    """

    round: int
    learner: str
    fate: str
    reason: str
    incarnation: int | None = None
    slot: int | None = None
    weight: float | None = None
    step_count: int | None = None
    token_count: int | None = None
    total_token_count: int | None = None
    cursor: int | None = None

    @property
    def is_merged(self) -> bool:
        """Whether it is part of the round's version."""
        return self.fate == MERGED


@dataclasses.dataclass(frozen=True, slots=True)
class LedgerRound:
    """A round that has ended.

    Attributes:
        sequence: Order of the ends, from 1.
        round: Its number.
        fragment: Its fragment.
        outcome: "committed", "abandoned", or "lost": committed, but its version was lost later.
        version: What it committed; None if it was abandoned.
        global_step: t(r).
        live_count: Learners live for the quorum; None if it was abandoned.
        is_final: One of the last rounds of a finishing run.
        reason: Why it closed when it did.
        epoch: Of the syncer that wrote it.
        written_at: Seconds since 1970 by that syncer's host.
        contributions: Members first.
        row_digest: Of its columns and contributions.
    """

    sequence: int
    round: int
    fragment: int
    outcome: str
    version: Version | None
    global_step: int
    live_count: int | None
    is_final: bool
    reason: str
    epoch: int
    written_at: float
    contributions: tuple[LedgerContribution, ...]
    row_digest: str

    @property
    def members(self) -> tuple[str, ...]:
        """Ids of the learners that were merged."""
        return tuple(c.learner for c in self.contributions if c.is_merged)

    def to_commit(self) -> CommitRound:
        """The effect that a committed round's row was written from.

        Raises:
            RowError: Its digest is another one.
        """
        if self.version is None or self.live_count is None:
            raise RowError(f"round {self.round} of the ledger was {self.outcome}; it committed nothing")
        columns = (
            self.round,
            self.fragment,
            *_name(self.version),
            self.global_step,
            self.live_count,
            int(self.is_final),
            self.reason,
            self.epoch,
            self.written_at,
        )
        if _round_digest(columns, (dataclasses.astuple(c)[1:] for c in self.contributions)) != self.row_digest:
            raise RowError(f"the ledger's row of round {self.round} has another digest than was written")
        return CommitRound(
            round=self.round,
            fragment=self.fragment,
            version=self.version,
            global_step=self.global_step,
            contributions=tuple(_to_merged(c) for c in self.contributions if c.is_merged),
            absentees=tuple(_to_absentee(c) for c in self.contributions if not c.is_merged),
            live_count=self.live_count,
            final=self.is_final,
            reason=self.reason,
        )


def _to_merged(row: LedgerContribution) -> MergedContribution:
    names = [field.name for field in dataclasses.fields(MergedContribution)]
    return MergedContribution(**{name: getattr(row, name) for name in names})


def _to_absentee(row: LedgerContribution) -> Absentee:
    return Absentee(row.learner, row.reason, None if row.fate == ABSENT else Fate(row.fate))


def text_of(value: Any) -> str:
    """A value of the core as JSON."""
    return json.dumps(to_plain(value), separators=(",", ":"))


def digest_of(value: Any) -> str:
    """xxh3-128 of a value of the core."""
    return text_digest(text_of(value))


def text_digest(text: str) -> str:
    """xxh3-128 of a text."""
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def lenient_text(raw: bytes) -> str:
    """How texts are read: bytes that are no UTF-8 are damage for a digest to find, not for SQLite to stop at."""
    return raw.decode(errors="replace")


# --- writing: inside a transaction of the caller ---


def put_round(connection: sqlite3.Connection, row: CommitRound | CloseRound, epoch: int, now: float) -> None:
    """Writes a round with its contributions, in place of one of that number that was abandoned.

    A round that an older start abandoned, and whose state did not become durable any more, is opened again.
    """
    committed = isinstance(row, CommitRound)
    known = connection.execute("SELECT outcome FROM rounds WHERE round = ?", (row.round,)).fetchone()
    if known is not None:
        if not committed and known[0] != "abandoned":
            return
        connection.execute("DELETE FROM rounds WHERE round = ?", (row.round,))
        connection.execute("DELETE FROM contributions WHERE round = ?", (row.round,))
    version = row.version if isinstance(row, CommitRound) else None
    columns = (
        row.round,
        row.fragment,
        *(_name(version) if version else (None, None, None)),
        row.global_step,
        row.live_count if isinstance(row, CommitRound) else None,
        int(row.final) if isinstance(row, CommitRound) else None,
        row.reason,
        epoch,
        now,
    )
    contributions = list(_contribution_columns(row))
    outcome, digest = "committed" if committed else "abandoned", _round_digest(columns, contributions)
    connection.execute(
        "INSERT INTO rounds (round, fragment, timeline, number, digest, global_step, live_count, final, reason, epoch,"
        " written_at, outcome, row_digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*columns, outcome, digest),
    )
    connection.executemany(
        "INSERT INTO contributions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(row.round, position, *values) for position, values in enumerate(contributions)],
    )


def _round_digest(columns: Sequence[object], contributions: Iterable[Sequence[object]]) -> str:
    """Of the columns, not of the effect: that one may gain fields."""
    return digest_of([columns, list(contributions)])


def _contribution_columns(row: CommitRound | CloseRound) -> Iterator[tuple[object, ...]]:
    for c in row.contributions if isinstance(row, CommitRound) else ():
        counts = (c.step_count, c.token_count, c.total_token_count, c.cursor)
        yield (c.learner, MERGED, "", c.incarnation, c.slot, float(c.weight), *counts)
    for absentee in row.absentees:
        fate = absentee.fate.value if absentee.fate else ABSENT
        yield (absentee.learner, fate, absentee.reason, *(None,) * 7)


def put_version(connection: sqlite3.Connection, stored: StoredVersion) -> None:
    """Writes a version with its place."""
    parent = stored.parent
    values = (
        stored.fragment,
        *_name(stored.version),
        *(_name(parent) if parent else (None, None, None)),
        stored.global_step,
        stored.round,
        stored.origin,
        stored.placement.segment,
        stored.placement.offset,
        stored.placement.byte_count,
    )
    connection.execute(
        f"INSERT INTO versions ({_VERSION_COLUMNS}, row_digest) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (*values, digest_of(values)),
    )


def _name(version: Version) -> tuple[int, int, str]:
    return version.timeline, version.number, version.digest


# --- reading ---

_ROUND_COLUMNS: Final = (
    "sequence, round, fragment, outcome, timeline, number, digest, global_step, live_count, final, reason, epoch,"
    " written_at, row_digest"
)
_CONTRIBUTION_COLUMNS: Final = (
    "round, learner, fate, reason, incarnation, slot, weight, step_count, token_count, total_token_count, cursor"
)


def read_rounds(
    connection: sqlite3.Connection, where: str = "1", values: tuple[object, ...] = ()
) -> Iterator[LedgerRound]:
    """Rounds in the order of their ends, with their contributions.

    Args:
        connection: To the ledger.
        where: SQL condition on the columns of `rounds`.
        values: For its question marks.
    """
    query = f"SELECT {_ROUND_COLUMNS} FROM rounds WHERE {where} ORDER BY sequence"
    for sequence, number, fragment, outcome, timeline, version, digest, *rest in connection.execute(query, values):
        global_step, live_count, final, reason, epoch, written_at, row_digest = rest
        yield LedgerRound(
            sequence,
            number,
            fragment,
            outcome,
            None if timeline is None else Version(timeline, version, digest),
            global_step,
            live_count,
            bool(final),
            reason,
            epoch,
            written_at,
            tuple(read_contributions(connection, "round = ?", (number,))),
            row_digest,
        )


def read_contributions(
    connection: sqlite3.Connection, where: str = "1", values: tuple[object, ...] = ()
) -> Iterator[LedgerContribution]:
    """Contributions by round, in the order of their positions."""
    query = f"SELECT {_CONTRIBUTION_COLUMNS} FROM contributions WHERE {where} ORDER BY round, position"
    return (LedgerContribution(*row) for row in connection.execute(query, values))


def read_versions(
    connection: sqlite3.Connection, where: str = "1", values: tuple[object, ...] = ()
) -> Iterator[StoredVersion]:
    """Versions in the order of their commits.

    Raises:
        RowError: A row is not what was written.
    """
    query = f"SELECT sequence, row_digest, {_VERSION_COLUMNS} FROM versions WHERE {where} ORDER BY sequence"
    for sequence, row_digest, *row in connection.execute(query, values):
        if digest_of(row) != row_digest:
            raise RowError(f"row {sequence} of the ledger's versions has another digest than was written")
        fragment, timeline, number, digest, *before, step, round_number, origin, segment, offset, byte_count = row
        parent = None if before[0] is None else Version(*before)
        place = Placement(segment, offset, byte_count)
        yield StoredVersion(fragment, Version(timeline, number, digest), parent, step, round_number, origin, place)


def read_state(connection: sqlite3.Connection) -> tuple[RunState, float] | None:
    """The newest state, and when it was written; None: none was.

    Raises:
        RowError: It is not what was written.
    """
    row = connection.execute("SELECT plain, digest, written_at FROM state").fetchone()
    return None if row is None else (_verified(RunState, row[0], row[1], "run's state"), row[2])


def read_model(connection: sqlite3.Connection) -> RunModel | None:
    """What the learners have agreed on; None: nothing yet.

    Raises:
        RowError: It is not what was written.
    """
    row = connection.execute("SELECT plain, digest FROM model").fetchone()
    return None if row is None else _verified(RunModel, row[0], row[1], "run's model")


def _verified(wanted: Any, text: str, digest: str, what: str) -> Any:
    if text_digest(text) != digest:
        raise RowError(f"the {what} in the ledger has another digest than was written")
    try:
        return from_plain(wanted, json.loads(text))
    except PlainError as error:
        raise RowError(f"the {what} in the ledger cannot be read: {error}") from error


def read_config_values(connection: sqlite3.Connection) -> dict[str, str]:
    """The run file's values of the newest start."""
    return dict(connection.execute("SELECT name, value FROM config_values ORDER BY name").fetchall())
