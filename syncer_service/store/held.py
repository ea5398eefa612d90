"""Versions in memory: the newest of every fragment, older ones while somebody reads them, and what is staged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from threading import Lock

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.run_state import RunState
from syncer_service.store.interface import FIRST_NUMBER, FIRST_TIMELINE, FragmentCommit, VersionGoneError


@dataclass(slots=True)
class HeldVersions:
    """The part of a store that serves readers. Its methods never wait for a disk."""

    _newest: dict[int, FragmentCommit] = field(default_factory=dict)
    _pinned_old: dict[tuple[int, Version], FragmentCommit] = field(default_factory=dict)
    _pin_counts: Counter[tuple[int, Version]] = field(default_factory=Counter)
    _staged: dict[tuple[str, int], dict[int, FloatVector]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def version_count(self) -> int:
        """Versions held, newest and pinned."""
        return len(self._newest) + len(self._pinned_old)

    def newest(self) -> Mapping[int, FragmentCommit]:
        """A copy of the table."""
        with self._lock:
            return dict(self._newest)

    def hold(self, commits: Iterable[FragmentCommit]) -> None:
        """Makes versions the newest of their fragments; the ones before stay while they are pinned."""
        with self._lock:
            for commit in commits:
                old = self._newest.get(commit.fragment)
                if old is not None and self._pin_counts[commit.fragment, old.version]:
                    self._pinned_old[commit.fragment, old.version] = old
                self._newest[commit.fragment] = commit

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

    def stage_initial(self, learner: str, incarnation: int, fragment: int, theta: FloatVector) -> str:
        """Keeps the vector itself, not a copy."""
        with self._lock:
            self._staged.setdefault((learner, incarnation), {})[fragment] = theta
        return vector_digest(theta)

    def staged_commits(self, learner: str, incarnation: int, fragment_count: int) -> tuple[FragmentCommit, ...]:
        """The staged fragments as the first versions; they stay staged.

        Raises:
            ValueError: Not all fragments are staged.
        """
        with self._lock:
            staged = dict(self._staged.get((learner, incarnation), {}))
        if sorted(staged) != list(range(fragment_count)):
            raise ValueError(f"{len(staged)} of {fragment_count} fragments are staged")
        return tuple(
            FragmentCommit(
                fragment, Version(FIRST_TIMELINE, FIRST_NUMBER, vector_digest(theta)), 0, FragmentState.initial(theta)
            )
            for fragment, theta in sorted(staged.items())
        )

    def forget_staged(self) -> None:
        """Drops everything that is staged: the run has parameters."""
        with self._lock:
            self._staged.clear()

    def discard_initial(self, learner: str, incarnation: int) -> None:
        """Forgets them."""
        with self._lock:
            self._staged.pop((learner, incarnation), None)


def renamed_commits(states: Mapping[int, FragmentState], state: RunState) -> tuple[FragmentCommit, ...]:
    """Values under the names that a state has for them."""
    return tuple(
        FragmentCommit(fragment, state.versions[fragment], state.version_steps[fragment], values)
        for fragment, values in sorted(states.items())
    )
