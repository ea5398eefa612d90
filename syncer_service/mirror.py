"""The mirror: an asynchronous copy of every commit in another place, to go on from when the disk is lost.

    <mirror_url>/manifest.json                  replaced by every copy, after all that it names is there
                /fragment-0000.1.17.payload     one for every fragment

A copy takes the newest position of the run, so a mirror that is slower than the run leaves positions out and is always
one that the run can go on from. It never delays a commit. What is lost with the disk is what has been committed since
the position of the manifest: `mirror_lag_rounds` says how many rounds, and `mirror_lag_seconds` how old it is.

A mirror has a *lineage*, drawn with its first copy and kept in the state directory too. A syncer whose state directory
does not know it writes nothing there: it is another run, or this one begun anew after its disk was lost.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import uuid
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.checkpoint_cuts import Cuts
from syncer_service.checkpoint_files import (
    PAYLOAD_PATTERN,
    Cut,
    Manifest,
    new_manifest,
    payload_name,
    position_of,
    read_manifest,
    write_manifest,
    write_payload,
)
from syncer_service.checkpoint_storage import StorageFolder, open_folder
from syncer_service.serving import Serving, carried_out
from syncer_service.store.records import DamageError, Owner

LINEAGE_FILE: Final = "mirror.json"
"""In the state directory."""

RETRY_SECONDS_MIN: Final = 1.0
RETRY_SECONDS_MAX: Final = 30.0
"""Between two attempts at a copy; the wait doubles each time."""

LOOK_SECONDS: Final = 1.0
"""How often the log looks at the lag."""

LAG_ROUNDS_TOLD: Final = 16
"""The log tells of a lag of so many rounds, and again each time it has doubled."""

log = get_logger(__name__)


class MirrorRefusedError(Exception):
    """What lies at the mirror's URL must not be overwritten by this syncer."""


def read_lineage(state_dir: Path) -> str:
    """The lineage that a state directory knows; empty: none yet.

    Raises:
        MirrorRefusedError: What says it is damaged.
    """
    try:
        return str(json.loads(open_folder(str(state_dir)).read(LINEAGE_FILE))["lineage"])
    except FileNotFoundError:
        return ""
    except (ValueError, KeyError, TypeError) as error:
        raise MirrorRefusedError(
            f"{state_dir / LINEAGE_FILE} is damaged ({error!r}), so which mirror is this run's is not known; remove it "
            "and give another syncer.mirror_url"
        ) from error


def write_lineage(state_dir: Path, lineage: str) -> None:
    """Has a state directory know a lineage."""
    text = json.dumps({"lineage": lineage}) + "\n"
    open_folder(str(state_dir)).write(LINEAGE_FILE, [memoryview(text.encode())])


class MirrorFiles:
    """The mirror's files; every method blocks. For one thread at a time.

    Args:
        folder: Where the mirror lies.
        state_dir: The run's state directory.
    """

    def __init__(self, folder: StorageFolder, state_dir: Path) -> None:
        self._folder = folder
        self._state_dir = state_dir
        self._kept: set[str] | None = None
        """Payload files of the newest manifest but one: somebody may be reading them."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self._folder.place()

    def copy(self, cut: Cut) -> int:
        """Makes the mirror what a cut says; returns the payload bytes written.

        Raises:
            MirrorRefusedError: Another lineage, or a newer timeline, lies there.
        """
        found = self._find()
        self._check(found, cut)
        lineage = self._lineage()
        files, byte_count = [], 0
        known = {file.name: file for file in found.files} if found is not None else {}
        for fragment, commit in sorted(cut.fragments.items()):
            file = known.get(payload_name(fragment, commit.version))
            if found is None or file is None or found.state.versions[fragment] != commit.version:
                file = write_payload(self._folder, "", Owner(lineage, cut.run_id), commit)
                byte_count += file.byte_count
            files.append(file)
        failpoints.hit("mirror.before_manifest")
        write_manifest(self._folder, "", new_manifest("mirror", lineage, cut, files))
        self._remove_old({file.name for file in files}, set(known))
        return byte_count

    def _find(self) -> Manifest | None:
        """Read afresh for every copy, because another syncer may have gone on from it.

        Raises:
            MirrorRefusedError: It is damaged.
        """
        try:
            return read_manifest(self._folder, "")
        except FileNotFoundError:
            return None
        except DamageError as damage:
            raise MirrorRefusedError(
                f"{damage}; whose mirror it was is not known, so it is not overwritten: remove that file to have the "
                "mirror begun anew there, or give another syncer.mirror_url"
            ) from damage

    def _check(self, found: Manifest | None, cut: Cut) -> None:
        if found is None:
            return
        where = f"{self.place} holds the mirror of run {found.run_id!r} at global step {found.state.global_step}"
        if found.kind != "mirror" or found.id != read_lineage(self._state_dir):
            raise MirrorRefusedError(
                f"{where}, which this run has not come from, and is not overwritten; give another syncer.mirror_url, "
                "or begin in an empty state directory with --restore-from"
            )
        if found.position > position_of(cut.state):
            raise MirrorRefusedError(
                f"{where}, round {found.state.committed_count} of timeline {found.state.timeline}, and this syncer is "
                f"only at round {cut.state.committed_count} of {cut.state.timeline}: another one has gone on from it"
            )

    def _lineage(self) -> str:
        """The run's; drawn, and durable, before the first copy."""
        lineage = read_lineage(self._state_dir)
        if not lineage:
            lineage = uuid.uuid4().hex
            write_lineage(self._state_dir, lineage)
        return lineage

    def _remove_old(self, newest: set[str], before: set[str]) -> None:
        """Removes what neither this manifest nor the one before names."""
        if self._kept is None:  # the first copy of this process: also what an earlier one has left
            self._kept = {name for name in self._folder.names() if re.fullmatch(PAYLOAD_PATTERN, name)}
        for name in self._kept - newest - before:
            self._folder.remove(name)
        self._kept = newest | before


class Mirror:
    """Keeps a mirror up to date. For the event loop's thread.

    Args:
        serving: The run.
        cuts: What is copied.
        files: Where to.
        executor: A thread for it.
    """

    def __init__(self, serving: Serving, cuts: Cuts, files: MirrorFiles, executor: Executor) -> None:
        self._serving = serving
        self._machine = serving.machine
        self._cuts = cuts
        self._files = files
        self._executor = executor
        self._mirrored: RunState | None = None
        self._taken_at = serving.clock.now()
        self._failure = ""
        """Why the newest attempt failed; empty if it did not."""
        self._news = asyncio.Event()
        serving.metrics.mirror_lag_rounds.set_function(self.lag_rounds)
        serving.metrics.mirror_lag_seconds.set_function(self.lag_seconds)

    @property
    def is_behind(self) -> bool:
        """Whether something is committed that the mirror does not have."""
        return self._cuts.has_parameters and (
            self._mirrored is None
            or self._mirrored.phase is not self._machine.phase
            or list(self._mirrored.versions) != self._machine.versions
        )

    def lag_rounds(self) -> int:
        """Committed rounds that would be lost with the disk; a roll-back that is not mirrored counts as one."""
        if not self.is_behind:
            return 0
        before = self._mirrored.committed_count if self._mirrored is not None else 0
        return max(1, self._machine.rounds.committed_count - before)

    def lag_seconds(self) -> float:
        """Age of the mirrored position while there is a newer one: so much of the run, at most, would be lost."""
        return self._serving.clock.now() - self._taken_at if self.is_behind else 0.0

    def problem(self) -> str:
        """What an operator should know, in words; empty while all is well."""
        rounds = self.lag_rounds()
        if not self._failure and rounds < LAG_ROUNDS_TOLD:
            return ""
        why = f": {self._failure}" if self._failure else ""
        return f"the mirror is {rounds} rounds behind{why}; they would be lost with the syncer's disk"

    async def run(self) -> None:
        """Copies until it is cancelled."""
        wait = RETRY_SECONDS_MIN
        while True:
            await self._serving.driver.wait_until(lambda: self.is_behind)
            if not self.is_behind:  # the driver has ended
                self._failure = "the syncer is shutting down"
                self._news.set()
                return
            try:
                await self._copy()
            except Exception as error:
                self._failed(error)
                await asyncio.sleep(wait)
                wait = min(2 * wait, RETRY_SECONDS_MAX)
            else:
                if self._failure:
                    log.info("mirror_works_again", place=self._files.place)
                self._failure, wait = "", RETRY_SECONDS_MIN
                self._news.set()

    def _failed(self, error: Exception) -> None:
        """Counts every failure, and logs each kind once."""
        self._serving.metrics.mirror_failures.inc()
        words = str(error) if isinstance(error, MirrorRefusedError) else f"{type(error).__name__}: {error}"
        if words != self._failure:
            rounds = self.lag_rounds()
            log.error("mirror_failed", reason=words, lag_rounds=rounds, hint="tried again; the run goes on without it")
        self._failure = words
        self._news.set()

    async def _copy(self) -> None:
        taken_at, cut = self._serving.clock.now(), await self._cuts.take()
        started = self._serving.clock.now()
        byte_count = await carried_out(self._executor, lambda: self._files.copy(cut))
        self._mirrored, self._taken_at = cut.state, taken_at
        self._serving.metrics.mirror_copied(byte_count)
        log.debug("mirrored", bytes=byte_count, seconds=round(self._serving.clock.now() - started, 3))

    async def tell_lag(self) -> None:
        """Logs when the mirror falls behind, and when it has caught up; until it is cancelled."""
        told = LAG_ROUNDS_TOLD
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            rounds = self.lag_rounds()
            if rounds >= told:
                told = LAG_ROUNDS_TOLD * 2 ** (int(math.log2(rounds / LAG_ROUNDS_TOLD)) + 1)
                log.warning("mirror_lags", rounds=rounds, seconds=round(self.lag_seconds(), 1), place=self._files.place)
            elif rounds < LAG_ROUNDS_TOLD // 4 and told > LAG_ROUNDS_TOLD:
                told = LAG_ROUNDS_TOLD
                log.info("mirror_caught_up", rounds=rounds)

    async def catch_up(self, seconds_max: float) -> None:
        """Waits until the mirror has everything, unless it does not work."""
        try:
            async with asyncio.timeout(seconds_max):
                while self.is_behind and not self._failure:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        if rounds := self.lag_rounds():
            log.warning("mirror_ends_behind", rounds=rounds, place=self._files.place)
