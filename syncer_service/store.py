"""What the syncer keeps of a run, behind one interface; and the implementation in memory.

Every method may block (a durable store writes and syncs), so callers run them in the store's own executor thread: one
caller at a time. Values are immutable: a version, once committed, never changes, and it stays readable as long as
somebody has it pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Protocol

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.ids import Role, Version

FIRST_TIMELINE: Final = 1
FIRST_NUMBER: Final = 1

LEDGER_ROWS_MAX: Final = 10_000
"""Ledger rows that the store in memory keeps; a durable store keeps them all."""


class VersionGoneError(LookupError):
    """A version does not exist, or is no longer kept.

    Attributes:
        newest: The fragment's newest version; None before the run has parameters.
    """

    def __init__(self, fragment: int, version: Version, newest: Version | None) -> None:
        self.newest = newest
        super().__init__(f"fragment {fragment} has no version {version} (newest: {newest or 'none'})")


@dataclass(frozen=True, slots=True)
class FragmentCommit:
    """One version of one fragment with all that belongs to it.

    Attributes:
        fragment: The fragment.
        version: Its name.
        global_step: Global steps that the run had made when its round was due; 0 for the initial parameters.
        state: Theta, outer momentum, downlink residual.
        delta_base: The version that `delta_payload` turns into this one, or None.
        delta_payload: The step in the download encoding, for holders of exactly `delta_base`, or None.
    """

    fragment: int
    version: Version
    global_step: int
    state: FragmentState
    delta_base: Version | None = None
    delta_payload: memoryview | None = None


@dataclass(frozen=True, slots=True)
class LedgerMember:
    """One merged contribution, as the ledger keeps it."""

    learner: str
    incarnation: int
    weight: float
    step_count: int
    token_count: int
    cursor: int


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """What the ledger keeps of a committed round."""

    round: int
    fragment: int
    version: Version
    global_step: int
    members: tuple[LedgerMember, ...]
    reason: str


class Store(Protocol):
    """The interface that a durable store fills."""

    def record_incarnation(self, learner: str, incarnation: int, role: Role, slot: int) -> None:
        """Makes an incarnation and its slot durable; called before they are handed out."""

    def stage_initial(self, learner: str, incarnation: int, fragment: int, theta: FloatVector) -> str:
        """Keeps a fragment of the initial parameters aside and returns its digest.

        A second one replaces the first.
        """

    def commit_initial(self, learner: str, incarnation: int, fragment_count: int) -> tuple[FragmentCommit, ...]:
        """Turns the staged fragments of one incarnation into the first versions, in one transaction.

        Raises:
            ValueError: Not all fragments are staged.
        """

    def discard_initial(self, learner: str, incarnation: int) -> None:
        """Drops what an incarnation has staged."""

    def commit_round(self, commit: FragmentCommit, row: LedgerRow) -> None:
        """Makes a version and its ledger row durable, in one transaction; it is the newest from now on."""

    def newest(self) -> Mapping[int, FragmentCommit]:
        """The newest version of every fragment; empty before the run has parameters."""

    def pin(self, fragment: int, version: Version) -> FragmentCommit:
        """Reads a version and keeps it until one more `unpin`.

        Raises:
            VersionGoneError: It is not there.
        """

    def unpin(self, fragment: int, version: Version) -> None:
        """Ends what `pin` began."""

    def close(self) -> None:
        """Ends the use of the store."""


@dataclass(slots=True)
class MemoryStore:
    """Keeps everything in memory: the newest version of every fragment, and older ones while they are pinned."""

    incarnations: dict[str, tuple[int, Role, int]] = field(default_factory=dict)
    ledger: list[LedgerRow] = field(default_factory=list)
    _newest: dict[int, FragmentCommit] = field(default_factory=dict)
    _pinned_old: dict[tuple[int, Version], FragmentCommit] = field(default_factory=dict)
    _pin_counts: Counter[tuple[int, Version]] = field(default_factory=Counter)
    _staged: dict[tuple[str, int], dict[int, FloatVector]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    @property
    def version_count(self) -> int:
        """Versions held, newest and pinned."""
        return len(self._newest) + len(self._pinned_old)

    def record_incarnation(self, learner: str, incarnation: int, role: Role, slot: int) -> None:
        """Remembers the newest incarnation of a learner."""
        self.incarnations[learner] = (incarnation, role, slot)

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

    def commit_round(self, commit: FragmentCommit, row: LedgerRow) -> None:
        """Replaces the newest version; the one before stays while it is pinned."""
        with self._lock:
            old = self._newest.get(commit.fragment)
            if old is not None and self._pin_counts[commit.fragment, old.version]:
                self._pinned_old[commit.fragment, old.version] = old
            self._newest[commit.fragment] = commit
            self.ledger.append(row)
            del self.ledger[:-LEDGER_ROWS_MAX]

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
