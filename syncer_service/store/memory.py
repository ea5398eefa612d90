"""A store in memory: for tests, for programs that embed a syncer, and for runs that need not survive it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.effects import CloseRound, CommitRound
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.run_state import RunState
from syncer_service.store.interface import (
    FIRST_NUMBER,
    FIRST_TIMELINE,
    FragmentCommit,
    MergedDelta,
    Restored,
    RunModel,
    VersionGoneError,
)

LEDGER_ROWS_MAX: Final = 10_000
"""Ledger rows that the store in memory keeps."""


@dataclass(slots=True)
class MemoryStore:
    """Keeps everything in memory: the newest version of every fragment, and older ones while they are pinned."""

    epoch: int = 1
    state: RunState | None = None
    model: RunModel | None = None
    ledger: list[CommitRound] = field(default_factory=list)
    _newest: dict[int, FragmentCommit] = field(default_factory=dict)
    _pinned_old: dict[tuple[int, Version], FragmentCommit] = field(default_factory=dict)
    _pin_counts: Counter[tuple[int, Version]] = field(default_factory=Counter)
    _staged: dict[tuple[str, int], dict[int, FloatVector]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def version_count(self) -> int:
        """Versions held, newest and pinned."""
        return len(self._newest) + len(self._pinned_old)

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

    def stage_initial(self, learner: str, incarnation: int, fragment: int, theta: FloatVector) -> str:
        """Keeps the vector itself, not a copy."""
        with self._lock:
            self._staged.setdefault((learner, incarnation), {})[fragment] = theta
        return vector_digest(theta)

    def commit_initial(self, learner: str, incarnation: int, fragment_count: int) -> tuple[FragmentCommit, ...]:
        """All or nothing."""
        with self._lock:
            staged = self._staged.pop((learner, incarnation), {})
            if sorted(staged) != list(range(fragment_count)):
                raise ValueError(f"{len(staged)} of {fragment_count} fragments are staged")
            self._staged.clear()
            for fragment, theta in sorted(staged.items()):
                version = Version(FIRST_TIMELINE, FIRST_NUMBER, vector_digest(theta))
                self._newest[fragment] = FragmentCommit(fragment, version, 0, FragmentState.initial(theta))
            return tuple(self._newest[fragment] for fragment in range(fragment_count))

    def discard_initial(self, learner: str, incarnation: int) -> None:
        """Forgets them."""
        with self._lock:
            self._staged.pop((learner, incarnation), None)

    def commit_round(self, commit: FragmentCommit, merged: MergedDelta, row: CommitRound, state: RunState) -> None:
        """Replaces the newest version; the one before stays while it is pinned."""
        with self._lock:
            self._replace(commit)
            self.state = state
            self.ledger.append(row)
            del self.ledger[:-LEDGER_ROWS_MAX]

    def _replace(self, commit: FragmentCommit) -> None:
        old = self._newest.get(commit.fragment)
        if old is not None and self._pin_counts[commit.fragment, old.version]:
            self._pinned_old[commit.fragment, old.version] = old
        self._newest[commit.fragment] = commit

    def record_abandoned(self, row: CloseRound) -> None:
        """Nothing is kept of it."""

    def roll_back(self, states: Mapping[int, FragmentState], state: RunState) -> tuple[FragmentCommit, ...]:
        """Replaces every version."""
        commits = tuple(
            FragmentCommit(fragment, state.versions[fragment], state.version_steps[fragment], values)
            for fragment, values in sorted(states.items())
        )
        with self._lock:
            for commit in commits:
                self._replace(commit)
            self.state = state
        return commits

    def probe(self) -> None:
        """Memory can always be written to."""

    def newest(self) -> Mapping[int, FragmentCommit]:
        """A copy of the table."""
        with self._lock:
            return dict(self._newest)

    def pin(self, fragment: int, version: Version) -> FragmentCommit:
        """Counts the readers of the version."""
        key = (fragment, version)
        with self._lock:
            newest = self._newest.get(fragment)
            found = newest if newest is not None and newest.version == version else self._pinned_old.get(key)
            if found is None:
                raise VersionGoneError(fragment, version, newest.version if newest else None)
            self._pin_counts[key] += 1
            return found

    def unpin(self, fragment: int, version: Version) -> None:
        """The last reader of a version that was replaced ends it."""
        key = (fragment, version)
        with self._lock:
            self._pin_counts[key] -= 1
            if self._pin_counts[key] <= 0:
                del self._pin_counts[key]
                self._pinned_old.pop(key, None)

    def close(self) -> None:
        """Nothing to do."""
