"""The rules of a durable store, without arrays: what is written in which order, and what a restart makes of it.

A commit is one payload appended and synced, and then one transaction with the round's row and the run's state. Payloads
are bases or deltas on the version before, as the interval of the bases says. Every start counts the store's epoch up,
and a syncer with an older one can write nothing any more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TypeVar

from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.ids import RunPhase, Version
from decoupled_diloco.core.plain import from_plain, to_plain
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.restoring import in_new_timeline, without
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.disk import SimulatedDisk

LEDGER = "ledger"

Value = TypeVar("Value")


class FencedError(Exception):
    """A newer syncer has opened the store."""


class UnreadableError(Exception):
    """Nothing is left that a run could go on from."""


@dataclass(frozen=True, slots=True)
class Payload:
    """The record of one version; `base`: the version that it is a delta on, None for a full one."""

    version: Version
    base: Version | None = None


@dataclass(frozen=True, slots=True)
class Transaction:
    """One record of the ledger.

    Attributes:
        epoch: of who wrote it.
        state: the run's state, if one was written.
        row: a committed round.
        named: versions that came to be without a round, by fragment: the initial ones, those of a new timeline.
        steps: global steps made at each of them.
    """

    epoch: int
    state: RunState | None = None
    row: CommitRound | None = None
    named: tuple[Version, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """What a store held when it was opened.

    Attributes:
        state: the newest state.
        newer: rounds that it may not know, in the order of their commits.
        lost: rounds whose versions are damaged; the state is in a new timeline then.
        cut: the versions that the run goes on from, under their old names, if the timeline is new.
    """

    state: RunState
    newer: tuple[CommitRound, ...] = ()
    lost: tuple[CommitRound, ...] = ()
    cut: tuple[Version, ...] = ()


def written_down(kind: type[Value], value: Value) -> Value:
    """A value after its way through a file."""
    return from_plain(kind, json.loads(json.dumps(to_plain(value))))


class SimulatedStore:
    """One syncer's use of a disk. Every method is one step that either happens or does not.

    Args:
        disk: where it is.
        base_interval: commits from one full payload to the next; 1: every payload is full.
    """

    def __init__(self, disk: SimulatedDisk, base_interval: int = 4) -> None:
        self.disk = disk
        self.base_interval = base_interval
        ledger = disk.file(LEDGER)
        while ledger.records and ledger.records[-1].damaged:
            ledger.records.pop()
        ledger.durable_count = len(ledger.records)
        self.epoch = 1 + self._newest_epoch()
        self._since_base: dict[int, int] = {}
        self._write(Transaction(self.epoch), even_if_full=True)

    # ---- writing -----------------------------------------------------------------------------------------------------

    def append_payload(self, fragment: int, version: Version, base: Version | None) -> None:
        """Writes a version's payload, not durable yet; full where `base` is None or it is time for one.

        Raises:
            DiskFullError: there is no room.
        """
        count = self._since_base.get(fragment, self.base_interval)
        is_full = base is None or count >= self.base_interval
        self.disk.append(payload_file(fragment), Payload(version, None if is_full else base))
        self._since_base[fragment] = 1 if is_full else count + 1

    def sync_payload(self, fragment: int) -> None:
        """Makes a fragment's payloads durable."""
        self.disk.sync(payload_file(fragment))

    def commit(self, row: CommitRound, state: RunState) -> None:
        """Makes a round count, its payload being durable.

        Raises:
            DiskFullError: there is no room.
            FencedError: the store is another syncer's.
        """
        self._write(Transaction(self.epoch, state, row))

    def name(self, versions: tuple[Version, ...], steps: tuple[int, ...], state: RunState | None) -> None:
        """Makes versions count that come without a round. Raises as `commit` does."""
        self._write(Transaction(self.epoch, state, named=versions, steps=steps))

    def save(self, state: RunState) -> None:
        """Makes a state count. Raises as `commit` does."""
        self._write(Transaction(self.epoch, state))

    def probe(self) -> None:
        """Finds out whether it can be written to. Raises as `commit` does."""
        self._write(Transaction(self.epoch))

    def _write(self, transaction: Transaction, even_if_full: bool = False) -> None:
        if self._newest_epoch() > self.epoch:
            raise FencedError(f"epoch {self.epoch} was ended by epoch {self._newest_epoch()}")
        full, self.disk.full = self.disk.full, self.disk.full and not even_if_full
        try:
            self.disk.append(LEDGER, transaction)
        finally:
            self.disk.full = full
        self.disk.sync(LEDGER)

    def _newest_epoch(self) -> int:
        records = self.disk.file(LEDGER).records
        return records[-1].content.epoch if records else 0

    def marks(self) -> dict[str, int]:
        """How much of every file is durable: what a mirror copies."""
        return {name: file.durable_count for name, file in self.disk.files.items()}

    # ---- reading -----------------------------------------------------------------------------------------------------

    def transactions(self) -> list[Transaction]:
        """All that is whole, in order."""
        return [record.content for record in self.disk.file(LEDGER).records if not record.damaged]

    def restored(self, policy: Policy, *, is_mirror: bool = False) -> Restored | None:
        """What a restart takes up; None: nothing was ever saved.

        Versions that cannot be read any more, or a mirror in place of the volume, lead into a new timeline, which is
        durable when this returns.
        """
        transactions = self.transactions()
        states = [t.state for t in transactions if t.state is not None]
        if not states:
            return None
        state = written_down(RunState, states[-1])
        if not state.versions:
            named = next((t.named for t in reversed(transactions) if t.named), ())
            if named and named[0].timeline != state.timeline:
                named = ()  # of a volume that was lost before the state knew them
            if named and not is_mirror:  # they became durable after the state was written
                phase = RunPhase.RUNNING if state.phase is RunPhase.INITIALIZING else state.phase
                steps = (0,) * len(named)
                return Restored(replace(state, phase=phase, versions=named, version_steps=steps))
            if not is_mirror:
                return Restored(state)
            state = in_new_timeline(state, None, policy, "the volume was lost")
            self._write(Transaction(self.epoch, state), even_if_full=True)
            return Restored(state)
        rows = [written_down(CommitRound, t.row) for t in transactions if t.row is not None and _is_newer(t.row, state)]
        intact, lost = self._intact(policy)
        if not lost and not is_mirror:
            return Restored(state, tuple(rows))
        reason = "damaged versions were given up" if lost else "the volume was lost"
        machine = SyncerMachine(policy)
        machine.restore(state, rows, 0.0)
        newest = machine.run_state()  # what is lost can only be taken out of books that hold it
        cut = without(newest, lost, tuple(intact))
        state = in_new_timeline(cut, None if is_mirror else newest, policy, reason)
        self._rename(state)
        return Restored(written_down(RunState, state), lost=tuple(lost), cut=tuple(version for version, _ in intact))

    def _rename(self, state: RunState) -> None:
        full, self.disk.full = self.disk.full, False  # a fallback waits for room; here it has it at once
        for fragment, version in enumerate(state.versions):
            self.append_payload(fragment, version, None)
            self.sync_payload(fragment)
        self.name(state.versions, state.version_steps, state)
        self.disk.full = full

    def _intact(self, policy: Policy) -> tuple[list[tuple[Version, int]], list[CommitRound]]:
        """Per fragment the newest version that can be read, with its steps; and the rows of those after it."""
        intact: list[tuple[Version, int]] = []
        lost: list[tuple[int, CommitRound]] = []
        history = self.history(policy)
        for fragment in range(policy.fragment_count):
            readable = self._readable(fragment)
            for position, version, step, row in reversed(history[fragment]):
                if version in readable:
                    intact.append((version, step))
                    break
                if row is None:
                    raise UnreadableError(f"no version of fragment {fragment} can be read")
                lost.append((position, row))
        return intact, [row for _, row in sorted(lost, key=lambda pair: pair[0])]

    def history(self, policy: Policy) -> list[list[tuple[int, Version, int, CommitRound | None]]]:
        """Per fragment: position in the ledger, version, steps and row of all versions since the newest renaming."""
        history: list[list[tuple[int, Version, int, CommitRound | None]]] = [[] for _ in policy.fragment_offsets]
        for position, item in enumerate(self.transactions()):
            for fragment, version in enumerate(item.named):
                history[fragment] = [(position, version, item.steps[fragment], None)]
            if item.row is not None:
                made = item.row.global_step + 1
                step = min(made, policy.total_steps) if policy.total_steps else made
                history[item.row.fragment].append((position, item.row.version, step, item.row))
        return history

    def _readable(self, fragment: int) -> set[Version]:
        readable: set[Version] = set()
        for record in self.disk.file(payload_file(fragment)).records:
            payload = record.content
            if not record.damaged and (payload.base is None or payload.base in readable):
                readable.add(payload.version)
        return readable


def payload_file(fragment: int) -> str:
    """The file with a fragment's payloads."""
    return f"fragment-{fragment}"


def _is_newer(row: CommitRound, state: RunState) -> bool:
    known = state.versions[row.fragment]
    return (row.version.timeline, row.version.number) > (known.timeline, known.number)
