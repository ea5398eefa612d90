"""Versions in memory: the newest of every fragment, and what is staged."""

from __future__ import annotations

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
    _staged: dict[tuple[str, int], dict[int, FloatVector]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def version_count(self) -> int:
        """Versions held."""
        return len(self._newest)

    def newest(self) -> Mapping[int, FragmentCommit]:
        """A copy of the table."""
        with self._lock:
            return dict(self._newest)

    def hold(self, commits: Iterable[FragmentCommit]) -> None:
        """Makes versions the newest of their fragments, in place of the ones before."""
        with self._lock:
            for commit in commits:
                self._newest[commit.fragment] = commit

    def find(self, fragment: int, version: Version) -> FragmentCommit:
        """A version, if it is the newest of its fragment."""
        with self._lock:
            newest = self._newest.get(fragment)
        if newest is None or newest.version != version:
            raise VersionGoneError(fragment, version, newest.version if newest else None)
        return newest

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
