"""The tables of the ledger, and how an older ledger becomes one of today.

`PRAGMA user_version` is the schema version. A step of `MIGRATIONS` leads from one version to the next; each runs in one
transaction with the change of the version, so that a crash leaves the ledger as it was before or after it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Final

APPLICATION_ID: Final = 0x44444C43
"""Marks an SQLite file as a ledger of this project ("DDLC")."""

SCHEMA_1: Final = """
-- The state directory itself. One row.
CREATE TABLE run (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    store TEXT NOT NULL,             -- drawn when the directory was made; every payload record carries it
    run TEXT NOT NULL,               -- id of the run; empty until the first start has said it
    fragment_count INTEGER NOT NULL, -- 0 until the first start has said it
    epoch INTEGER NOT NULL,          -- starts of a syncer; only the newest may write
    created_at REAL NOT NULL         -- like all columns in _at: seconds since 1970 by the host's clock, for display
);

-- Starts of a syncer on this directory.
CREATE TABLE starts (
    epoch INTEGER PRIMARY KEY,
    started_at REAL NOT NULL,
    ended_at REAL,                   -- null: it was killed, or runs
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    probed_at REAL                   -- when it last tried whether the disk takes bytes again
);

-- The newest RunState, as core/plain.py writes it. One row.
CREATE TABLE state (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    plain TEXT NOT NULL,             -- JSON
    digest TEXT NOT NULL,            -- xxh3-128 of it
    written_at REAL NOT NULL
);

-- What the learners have agreed on (RunModel). One row.
CREATE TABLE model (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    plain TEXT NOT NULL,
    digest TEXT NOT NULL
);

-- Every version that was ever committed, with the place of its payload. Payloads of old ones are gone.
CREATE TABLE versions (
    sequence INTEGER PRIMARY KEY,    -- order of the commits
    fragment INTEGER NOT NULL,
    timeline INTEGER NOT NULL,
    number INTEGER NOT NULL,
    digest TEXT NOT NULL,            -- xxh3-128 of theta
    parent_timeline INTEGER,         -- the version that it follows from, or whose value it has (origin fallback)
    parent_number INTEGER,
    parent_digest TEXT,
    global_step INTEGER NOT NULL,    -- global steps made when its round was due
    round INTEGER NOT NULL,          -- 0: none
    origin TEXT NOT NULL,            -- initial, round, roll_back, fallback
    segment TEXT NOT NULL,           -- file in the fragment's folder
    record_offset INTEGER NOT NULL,
    record_bytes INTEGER NOT NULL,
    row_digest TEXT NOT NULL,        -- xxh3-128 of the columns from fragment to record_bytes
    UNIQUE (fragment, timeline, number)
);

-- Rounds that have ended (CommitRound, CloseRound).
CREATE TABLE rounds (
    sequence INTEGER PRIMARY KEY,    -- order of their ends
    round INTEGER NOT NULL UNIQUE,
    fragment INTEGER NOT NULL,
    outcome TEXT NOT NULL,           -- committed; abandoned; lost: its version was, see timelines
    timeline INTEGER,                -- of the version that it committed
    number INTEGER,
    digest TEXT,
    global_step INTEGER NOT NULL,    -- t(r)
    live_count INTEGER,              -- learners live for the quorum
    final INTEGER,                   -- 1: one of the last rounds of a finishing run
    reason TEXT NOT NULL,            -- why it closed when it did
    row_digest TEXT NOT NULL,        -- xxh3-128 of the columns but outcome, and of the contributions
    epoch INTEGER NOT NULL,
    written_at REAL NOT NULL
);
CREATE INDEX rounds_by_version ON rounds (fragment, timeline, number);

-- Per round: its members, then those that were absent or refused.
CREATE TABLE contributions (
    round INTEGER NOT NULL,
    position INTEGER NOT NULL,
    learner TEXT NOT NULL,
    fate TEXT NOT NULL,              -- merged; absent; or why it was refused (Fate)
    reason TEXT NOT NULL,
    incarnation INTEGER,             -- from here on: of members
    slot INTEGER,
    weight REAL,
    step_count INTEGER,
    token_count INTEGER,
    total_token_count INTEGER,
    cursor INTEGER,
    PRIMARY KEY (round, position)
) WITHOUT ROWID;

-- The moving averages as they stood when a round committed. Seconds, but for the interval (steps) and the norm.
CREATE TABLE averages (
    round INTEGER PRIMARY KEY,
    quorum_seconds REAL,
    sync_seconds REAL,
    download_seconds REAL,
    interval_steps REAL,
    norm REAL                        -- of the round's fragment
);

-- Every incarnation that was ever handed out.
CREATE TABLE incarnations (
    incarnation INTEGER PRIMARY KEY,
    learner TEXT NOT NULL,
    role TEXT NOT NULL,
    slot INTEGER NOT NULL,
    peer_address TEXT NOT NULL,
    software_version TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    written_at REAL NOT NULL
);

-- Learners and observers, as in the newest state.
CREATE TABLE learners (
    learner TEXT PRIMARY KEY,
    incarnation INTEGER NOT NULL,    -- the newest
    role TEXT NOT NULL,
    slot INTEGER NOT NULL,
    cursor INTEGER NOT NULL,         -- committed
    lost INTEGER NOT NULL,
    has_left INTEGER NOT NULL,
    left_reason TEXT NOT NULL,
    must_join_again TEXT NOT NULL,   -- why; empty: it need not
    evicted TEXT                     -- why; null: it is not
) WITHOUT ROWID;

-- The committed cursor of every slot.
CREATE TABLE slots (
    slot INTEGER PRIMARY KEY,
    cursor INTEGER NOT NULL
);

-- The run file's values of the newest start, and what differed from one start to the next.
CREATE TABLE config_values (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE policy_changes (
    sequence INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    changed_at REAL NOT NULL,
    name TEXT NOT NULL,
    old TEXT,                        -- null: there was no such value
    new TEXT                         -- null: there is none any more
);

-- Timelines and why they were opened.
CREATE TABLE timelines (
    timeline INTEGER PRIMARY KEY,
    origin TEXT NOT NULL,            -- initial, roll_back, fallback
    reason TEXT NOT NULL,            -- for a fallback: what was lost, a line each
    epoch INTEGER NOT NULL,
    opened_at REAL NOT NULL
);
"""

MIGRATIONS: Final[tuple[str, ...]] = (SCHEMA_1,)
"""The n-th leads from schema version n to n + 1; the first one makes an empty file a ledger."""

SCHEMA_VERSION: Final = len(MIGRATIONS)


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Brings a ledger to `SCHEMA_VERSION`, one transaction per step.

    Args:
        connection: In autocommit mode.
        version: Its schema version now, at most `SCHEMA_VERSION`.

    Raises:
        sqlite3.Error: It cannot be written; it stays at the version that was reached.
    """
    for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            undo(connection)
            raise


def undo(connection: sqlite3.Connection) -> None:
    """Ends a transaction that failed; SQLite may have done so itself, as on a full disk."""
    with contextlib.suppress(sqlite3.Error):
        connection.execute("ROLLBACK")


def _statements(script: str) -> list[str]:
    """The statements of a script, for `execute`: `executescript` would commit behind our back."""
    found, text = [], ""
    for line in script.splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            found.append(text)
            text = ""
    return found
