"""A store in memory: for tests, for programs that embed a syncer, and for runs that need not survive it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.effects import CloseRound, CommitRound
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.status import RoundStatus
from syncer_service.store.held import HeldVersions, renamed_commits
from syncer_service.store.interface import FragmentCommit, MergedDelta, Restored, RunModel

LEDGER_ROWS_MAX: Final = 10_000
"""Ledger rows that the store in memory keeps."""


@dataclass(slots=True)
class MemoryStore(HeldVersions):
    """Keeps everything in memory: the newest version of every fragment."""

    epoch: int = 1
    state: RunState | None = None
    model: RunModel | None = None
    ledger: list[CommitRound] = field(default_factory=list)

    def restored(self) -> Restored | None:
        """Never holds anything when it is opened."""
        return None

    def begin(self, run_id: str, config_values: Mapping[str, str], fragment_count: int) -> None:
        """Nothing to take down."""

    def save_model(self, model: RunModel) -> None:
        """Keeps it."""
        self.model = model

    def save_state(self, state: RunState) -> None:
        """Keeps it."""
        self.state = state

    def commit_initial(self, learner: str, incarnation: int, fragment_count: int) -> tuple[FragmentCommit, ...]:
        """All or nothing."""
        commits = self.staged_commits(learner, incarnation, fragment_count)
        self.hold(commits)
        self.forget_staged()
        return commits

    def commit_round(self, commit: FragmentCommit, merged: MergedDelta, row: CommitRound, state: RunState) -> None:
        """Replaces the newest version."""
        self.hold([commit])
        self.state = state
        self.ledger.append(row)
        del self.ledger[:-LEDGER_ROWS_MAX]

    def record_abandoned(self, row: CloseRound) -> None:
        """Nothing is kept of it."""

    def roll_back(self, states: Mapping[int, FragmentState], state: RunState) -> tuple[FragmentCommit, ...]:
        """Replaces every version."""
        commits = renamed_commits(states, state)
        self.hold(commits)
        self.state = state
        return commits

    def recent_rounds(self, limit: int) -> tuple[RoundStatus, ...]:
        """None of earlier starts; the machine has those of this one."""
        return ()

    def probe(self) -> None:
        """Memory can always be written to."""

    def close(self) -> None:
        """Nothing to do."""
