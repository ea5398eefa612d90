"""What has become durable, as a family tree of versions: which rounds a version holds, across roll-backs and losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.run_state import RunState
from simulator.facts import Durable, Started


@dataclass(frozen=True, slots=True, eq=False)
class Ancestor:
    """One version's place in the tree.

    Attributes:
        row: the round that made it; None for the initial parameters.
        parent: the version that the round was based on.
        token_count: tokens of all rounds up to here.
    """

    row: CommitRound | None = None
    parent: Ancestor | None = None
    token_count: int = 0

    def rows(self) -> Iterator[CommitRound]:
        """All rounds that the version holds, newest first."""
        here: Ancestor | None = self
        while here is not None:
            if here.row is not None:
                yield here.row
            here = here.parent


class History:
    """The tree, and its newest leaf in every fragment.

    Attributes:
        known: every version that the present volume has held, with its place.
        places: the same of all versions that ever were.
        newest: the newest version of every fragment; empty before the run has parameters.
        state: the newest durable state.
        cursors: committed cursor of every slot, by the rounds of the surviving history.
        branch_count: how often the run went on from an older version.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, Version], Ancestor] = {}
        self.places: dict[tuple[int, Version], Ancestor] = {}
        self.newest: list[Version] = []
        self.state: RunState | None = None
        self.cursors: dict[int, int] = {}
        self.branch_count = 0

    def place(self, fragment: int, version: Version) -> Ancestor | None:
        """A version's place; None if it is not known."""
        return self.known.get((fragment, version))

    def _put(self, fragment: int, version: Version, place: Ancestor) -> None:
        self.known[(fragment, version)] = self.places[(fragment, version)] = place

    def durable(self, fact: Durable) -> None:
        """A transaction was written."""
        item = fact.transaction
        if item.state is not None:
            self.state = item.state
        if item.named and not fact.cut:
            for fragment, version in enumerate(item.named):
                self._put(fragment, version, Ancestor())
            self.newest = list(item.named)
        elif item.named:
            assert item.state is not None
            self._branch(fact.cut, item.named, item.state)
        if item.row is not None:
            self._grow(item.row)

    def started(self, fact: Started) -> None:
        """A syncer took up what the volume holds."""
        restored = fact.restored
        if restored is None:
            return
        if fact.from_mirror or restored.lost:
            self.state = restored.state
            if fact.from_mirror:
                self.known, self.newest = {}, []
            self._branch(restored.cut, restored.state.versions, restored.state)

    def _branch(self, cut: tuple[Version, ...], named: tuple[Version, ...], state: RunState) -> None:
        for fragment, (old, new) in enumerate(zip(cut, named, strict=True)):
            self._put(fragment, new, self.places[(fragment, old)])
        self.newest = list(named)
        self.cursors = dict(state.slot_cursors)
        self.branch_count += 1

    def _grow(self, row: CommitRound) -> None:
        base = self.newest[row.fragment]
        parent = self.known[(row.fragment, base)]
        tokens = sum(contribution.token_count for contribution in row.contributions)
        self._put(row.fragment, row.version, Ancestor(row, parent, parent.token_count + tokens))
        self.newest[row.fragment] = row.version
        for contribution in row.contributions:
            slot = contribution.slot
            self.cursors[slot] = max(self.cursors.get(slot, 0), contribution.cursor)
