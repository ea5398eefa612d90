"""The syncer's ledger as evidence: what a restart would go on with, and every row that led there."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from chaos.evidence import Ledger
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.store.ledger import LEDGER_NAME
from syncer_service.store.rows import read_rounds, read_state, read_versions


def read_ledger(state_dir: Path, policy: Policy) -> Ledger:
    """Reads the ledger of a state directory that no syncer uses now.

    Args:
        state_dir: the directory.
        policy: what the run goes by.

    Raises:
        RowError: a row is not what was written.
        ValueError: there is no run in it.
    """
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
