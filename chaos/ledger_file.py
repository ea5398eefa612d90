"""The syncer's ledger as evidence: what a restart would go on with, and every row that led there."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from chaos.evidence import Ledger
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.store.ledger import LEDGER_NAME
from syncer_service.store.rows import read_rounds, read_state, read_versions


def holds_run(state_dir: Path) -> bool:
    """Whether a run has written down its versions in a state directory."""
    path = state_dir / LEDGER_NAME
    if not path.exists():
        return False
    with closing(sqlite3.connect(path)) as connection:
        try:
            return connection.execute("SELECT count(*) FROM versions").fetchone() != (0,)
        except sqlite3.OperationalError:  # killed before there were any tables
            return False


def read_ledger(state_dirs: Sequence[Path], policy: Policy) -> Ledger:
    """Reads the ledgers of a run that no syncer uses now.

    Args:
        state_dirs: those of disks that were lost, in that order, then the one that the run has ended with.
        policy: what the run goes by.

    Raises:
        RowError: a row is not what was written.
        ValueError: there is no run in one of them.
    """
    parts = [_read(state_dir, policy) for state_dir in state_dirs]
    versions = (sum((part.versions[p] for part in parts), ()) for p in range(policy.fragment_count))
    rounds = tuple(row for part in parts for row in part.rounds)
    return Ledger(rounds, tuple(versions), parts[-1].state, policy)


def _read(state_dir: Path, policy: Policy) -> Ledger:
    with closing(sqlite3.connect(state_dir / LEDGER_NAME)) as connection:
        rounds = [row for row in read_rounds(connection) if row.outcome in ("committed", "lost")]
        stored = list(read_versions(connection))
        found = read_state(connection)
    if found is None:
        raise ValueError(f"{state_dir} holds no run")
    commits = tuple(row.to_commit() for row in rounds)
    lost = {row.round for row in rounds if row.outcome == "lost"}
    newer = (commit for commit in commits if commit.round not in lost)
    machine = SyncerMachine(policy)
    machine.restore(found[0], newer, 0.0)
    versions: list[list[Version]] = [[] for _ in range(policy.fragment_count)]
    for item in stored:
        versions[item.fragment].append(item.version)
    return Ledger(commits, tuple(map(tuple, versions)), machine.run_state(), policy)
