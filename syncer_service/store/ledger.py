"""The ledger: an SQLite file with everything of a run but payloads.

Write-ahead log, synced at every commit. Each transaction begins with a look at the epoch: a syncer that another one has
replaced writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from decoupled_diloco.core.effects import CloseRound, CommitRound
from decoupled_diloco.core.run_state import LearnerAccount, RunState
from syncer_service.store import rows
from syncer_service.store.interface import FencedError, RunModel, StorageError
from syncer_service.store.lock import StateError
from syncer_service.store.payloads import StoredVersion
from syncer_service.store.records import Owner
from syncer_service.store.schema import APPLICATION_ID, SCHEMA_VERSION, migrate, undo

LEDGER_NAME: Final = "ledger.sqlite3"
BUSY_SECONDS: Final = 5.0
"""How long a transaction waits for another one."""

REMEDY: Final = (
    "restore the run from a checkpoint or its mirror into an empty directory, or give another one with --state-dir"
)


class Ledger:
    """The open ledger of one start.

    Args:
        path: The file; made if it is not there.

    Raises:
        StateError: It is no ledger, damaged, or of a newer release.
        sqlite3.Error: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._accounts: dict[str, tuple[object, ...]] = {}
        self._slot_cursors: dict[int, int] = {}
        self.connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self.connection.text_factory = rows.lenient_text
        try:
            self._check_and_migrate()
            self.epoch = self._begin_epoch()
            self._identity = _identity(path)
        except BaseException:
            self.connection.close()
            raise

    def _check_and_migrate(self) -> None:
        version = checked_schema_version(self.connection, self.path)
        if version > 0:
            check_pages(self.connection, self.path)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("PRAGMA foreign_keys = ON")
        migrate(self.connection, version)

    def _begin_epoch(self) -> int:
        now = time.time()
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            self.connection.execute("INSERT OR IGNORE INTO run VALUES (1, ?, '', 0, 0, ?)", (uuid.uuid4().hex, now))
            self.connection.execute("UPDATE run SET epoch = epoch + 1")
            (epoch,) = self.connection.execute("SELECT epoch FROM run").fetchone()
            self.connection.execute(
                "INSERT INTO starts VALUES (?, ?, NULL, ?, ?, NULL)", (epoch, now, socket.gethostname(), os.getpid())
            )
            self.connection.execute("COMMIT")
        except BaseException:
            undo(self.connection)
            raise
        return int(epoch)

    def check_in_place(self) -> None:
        """Looks whether the path still leads to the file that is open here.

        Raises:
            StorageError: It does not: what was written from now on would be lost with this process.
        """
        if _identity(self.path) != self._identity:
            raise StorageError(
                f"the ledger {self.path} was moved, removed or replaced under this syncer, and what it wrote would be "
                "lost; put it back as it was, or stop this syncer"
            )

    @property
    def owner(self) -> Owner:
        """Whose payload records belong to this ledger."""
        return Owner(*self.connection.execute("SELECT store, run FROM run").fetchone())

    @property
    def fragment_count(self) -> int:
        """Fragments of the run; 0 before the first start has said it."""
        (count,) = self.connection.execute("SELECT fragment_count FROM run").fetchone()
        return int(count)

    def check_epoch(self) -> None:
        """Looks whether this start is still the newest.

        Raises:
            FencedError: It is not.
        """
        (epoch,) = self.connection.execute("SELECT epoch FROM run").fetchone()
        if epoch != self.epoch:
            newer = self.connection.execute("SELECT host, pid FROM starts WHERE epoch = ?", (epoch,)).fetchone()
            who = f" (process {newer[1]} on host {newer[0]})" if newer else ""
            raise FencedError(
                f"another syncer{who} has taken {self.path.parent} over: its epoch is {epoch}, this one's {self.epoch}"
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; durable when it has ended.

        Raises:
            FencedError: Another syncer has taken over; nothing is written.
            sqlite3.Error: It cannot be written; nothing is.
        """
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            self.check_epoch()
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException:
            undo(self.connection)
            self._accounts.clear()
            self._slot_cursors.clear()
            raise

    # --- what goes into transactions ---

    def begin(self, run_id: str, config_values: Mapping[str, str], fragment_count: int) -> None:
        """See `Store.begin`."""
        with self.transaction() as connection:
            (known_run, known_count) = connection.execute("SELECT run, fragment_count FROM run").fetchone()
            if known_run and known_run != run_id:
                raise StateError(
                    f"the state directory {self.path.parent} holds the run {known_run!r}, the run file says "
                    f"run.id = {run_id!r}; give this run a directory of its own with --state-dir"
                )
            if known_count and known_count != fragment_count:
                raise StateError(
                    f"the run in {self.path.parent} has {known_count} fragments, the run file says {fragment_count}; "
                    "the number of fragments cannot change during a run"
                )
            connection.execute("UPDATE run SET run = ?, fragment_count = ?", (run_id, fragment_count))
            self._put_config(connection, config_values, is_first=not known_run)

    def _put_config(self, connection: sqlite3.Connection, values: Mapping[str, str], *, is_first: bool) -> None:
        old = rows.read_config_values(connection)
        now = time.time()
        for name in sorted({*old, *values}):
            before, after = old.get(name), values.get(name)
            if before == after:
                continue
            if not is_first:
                connection.execute(
                    "INSERT INTO policy_changes (epoch, changed_at, name, old, new) VALUES (?, ?, ?, ?, ?)",
                    (self.epoch, now, name, before, after),
                )
            connection.execute("DELETE FROM config_values WHERE name = ?", (name,))
            if after is not None:
                connection.execute("INSERT INTO config_values VALUES (?, ?)", (name, after))

    def put_model(self, model: RunModel) -> None:
        """Writes what the learners have agreed on, in a transaction of its own."""
        text = rows.text_of(model)
        with self.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO model VALUES (1, ?, ?)", (text, rows.text_digest(text)))

    def put_state(self, state: RunState) -> None:
        """Writes the run's state, and of learners and slots what has changed.

        Raises:
            ValueError: It is of an older timeline than the run is in.
        """
        (newest,) = self.connection.execute("SELECT coalesce(max(timeline), 0) FROM timelines").fetchone()
        if state.timeline < newest:
            raise ValueError(f"a state of timeline {state.timeline} cannot follow one of timeline {newest}")
        text = rows.text_of(state)
        self.connection.execute(
            "INSERT OR REPLACE INTO state VALUES (1, ?, ?, ?)", (text, rows.text_digest(text), time.time())
        )
        for account in state.learners:
            self._put_learner(account, state.evicted.get(account.learner))
        for slot, cursor in state.slot_cursors.items():
            if self._slot_cursors.get(slot) != cursor:
                self.connection.execute("INSERT OR REPLACE INTO slots VALUES (?, ?)", (slot, cursor))
                self._slot_cursors[slot] = cursor

    def _put_learner(self, account: LearnerAccount, evicted: str | None) -> None:
        row = (
            account.learner,
            account.incarnation,
            account.role.value,
            account.slot,
            account.cursor,
            int(account.lost),
            int(account.left),
            account.left_reason,
            account.must_join_again,
            evicted,
        )
        seen = (*row, account.peer_address, account.software_version)
        if self._accounts.get(account.learner) == seen:
            return
        self.connection.execute("INSERT OR REPLACE INTO learners VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        self.connection.execute(
            "INSERT INTO incarnations VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (incarnation) DO UPDATE SET"
            " slot = excluded.slot, peer_address = excluded.peer_address, software_version = excluded.software_version",
            (
                account.incarnation,
                account.learner,
                account.role.value,
                account.slot,
                account.peer_address,
                account.software_version,
                self.epoch,
                time.time(),
            ),
        )
        self._accounts[account.learner] = seen

    def put_commit(self, row: CommitRound, stored: StoredVersion, state: RunState) -> None:
        """Writes a committed round, its version, and the state beside it."""
        rows.put_round(self.connection, row, self.epoch, time.time())
        self.put_version(stored)
        averages = state.averages
        norm = averages.norms[row.fragment] if row.fragment < len(averages.norms) else None
        self.connection.execute(
            "INSERT OR REPLACE INTO averages VALUES (?, ?, ?, ?, ?, ?)",
            (
                row.round,
                averages.quorum_seconds,
                averages.sync_seconds,
                averages.download_seconds,
                averages.interval_steps,
                norm,
            ),
        )
        self.put_state(state)

    def put_version(self, stored: StoredVersion) -> None:
        """Writes a version with its place."""
        rows.put_version(self.connection, stored)

    def put_lost(self, rounds: Sequence[int]) -> None:
        """Marks committed rounds whose versions were lost."""
        self.connection.executemany("UPDATE rounds SET outcome = 'lost' WHERE round = ?", [(r,) for r in rounds])

    def put_probe(self) -> None:
        """Tries a transaction."""
        with self.transaction() as connection:
            connection.execute("UPDATE starts SET probed_at = ? WHERE epoch = ?", (time.time(), self.epoch))

    def put_abandoned(self, row: CloseRound) -> None:
        """Writes an abandoned round. It outlives the process; a power failure may take it."""
        self.connection.execute("PRAGMA synchronous = NORMAL")
        try:
            with self.transaction() as connection:
                rows.put_round(connection, row, self.epoch, time.time())
        finally:
            self.connection.execute("PRAGMA synchronous = FULL")

    def put_timeline(self, timeline: int, origin: str, reason: str) -> None:
        """Writes why a timeline was opened."""
        self.connection.execute(
            "INSERT OR REPLACE INTO timelines VALUES (?, ?, ?, ?, ?)",
            (timeline, origin, reason, self.epoch, time.time()),
        )

    def close(self) -> None:
        """Ends the start."""
        with contextlib.suppress(sqlite3.Error, FencedError), self.transaction() as connection:
            connection.execute("UPDATE starts SET ended_at = ? WHERE epoch = ?", (time.time(), self.epoch))
        self.connection.close()


def checked_schema_version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version of a ledger; 0 for an empty file.

    Raises:
        StateError: It is no ledger, or of a newer release.
    """
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (table_count,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError):
            raise
        raise StateError(f"the ledger {path} is damaged ({error}); {REMEDY}") from error
    if version > SCHEMA_VERSION:
        raise StateError(
            f"the ledger {path} has schema version {version}, this release knows up to {SCHEMA_VERSION}; "
            "start the release that wrote it, or a newer one"
        )
    if table_count and application != APPLICATION_ID:
        raise StateError(f"{path} is an SQLite file of another program; give another directory with --state-dir")
    return int(version)


def check_pages(connection: sqlite3.Connection, path: Path) -> None:
    """Looks through the whole file.

    Raises:
        StateError: It is damaged.
    """
    try:
        found = [text for (text,) in connection.execute("PRAGMA quick_check(3)")]
    except sqlite3.DatabaseError as error:
        found = [str(error)]
    if found != ["ok"]:
        raise StateError(f"the ledger {path} is damaged ({'; '.join(found)}); {REMEDY}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file a path leads to; None: to none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
