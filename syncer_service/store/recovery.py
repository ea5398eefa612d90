"""What a state directory holds when a syncer opens it, and how a run goes on when some of it is damaged.

Payloads are verified by their digests. Where the newest version of a fragment is not whole, the newest one that is
takes its place; the run then goes on in a new timeline, so that nothing based on what is lost can be merged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Final

from decoupled_diloco.core import restoring
from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.ids import RunPhase, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.store import records, rows
from syncer_service.store.interface import FragmentCommit
from syncer_service.store.ledger import REMEDY, Ledger
from syncer_service.store.lock import StateError
from syncer_service.store.payloads import SEGMENTS_KEPT, StoredVersion, replay, segment_names
from syncer_service.store.records import DamageError, Owner, RecordHeader

LOST_REASON: Final = "committed versions were lost with the syncer's disk"
"""Why every learner has to join again."""


@dataclass(frozen=True, slots=True)
class FragmentFound:
    """One fragment as its files have it.

    Attributes:
        commit: The newest version that is whole.
        stored: Its row.
        lost: Rows of newer versions, in the order of their commits.
        damage: Why they are lost; None if nothing is.
    """

    commit: FragmentCommit
    stored: StoredVersion
    lost: tuple[StoredVersion, ...]
    damage: DamageError | None

    @property
    def newest(self) -> StoredVersion:
        """The row of the newest version, whole or not."""
        return self.lost[-1] if self.lost else self.stored


def fragment_folder(state_dir: Path, fragment: int) -> Path:
    """Where a fragment's segments are."""
    return state_dir / "fragments" / f"{fragment:04d}"


def find_fragments(ledger: Ledger, state_dir: Path, count: int) -> list[FragmentFound]:
    """Reads the newest version of every fragment, or the newest one that is whole; on all processors.

    Raises:
        StateError: A fragment has none.
        RowError: The ledger is not what was written.
    """
    owner = ledger.owner
    segments = [_kept_versions(ledger, fragment) for fragment in range(count)]
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="replay") as threads:
        work = [
            threads.submit(_find_fragment, fragment_folder(state_dir, fragment), owner, segments[fragment])
            for fragment in range(count)
        ]
        return [item.result() for item in work]


def _kept_versions(ledger: Ledger, fragment: int) -> list[list[StoredVersion]]:
    """A fragment's newest version with all that it follows from, by segment; of the segments that are kept."""
    by_segment = groupby(_lineage(ledger, fragment), key=lambda stored: stored.placement.segment)
    found = [list(versions)[::-1] for _, versions in islice(by_segment, SEGMENTS_KEPT)]
    if not found:
        raise rows.RowError(f"there is no version of fragment {fragment}")
    return found


def _find_fragment(folder: Path, owner: Owner, segments: Sequence[list[StoredVersion]]) -> FragmentFound:
    lost: list[StoredVersion] = []
    damage: DamageError | None = None
    for versions in segments:
        replayed = replay(folder, owner, versions)
        damage = damage or replayed.damage
        newest = replayed.newest
        intact = [stored for stored in versions if newest is not None and stored.version <= newest.version]
        lost[:0] = versions[len(intact) :]
        if newest is not None:
            return FragmentFound(newest, intact[-1], tuple(lost), damage)
    raise StateError(f"no version of fragment {segments[0][0].fragment} is whole: {damage}; {REMEDY}")


def _lineage(ledger: Ledger, fragment: int) -> Iterator[StoredVersion]:
    """Versions of a fragment from the newest one to what each follows from."""
    where = "sequence = (SELECT sequence FROM versions WHERE fragment = ? ORDER BY timeline DESC, number DESC LIMIT 1)"
    found = next(rows.read_versions(ledger.connection, where, (fragment,)), None)
    while found is not None:
        yield found
        if found.parent is None:
            return
        key = (fragment, found.parent.timeline, found.parent.number)
        where = "fragment = ? AND timeline = ? AND number = ?"
        found = next(rows.read_versions(ledger.connection, where, key), None)


def newest_segments(ledger: Ledger, fragment: int) -> dict[str, int]:
    """The segments that are kept of a fragment, newest first, with the length that the ledger knows of."""
    query = (
        "SELECT segment, record_offset + record_bytes FROM versions WHERE fragment = ?"
        " ORDER BY timeline DESC, number DESC"
    )
    found: dict[str, int] = {}
    for segment, end in ledger.connection.execute(query, (fragment,)):
        if segment not in found and len(found) == SEGMENTS_KEPT:
            break
        found.setdefault(segment, end)
    return found


def forgotten_records(ledger: Ledger, state_dir: Path, found: Sequence[FragmentFound]) -> tuple[RecordHeader, ...]:
    """Whole records of rounds that the ledger knew once.

    A commit that was cut short leaves one record whose transaction is not there. More than one means that the ledger
    itself has lost transactions.
    """
    headers: list[RecordHeader] = []
    for item in found:
        fragment, newest = item.stored.fragment, item.newest.version
        folder = fragment_folder(state_dir, fragment)
        known = newest_segments(ledger, fragment)
        for name in segment_names(folder):
            if name in known or not _is_named(ledger, fragment, name):
                behind = _records_from(folder / name, known.get(name, 0), ledger.owner.store)
                # Not those of a version that was committed at a second attempt.
                headers += [header for header in behind if header.round and header.version > newest]
    return tuple(headers) if len(headers) > 1 else ()


def _is_named(ledger: Ledger, fragment: int, segment: str) -> bool:
    query = "SELECT 1 FROM versions WHERE fragment = ? AND segment = ? LIMIT 1"
    return ledger.connection.execute(query, (fragment, segment)).fetchone() is not None


def lost_commits(ledger: Ledger, found: Sequence[FragmentFound]) -> list[CommitRound]:
    """The rounds whose versions are lost."""
    numbers = [stored.round for item in found for stored in item.lost if stored.round]
    return [
        row.to_commit() for number in numbers for row in rows.read_rounds(ledger.connection, "round = ?", (number,))
    ]


def _records_from(path: Path, offset: int, store: str) -> Iterator[RecordHeader]:
    with path.open("rb", buffering=0) as file:
        try:
            while True:
                header, body_offset = records.read_header(file.fileno(), offset)
                records.read_vectors(file.fileno(), header, body_offset)
                if header.owner.store != store:
                    return
                yield header
                offset = body_offset + header.body_bytes
        except DamageError:
            return


# --- the state ---


@dataclass(frozen=True, slots=True)
class Position:
    """Where the ledger says that a run stands.

    Attributes:
        state: The newest state, with the first versions if it was written before them.
        newer: Committed rounds that it does not know.
        written_at: When it was written, seconds since 1970; None if none was.
    """

    state: RunState
    newer: tuple[CommitRound, ...]
    written_at: float | None

    def check(self, found: Sequence[FragmentFound]) -> None:
        """Compares the newest versions that the ledger has rows of with those that its state and rounds lead to.

        Raises:
            RowError: They differ.
        """
        versions = list(self.state.versions)
        for commit in self.newer:
            versions[commit.fragment] = commit.version
        for version, item in zip(versions, found, strict=True):
            newest = item.newest
            if newest.version != version:
                raise rows.RowError(
                    f"version {newest.version} of fragment {newest.fragment} is the newest that was written down, "
                    f"the run's state says {version}"
                )


def find_position(ledger: Ledger, policy: Policy) -> Position | None:
    """Reads the state and the rounds after it; None: no run.

    Raises:
        RowError: They are not what was written.
    """
    found = rows.read_state(ledger.connection)
    first = tuple(rows.read_versions(ledger.connection, "origin = 'initial'"))
    if found is None and not first and rows.read_model(ledger.connection) is None:
        return None
    state, written_at = found or (SyncerMachine(policy).run_state(), None)
    if not state.versions and first:
        state = _with_first_versions(state, first)
    return Position(state, tuple(_newer(ledger, state)), written_at)


def _with_first_versions(state: RunState, first: Sequence[StoredVersion]) -> RunState:
    """The initial parameters became durable after the state was written."""
    ordered = sorted(first, key=lambda stored: stored.fragment)
    phase = RunPhase.RUNNING if state.phase is RunPhase.INITIALIZING else state.phase
    versions = tuple(stored.version for stored in ordered)
    return replace(state, phase=phase, versions=versions, version_steps=(0,) * len(versions))


def _newer(ledger: Ledger, state: RunState) -> list[CommitRound]:
    found = []
    for fragment, version in enumerate(state.versions):
        where = "fragment = ? AND outcome = 'committed' AND (timeline, number) > (?, ?)"
        found += list(rows.read_rounds(ledger.connection, where, (fragment, version.timeline, version.number)))
    return [row.to_commit() for row in sorted(found, key=lambda row: row.sequence)]


def new_timeline(
    position: Position,
    found: Sequence[FragmentFound],
    lost_commits: Sequence[CommitRound],
    unknown: Sequence[RecordHeader],
    policy: Policy,
) -> RunState:
    """The state of a run that goes on from what is whole.

    Args:
        position: Where the ledger says that it stood.
        found: Every fragment, in order.
        lost_commits: The rounds whose versions are lost.
        unknown: Records of rounds that the ledger does not know, if it has lost them.
        policy: The run's policy.
    """
    machine = SyncerMachine(policy)
    machine.restore(position.state, position.newer, 0.0)
    booked = machine.run_state()  # what is lost can only be taken out of books that hold it
    intact = tuple((item.stored.version, item.stored.global_step) for item in found)
    cut = restoring.without(booked, lost_commits, intact)
    if not unknown:
        return restoring.in_new_timeline(cut, booked, policy, LOST_REASON)
    # A ledger that went back is a copy that lacks what came after it: names, incarnations, timelines.
    cut = _with_unknown(cut, unknown)
    return restoring.in_new_timeline(cut, None, policy, LOST_REASON)


def _with_unknown(state: RunState, unknown: Sequence[RecordHeader]) -> RunState:
    """A state that also knows the numbers of rounds that the ledger has forgotten."""
    versions = list(state.versions)
    for header in unknown:
        name = versions[header.fragment]
        versions[header.fragment] = replace(name, number=max(name.number, header.version.number))
    return replace(
        state,
        versions=tuple(versions),
        newest_opened=max([state.newest_opened, *(header.round for header in unknown)]),
        timeline=max([state.timeline, *(header.version.timeline for header in unknown)]),
    )


def loss_sentences(
    found: Sequence[FragmentFound], lost_commits: Sequence[CommitRound], unknown: Sequence[RecordHeader]
) -> tuple[str, ...]:
    """What was lost, for people: one sentence per fragment."""
    commits = {(commit.fragment, commit.version): commit for commit in lost_commits}
    sentences = []
    for item in found:
        if item.damage is None:
            continue
        names = _listed([stored.version for stored in item.lost])
        text = f"fragment {item.stored.fragment}: {item.damage}, so version {names} is lost"
        for stored in item.lost:
            commit = commits.get((stored.fragment, stored.version))
            if commit is not None:
                tokens = sum(contribution.token_count for contribution in commit.contributions)
                text += f"; round {commit.round} had merged {tokens} tokens of {', '.join(commit.members)} into it"
        sentences.append(f"{text}; it goes on from version {item.stored.version}")
    sentences += [
        f"fragment {header.fragment}: version {header.version} of round {header.round} is lost, because the ledger "
        "has lost its last transactions"
        for header in unknown
    ]
    return tuple(sentences)


def _listed(versions: Sequence[Version]) -> str:
    return ", ".join(str(version) for version in versions)
