"""The durable store: payload files and a ledger in one directory that outlives the syncer.

    lock                                          held while a syncer runs; says which process it is
    ledger.sqlite3                                everything but payloads (`schema`)
    fragments/0007/<timeline>.<number>.<epoch>.seg   payloads of fragment 7 (`payloads`, `records`)

The order of a commit, which every promise rests on:

    1. the payload's record is appended to its segment, and synced (with the folder, if the segment is new);
    2. one transaction writes the round, its contributions, its version with the place of the record, and the run's
       state, and is synced;
    3. only then the caller hears of it, and publishes.

A syncer that is killed before 2 has ended leaves a record that no row names; it is cut off at the next start, and the
round is open again. One that is killed after it has committed. Every transaction looks at the epoch first, so that a
syncer which another one has replaced writes nothing.

Settings: `syncer.base_interval_commits` is `base_interval` here; `syncer.state_dir` is the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Final

from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.effects import CloseRound, CommitRound
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.status import RoundStatus
from decoupled_diloco.runtime import failpoints
from syncer_service.store import recovery, rows
from syncer_service.store.held import HeldVersions, renamed_commits
from syncer_service.store.history import round_status
from syncer_service.store.interface import (
    FIRST_TIMELINE,
    FragmentCommit,
    MergedDelta,
    Restored,
    RunModel,
    StorageError,
)
from syncer_service.store.ledger import LEDGER_NAME, REMEDY, Ledger
from syncer_service.store.lock import DirectoryLock, StateError
from syncer_service.store.payloads import FragmentFiles, Placement, StoredVersion, make_folder, segment_names
from syncer_service.store.records import write_pieces

BASE_INTERVAL_COMMITS: Final = 8
"""Commits of a fragment in one segment; docs/results.md says why."""

PROBE_NAME: Final = "probe"
PROBE_PIECE: Final = memoryview(bytes(1 << 20))
LEDGER_BYTES: Final = 1 << 20
"""Room that a transaction is taken to need."""


class DurableStore(HeldVersions):
    """The store of a run that survives its syncer. See `Store`.

    Args:
        state_dir: The directory; made if it is not there.
        policy: The run's policy.
        base_interval: Commits of a fragment in one segment, from 1 (a whole payload per commit).

    Raises:
        StateError: The directory is in use, damaged beyond repair, of a newer release, cannot be written, or holds a
            run with another number of fragments.
    """

    def __init__(self, state_dir: Path, policy: Policy, base_interval: int = BASE_INTERVAL_COMMITS) -> None:
        super().__init__()
        self.state_dir = state_dir
        self._policy = policy
        self._base_interval = base_interval
        self._files: dict[int, FragmentFiles] = {}
        self._disk = Lock()
        self._is_closed = False
        self._wanted_bytes = 0
        """What the newest write that failed needs; 0 if the newest one succeeded."""
        try:
            with contextlib.ExitStack() as stack, self._storage(LEDGER_BYTES):
                make_folder(state_dir)
                self._lock_file = DirectoryLock(state_dir)
                stack.callback(self._lock_file.release)
                self._ledger = self._open_ledger()
                stack.callback(self._ledger.close)
                self._restored = self._restore()
                stack.pop_all()
        except StorageError as error:
            raise StateError(str(error)) from error

    def _open_ledger(self) -> Ledger:
        path = self.state_dir / LEDGER_NAME
        is_new = not path.exists() or path.stat().st_size == 0
        if is_new and any(segment_names(folder) for folder in self.state_dir.glob("fragments/*")):
            raise StateError(f"the ledger {path} is missing, and payloads of a run are beside it; {REMEDY}")
        ledger = Ledger(path)
        known, wanted = ledger.fragment_count, self._policy.fragment_count
        if known and known != wanted:
            ledger.close()
            raise StateError(
                f"the run in {self.state_dir} has {known} fragments, the run file says {wanted}; "
                "their number cannot change during a run"
            )
        return ledger

    @property
    def epoch(self) -> int:
        """See `Store`."""
        return self._ledger.epoch

    def restored(self) -> Restored | None:
        """See `Store`; the work was done when the directory was opened. To be called before the first write."""
        found = self._restored
        return None if found is None else replace(found, fragments=self.newest())

    # --- opening ---

    def _restore(self) -> Restored | None:
        try:
            return self._read_all()
        except rows.RowError as error:
            raise StateError(f"the ledger {self._ledger.path} is damaged: {error}; {REMEDY}") from error

    def _read_all(self) -> Restored | None:
        position = recovery.find_position(self._ledger, self._policy)
        if position is None:
            self._tidy()
            return None
        connection = self._ledger.connection
        model, values = rows.read_model(connection), rows.read_config_values(connection)
        found = recovery.find_fragments(self._ledger, self.state_dir, len(position.state.versions))
        position.check(found)
        unknown = recovery.forgotten_records(self._ledger, self.state_dir, found)
        state, newer = position.state, position.newer
        losses: tuple[str, ...] = ()
        commits = tuple(item.commit for item in found)
        if unknown or any(item.damage for item in found):
            lost = recovery.lost_commits(self._ledger, found)
            losses = recovery.loss_sentences(found, lost, unknown)
            state, newer = recovery.new_timeline(position, found, lost, unknown, self._policy), ()
            commits = self._fall_back(commits, state, [commit.round for commit in lost], losses)
        self.hold(commits)
        self._tidy()
        stopped = None if position.written_at is None else max(0.0, time.time() - position.written_at)
        return Restored(state, newer, {}, model, losses, values, stopped)

    def _fall_back(
        self, intact: Sequence[FragmentCommit], state: RunState, lost_rounds: Sequence[int], losses: Sequence[str]
    ) -> tuple[FragmentCommit, ...]:
        """Goes on in a new timeline: the values of `intact` under the names in `state`, in one transaction."""
        commits = renamed_commits({commit.fragment: commit.state for commit in intact}, state)
        parents = {commit.fragment: commit.version for commit in intact}

        def put() -> None:
            self._ledger.put_timeline(state.timeline, "fallback", "\n".join(losses))
            self._ledger.put_lost(lost_rounds)
            self._ledger.put_state(state)

        self._write_all(commits, "fallback", parents, put)
        return commits

    def _tidy(self) -> None:
        """Cuts off and removes what no row names, and old segments."""
        for fragment in range(self._policy.fragment_count):
            folder = recovery.fragment_folder(self.state_dir, fragment)
            kept = recovery.newest_segments(self._ledger, fragment)
            for name, byte_count in kept.items():
                with contextlib.suppress(FileNotFoundError):
                    if (folder / name).stat().st_size > byte_count:
                        os.truncate(folder / name, byte_count)
            self._fragment_files(fragment).keep(kept)

    # --- writing ---

    def begin(self, run_id: str, config_values: Mapping[str, str], fragment_count: int) -> None:
        """See `Store`.

        Raises:
            StateError: The directory holds another run.
        """
        with self._writing():
            self._ledger.begin(run_id, config_values, fragment_count)
            self._files.clear()  # they carry the run's id

    def save_model(self, model: RunModel) -> None:
        """See `Store`."""
        with self._writing():
            self._ledger.put_model(model)

    def save_state(self, state: RunState) -> None:
        """See `Store`."""
        with self._writing(), self._ledger.transaction():
            self._ledger.put_state(state)

    def record_abandoned(self, row: CloseRound) -> None:
        """See `Store`; it outlives the process, but a power failure may take it."""
        with self._writing():
            self._ledger.put_abandoned(row)

    def commit_initial(self, learner: str, incarnation: int, fragment_count: int) -> tuple[FragmentCommit, ...]:
        """See `Store`. What is staged stays so until it is committed."""
        commits = self.staged_commits(learner, incarnation, fragment_count)
        with self._writing(sum(12 * commit.state.theta.size for commit in commits)):
            self._write_all(
                commits, "initial", {}, lambda: self._ledger.put_timeline(FIRST_TIMELINE, "initial", f"from {learner}")
            )
        self.hold(commits)
        self.forget_staged()
        return commits

    def commit_round(self, commit: FragmentCommit, merged: MergedDelta, row: CommitRound, state: RunState) -> None:
        """See `Store`, and the order of a commit at the top of this module."""
        fragment = commit.fragment
        parent = self.newest()[fragment].version
        files = self._fragment_files(fragment)
        with self._writing(files.commit_bytes(commit.state.theta.size)):
            self._ledger.check_epoch()
            placement = files.append(commit, parent, row.round, merged)
            stored = StoredVersion(fragment, commit.version, parent, commit.global_step, row.round, "round", placement)
            with self._kept_if_committed({fragment: placement}), self._ledger.transaction():
                self._ledger.put_commit(row, stored, state)
                failpoints.hit("commit.in_transaction")
            failpoints.hit("commit.after_transaction")
            self.hold([commit])
            if placement.offset == 0:
                files.keep(recovery.newest_segments(self._ledger, fragment))

    def roll_back(self, states: Mapping[int, FragmentState], state: RunState) -> tuple[FragmentCommit, ...]:
        """See `Store`."""
        commits = renamed_commits(states, state)

        def put() -> None:
            self._ledger.put_timeline(state.timeline, "roll_back", "")
            self._ledger.put_state(state)

        with self._writing(sum(12 * commit.state.theta.size for commit in commits)):
            self._write_all(commits, "roll_back", {}, put)
        self.hold(commits)
        return commits

    def _write_all(
        self,
        commits: Sequence[FragmentCommit],
        origin: str,
        parents: Mapping[int, Version],
        put: Callable[[], None],
    ) -> None:
        """Writes a version of every fragment; in one transaction they count."""
        self._ledger.check_epoch()
        placements: dict[int, Placement] = {}
        with self._kept_if_committed(placements):
            for commit in commits:
                files = self._fragment_files(commit.fragment)
                placements[commit.fragment] = files.append(commit, parents.get(commit.fragment), 0, None)
            with self._ledger.transaction():
                for commit in commits:
                    place, parent = placements[commit.fragment], parents.get(commit.fragment)
                    self._ledger.put_version(
                        StoredVersion(commit.fragment, commit.version, parent, commit.global_step, 0, origin, place)
                    )
                put()
        for commit in commits:
            kept = recovery.newest_segments(self._ledger, commit.fragment)
            self._fragment_files(commit.fragment).keep(kept)

    @contextlib.contextmanager
    def _kept_if_committed(self, placements: Mapping[int, Placement]) -> Iterator[None]:
        """Takes records away again whose transaction failed."""
        try:
            yield
        except BaseException as error:
            is_unsure = isinstance(error, sqlite3.Error) and _primary_code(error) == sqlite3.SQLITE_IOERR
            for fragment, placement in placements.items():
                if is_unsure:
                    # A transaction whose sync failed may be there after a crash, and then it needs its records.
                    self._fragment_files(fragment).abandon()
                else:
                    self._fragment_files(fragment).undo(placement)
            raise

    def recent_rounds(self, limit: int) -> tuple[RoundStatus, ...]:
        """See `Store`."""
        newest = "sequence > (SELECT max(sequence) FROM rounds) - ?"
        return tuple(round_status(row) for row in rows.read_rounds(self._ledger.connection, newest, (limit,)))

    def probe(self) -> None:
        """See `Store`: writes and syncs as many bytes as what failed or the largest commit needs; one transaction."""
        commits = (self._fragment_files(f).commit_bytes(c.state.theta.size) for f, c in self.newest().items())
        needed = max(LEDGER_BYTES, self._wanted_bytes, *commits)
        path = self.state_dir / PROBE_NAME
        with self._writing(needed):
            self._ledger.check_epoch()
            try:
                with path.open("wb", buffering=0) as file:
                    for start in range(0, needed, len(PROBE_PIECE)):
                        write_pieces(file.fileno(), [PROBE_PIECE[: needed - start]], start)
                    os.fsync(file.fileno())
            finally:
                path.unlink(missing_ok=True)
            self._ledger.put_probe()

    def close(self) -> None:
        """See `Store`."""
        with self._disk:
            if not self._is_closed:
                self._is_closed = True
                self._ledger.close()
                self._lock_file.release()

    # --- parts ---

    def _fragment_files(self, fragment: int) -> FragmentFiles:
        files = self._files.get(fragment)
        if files is None:
            folder = recovery.fragment_folder(self.state_dir, fragment)
            files = FragmentFiles(folder, self._ledger.owner, self._ledger.epoch, self._base_interval)
            self._files[fragment] = files
        return files

    @contextlib.contextmanager
    def _writing(self, needed_bytes: int = LEDGER_BYTES) -> Iterator[None]:
        """One caller at a time; what the disk says becomes a `StorageError`."""
        with self._disk, self._storage(needed_bytes):
            if self._is_closed:
                raise StorageError("the store is closed")
            try:
                self._ledger.check_in_place()
                yield
            except BaseException:
                self._wanted_bytes = max(self._wanted_bytes, needed_bytes)
                raise
            self._wanted_bytes = 0

    @contextlib.contextmanager
    def _storage(self, needed_bytes: int) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except (OSError, sqlite3.DatabaseError) as error:
            if isinstance(error, (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InternalError)):
                raise
            raise StorageError(self._complaint(error, needed_bytes)) from error

    def _complaint(self, error: OSError | sqlite3.Error, needed_bytes: int) -> str:
        where, what = self.state_dir, str(error)
        if isinstance(error, OSError):
            where, what = error.filename or where, error.strerror or what
            is_about_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
        else:
            is_about_room = _primary_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        room = ""
        if is_about_room:
            with contextlib.suppress(OSError):
                room = f"; {shutil.disk_usage(self.state_dir).free} bytes are free, {needed_bytes} are needed"
        return f"cannot write to {where}: {what}{room}"


def _primary_code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 where there is none."""
    return (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
