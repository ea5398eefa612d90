"""Reads the ledger of a state directory: for tools and checks, also beside a syncer that is running.

    with open_ledger("runs/syncer/state") as ledger:
        for row in ledger.rounds():
            print(row.round, row.outcome, row.members)

Nothing is locked, nothing of the run is written. All that one reader returns is of one moment, that of its first query.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from decoupled_diloco.core.run_state import RunState
from syncer_service.store import rows
from syncer_service.store.interface import RunModel
from syncer_service.store.ledger import LEDGER_NAME, checked_schema_version
from syncer_service.store.lock import StateError
from syncer_service.store.payloads import StoredVersion
from syncer_service.store.rows import LedgerContribution, LedgerRound
from syncer_service.store.schema import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """A value of the run file that was another one at the start before; None: it was not there."""

    epoch: int
    changed_at: float
    name: str
    old: str | None
    new: str | None


@dataclass(frozen=True, slots=True)
class Timeline:
    """A timeline: `origin` is initial, roll_back or fallback; the reason of a fallback says what was lost."""

    timeline: int
    origin: str
    reason: str
    epoch: int
    opened_at: float


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a syncer; `ended_at` is None for one that was killed or runs."""

    epoch: int
    started_at: float
    ended_at: float | None
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class LedgerIncarnation:
    """An incarnation that was handed out."""

    incarnation: int
    learner: str
    role: str
    slot: int
    epoch: int
    written_at: float


@dataclass(frozen=True, slots=True)
class LedgerLearner:
    """A learner or observer as of the newest state; `evicted` is the reason, None if it is not."""

    learner: str
    incarnation: int
    role: str
    slot: int
    cursor: int
    lost: bool
    has_left: bool
    left_reason: str
    must_join_again: str
    evicted: str | None


class LedgerReader:
    """What the ledger says. See `open_ledger`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def run(self) -> tuple[str, int, int]:
        """The run's id, its number of fragments, and the epoch; "" and 0 before the first start has said them."""
        row = self._connection.execute("SELECT run, fragment_count, epoch FROM run").fetchone()
        return row or ("", 0, 0)

    def state(self) -> RunState | None:
        """The newest state that was written; rounds committed with or after it may not be in it.

        Raises:
            RowError: It is not what was written.
        """
        found = rows.read_state(self._connection)
        return found[0] if found else None

    def model(self) -> RunModel | None:
        """What the learners have agreed on.

        Raises:
            RowError: It is not what was written.
        """
        return rows.read_model(self._connection)

    def rounds(self) -> Iterator[LedgerRound]:
        """All rounds that have ended, in that order, with their contributions."""
        return rows.read_rounds(self._connection)

    def contributions(self) -> Iterator[LedgerContribution]:
        """All contributions, absentees and refusals, by round."""
        return rows.read_contributions(self._connection)

    def versions(self) -> Iterator[StoredVersion]:
        """All versions that were ever committed, in that order."""
        return rows.read_versions(self._connection)

    def incarnations(self) -> tuple[LedgerIncarnation, ...]:
        """All incarnations, in their order."""
        columns = "incarnation, learner, role, slot, epoch, written_at"
        return tuple(LedgerIncarnation(*row) for row in self._all(f"SELECT {columns} FROM incarnations ORDER BY 1"))

    def learners(self) -> tuple[LedgerLearner, ...]:
        """All learners and observers, by id."""
        columns = "learner, incarnation, role, slot, cursor, lost, has_left, left_reason, must_join_again"
        return tuple(
            LedgerLearner(
                learner, incarnation, role, slot, cursor, bool(lost), bool(has_left), left_reason, again, evicted
            )
            for learner, incarnation, role, slot, cursor, lost, has_left, left_reason, again, evicted in self._all(
                f"SELECT {columns}, evicted FROM learners ORDER BY learner"
            )
        )

    def slot_cursors(self) -> dict[int, int]:
        """The committed cursor of every slot, as of the newest state."""
        return dict(self._all("SELECT slot, cursor FROM slots ORDER BY slot"))

    def config_values(self) -> dict[str, str]:
        """The run file's values of the newest start."""
        return rows.read_config_values(self._connection)

    def policy_changes(self) -> tuple[PolicyChange, ...]:
        """What differed from one start to the next, in order."""
        columns = "epoch, changed_at, name, old, new"
        return tuple(PolicyChange(*row) for row in self._all(f"SELECT {columns} FROM policy_changes ORDER BY sequence"))

    def timelines(self) -> tuple[Timeline, ...]:
        """All timelines, in their order."""
        columns = "timeline, origin, reason, epoch, opened_at"
        return tuple(Timeline(*row) for row in self._all(f"SELECT {columns} FROM timelines ORDER BY timeline"))

    def starts(self) -> tuple[Start, ...]:
        """All starts, in their order."""
        columns = "epoch, started_at, ended_at, host, pid"
        return tuple(Start(*row) for row in self._all(f"SELECT {columns} FROM starts ORDER BY epoch"))

    def _all(self, query: str) -> list[tuple]:
        return self._connection.execute(query).fetchall()


@contextmanager
def open_ledger(state_dir: str | Path) -> Iterator[LedgerReader]:
    """Opens the ledger of a state directory for reading.

    Args:
        state_dir: The directory.

    Raises:
        StateError: There is none, or this release cannot read it.
    """
    path = Path(state_dir) / LEDGER_NAME
    if not path.is_file():
        raise StateError(f"{state_dir} holds no run: there is no {LEDGER_NAME}")
    with ExitStack() as stack:
        connection = _connect(path, stack)
        version = checked_schema_version(connection, path)
        if version != SCHEMA_VERSION:
            raise StateError(
                f"the ledger {path} has schema version {version}, this release reads {SCHEMA_VERSION}; "
                "start a syncer on it once, which brings it up to date"
            )
        connection.execute("BEGIN")
        yield LedgerReader(connection)


def _connect(path: Path, stack: ExitStack) -> sqlite3.Connection:
    """Reads in place; where the directory lets nothing be made beside a log that was left behind, reads a copy."""
    connection = _read_only(path, stack)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        for name in (path.name, f"{path.name}-wal"):
            if path.with_name(name).exists():
                shutil.copyfile(path.with_name(name), folder / name)
        return _read_only(folder / path.name, stack)
    except sqlite3.DatabaseError:
        pass  # said in words by who looks at the schema
    return connection


def _read_only(path: Path, stack: ExitStack) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True, isolation_level=None)
    connection.text_factory = rows.lenient_text
    stack.callback(connection.close)
    return connection
