"""Checkpoints: restore points of the run, written in the background while it goes on.

    <checkpoint_url>/<id>/manifest.json        written last; a folder without one is no checkpoint
                         /fragment-0000.1.17.payload, ...

One is made when an operator asks for it, every `syncer.checkpoint_interval_steps` global steps, and at the end of the
run. Of those that nobody asked for, the newest `syncer.checkpoints_kept` are kept. One that is being read is never
removed. A checkpoint that cannot be written is tried again; the run does not notice.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.wire import status
from syncer_service.checkpoint_cuts import Cuts
from syncer_service.checkpoint_files import Manifest, position_of
from syncer_service.checkpoint_folder import ID_PATTERN, CheckpointFolder, Listing
from syncer_service.serving import Serving, carried_out
from syncer_service.shell import Shell
from syncer_service.store.records import DamageError

RETRY_SECONDS_MIN: Final = 5.0
RETRY_SECONDS_MAX: Final = 300.0
"""Between two attempts at an automatic checkpoint; the wait doubles each time."""

Result = TypeVar("Result")

log = get_logger(__name__)


class Checkpoints:
    """The checkpoints of one run. For the event loop's thread.

    Args:
        serving: The run.
        shell: Carries a roll-back out.
        cuts: What checkpoints are made of.
        folder: Where they lie.
        executor: Threads for everything that touches the folder: at least two, so that a list need not wait for a
            checkpoint that is being written.
        interval_steps: Global steps between automatic ones; 0: none.
        kept_count: Automatic ones that are kept, from 1.
    """

    def __init__(
        self,
        serving: Serving,
        shell: Shell,
        cuts: Cuts,
        folder: CheckpointFolder,
        executor: Executor,
        *,
        interval_steps: int,
        kept_count: int,
    ) -> None:
        self._serving = serving
        self._machine = serving.machine
        self._shell = shell
        self._cuts = cuts
        self._folder = folder
        self._executor = executor
        self._interval_steps = interval_steps
        self._kept_count = kept_count
        self._pins: Counter[str] = Counter()
        self.problem = ""
        """Why the newest automatic one could not be written; empty if it could."""
        self._writing = asyncio.Lock()
        self._roll_backs: set[asyncio.Task[None]] = set()

    # --- what operators ask for ---

    async def create(self, checkpoint: str = "", reason: str = "", *, automatic: bool = False) -> Manifest:
        """Writes one; returns when it can be rolled back to.

        Args:
            checkpoint: Its id; empty: one is made from timeline and global step.
            reason: In words.
            automatic: Nobody asked for it.

        Raises:
            PeerError: INVALID_FIELD for an id that cannot be used, WRONG_STATE for one that is taken, NOT_READY before
                the run has parameters, INTERNAL when it could not be written.
        """
        if checkpoint and not re.fullmatch(ID_PATTERN, checkpoint):
            raise PeerError(
                Reason.INVALID_FIELD,
                f"checkpoint_id = {checkpoint!r}: must be 1 to 63 of a-z, 0-9 and -, and neither start nor end with -",
            )
        async with self._writing:
            cut = await self._cuts.take()
            started = self._serving.clock.now()
            try:
                manifest = await self._off_loop(lambda: self._folder.write(cut, checkpoint, reason, automatic))
            except Exception as error:
                self._serving.metrics.checkpoints.labels(outcome="failed").inc()
                raise _failure(error, f"the checkpoint could not be written to {self._folder.place}") from error
        seconds = self._serving.clock.now() - started
        self._serving.metrics.checkpoint_written(manifest.state.global_step, manifest.byte_count, seconds)
        log.info(
            "checkpoint_written",
            checkpoint=manifest.id,
            global_step=manifest.state.global_step,
            bytes=manifest.byte_count,
            seconds=round(seconds, 3),
            reason=reason,
        )
        return manifest

    async def listing(self) -> Listing:
        """All of them.

        Raises:
            PeerError: INTERNAL, when the folder cannot be read.
        """
        try:
            return await self._off_loop(self._folder.listing)
        except Exception as error:
            raise _failure(error, f"{self._folder.place} cannot be listed") from error

    async def get(self, checkpoint: str) -> Manifest:
        """One of them.

        Raises:
            PeerError: NOT_FOUND, CORRUPT when it is damaged, INTERNAL when it cannot be read.
        """
        if not re.fullmatch(ID_PATTERN, checkpoint):
            raise await self._not_found(checkpoint)
        try:
            return await self._off_loop(lambda: self._folder.manifest(checkpoint))
        except FileNotFoundError:
            pass
        except Exception as error:
            raise _failure(error, f"checkpoint {checkpoint} cannot be read") from error
        raise await self._not_found(checkpoint)

    async def delete(self, checkpoint: str) -> None:
        """Removes one.

        Raises:
            PeerError: NOT_FOUND, or WRONG_STATE while it is being read.
        """
        if not re.fullmatch(ID_PATTERN, checkpoint) or checkpoint not in await self._off_loop(self._folder.ids):
            raise await self._not_found(checkpoint)
        if self._pins[checkpoint]:
            text = f"checkpoint {checkpoint} is being read; delete it when that has ended"
            raise PeerError(Reason.WRONG_STATE, text)
        try:
            await self._off_loop(lambda: self._folder.remove(checkpoint))
        except Exception as error:
            raise _failure(error, f"checkpoint {checkpoint} could not be removed") from error
        log.info("checkpoint_removed", checkpoint=checkpoint)

    async def roll_back(self, checkpoint: str, reason: str) -> Manifest:
        """Has the run go on from a checkpoint, in a new timeline; every learner joins again by itself.

        Once it has begun it goes on to its end, also if the caller is cancelled. The values are verified before
        anything is changed; they are in memory beside those of the run meanwhile.

        Raises:
            PeerError: NOT_FOUND, CORRUPT, RUN_MISMATCH or SCHEMA_MISMATCH for a checkpoint that cannot be used,
                WRONG_STATE when the run cannot be rolled back now.
        """
        if self._roll_backs:
            raise PeerError(Reason.WRONG_STATE, "the run is being rolled back already")
        manifest = await self.get(checkpoint)
        self._check_fits(manifest)
        if self._roll_backs:
            raise PeerError(Reason.WRONG_STATE, "the run is being rolled back already")
        task = asyncio.create_task(self._roll_back(manifest, reason), name=f"roll-back to {checkpoint}")
        self._roll_backs.add(task)
        task.add_done_callback(self._rolled_back)
        await asyncio.shield(task)
        return manifest

    async def values(self, checkpoint: str) -> tuple[dict[int, FloatVector], int]:
        """The parameters of a checkpoint by fragment, and the global steps that the run had made.

        Raises:
            PeerError: NOT_FOUND, CORRUPT, RUN_MISMATCH or SCHEMA_MISMATCH for a checkpoint that cannot be used.
        """
        manifest = await self.get(checkpoint)
        self._check_fits(manifest)
        async with self._pinned(manifest.id):
            try:
                states = await self._off_loop(lambda: self._folder.states(manifest))
            except Exception as error:
                raise _failure(error, f"checkpoint {checkpoint} cannot be read") from error
        return {fragment: state.theta for fragment, state in states.items()}, manifest.state.global_step

    def _rolled_back(self, task: asyncio.Task[None]) -> None:
        self._roll_backs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("roll_back_refused", reason=str(error))

    async def _roll_back(self, manifest: Manifest, reason: str) -> None:
        checkpoint = manifest.id
        async with self._pinned(checkpoint):
            try:
                states = await self._off_loop(lambda: self._folder.states(manifest))
            except Exception as error:
                raise _failure(error, f"checkpoint {checkpoint} cannot be read; nothing was changed") from error
            self._shell.roll_back_states[checkpoint] = states
            try:
                refusal = await self._serving.driver.request(
                    lambda token: ev.RollBackRequested(token, checkpoint, manifest.state, reason),
                    fx.Refusal,
                    type(None),
                )
            finally:
                self._shell.roll_back_states.pop(checkpoint, None)
            if refusal is not None:
                raise status.error_of(refusal)

    @asynccontextmanager
    async def _pinned(self, checkpoint: str) -> AsyncIterator[None]:
        self._pins[checkpoint] += 1
        try:
            yield
        finally:
            self._pins[checkpoint] -= 1

    def _check_fits(self, manifest: Manifest) -> None:
        agreement = self._serving.agreement
        if manifest.run_id != agreement.run_id:
            text = f"checkpoint {manifest.id} is of run {manifest.run_id!r}, and this syncer holds {agreement.run_id!r}"
            raise PeerError(Reason.RUN_MISMATCH, text)
        if manifest.model.schema != agreement.known().schema.to_dict():
            raise PeerError(Reason.SCHEMA_MISMATCH, f"checkpoint {manifest.id} is of another model than the run's")

    async def _not_found(self, checkpoint: str) -> PeerError:
        there = ", ".join(manifest.id for manifest in (await self.listing()).found[:10]) or "none"
        return PeerError(Reason.NOT_FOUND, f"there is no checkpoint {checkpoint!r}; there are: {there}")

    # --- by itself ---

    async def run(self) -> None:
        """Makes the automatic ones until it is cancelled."""
        await self._quietly(self._sweep)
        while self._interval_steps:
            timeline, step = self._machine.timeline, self._machine.global_step
            due = (step // self._interval_steps + 1) * self._interval_steps
            if not await self._reaches(timeline, due):
                return
            if self._machine.timeline == timeline:
                await self._automatic(f"every {self._interval_steps} global steps")

    async def _reaches(self, timeline: int, step: int) -> bool:
        """Waits for a global step, or another timeline; False at the end of the run or of the process."""
        machine = self._machine

        def comes_to_it() -> bool:
            return (
                machine.phase is RunPhase.FINISHED or machine.global_step >= step or machine.timeline != timeline
            ) and self._cuts.has_parameters

        await self._serving.driver.wait_until(comes_to_it)
        return comes_to_it() and machine.phase is not RunPhase.FINISHED

    async def at_end(self, give_up_at: float) -> None:
        """Keeps the end of the run, unless it is kept already.

        Args:
            give_up_at: When not to try any more, by the event loop's clock.
        """
        if self._interval_steps and self._cuts.has_parameters:
            await self._automatic("the end of the run", give_up_at)

    async def _automatic(self, reason: str, give_up_at: float | None = None) -> None:
        """Writes one; again and again if that fails."""
        wait, loop = RETRY_SECONDS_MIN, asyncio.get_running_loop()
        while True:
            try:
                if not await self._is_kept():
                    await self.create(reason=reason, automatic=True)
                    await self._quietly(self._remove_old)
                self.problem = ""
                return
            except PeerError as error:
                self.problem = error.text
                log.error("checkpoint_failed", reason=error.text, retry_seconds=wait)
            if give_up_at is not None and loop.time() + wait > give_up_at:
                return
            await asyncio.sleep(wait)
            wait = min(2 * wait, RETRY_SECONDS_MAX)

    async def _is_kept(self) -> bool:
        """Whether there is a checkpoint of where the run is now."""
        place = _place(self._machine.run_state())
        run_id = self._serving.agreement.run_id
        return any(_place(m.state) == place and m.run_id == run_id for m in (await self.listing()).found)

    async def _remove_old(self) -> None:
        """Leaves those alone that are ahead of the run: it was restored from a copy, or begun anew in an old folder."""
        run_id, now = self._serving.agreement.run_id, position_of(self._machine.run_state())
        found = (await self.listing()).found
        own = [m for m in found if m.automatic and m.run_id == run_id and m.position <= now]
        for manifest in own[self._kept_count :]:
            if not self._pins[manifest.id]:
                await self.delete(manifest.id)

    async def _sweep(self) -> None:
        """Removes what a process that was killed had written of a checkpoint."""
        async with self._writing:
            for checkpoint in await self._off_loop(self._folder.remove_partial):
                log.info("checkpoint_removed", checkpoint=checkpoint, reason="it was never completed")

    async def _quietly(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs what the next time will do, if it fails now."""
        try:
            await work()
        except Exception as error:
            log.warning("checkpoints_not_tidied", reason=f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Ends a checkpoint that is being written after the fragment at hand."""
        self._folder.close()

    async def _off_loop(self, work: Callable[[], Result]) -> Result:
        return await carried_out(self._executor, work)


def _place(state: RunState) -> tuple[object, ...]:
    return state.phase is RunPhase.FINISHED, state.versions


def _failure(error: Exception, what: str) -> PeerError:
    """What an operator is told."""
    if isinstance(error, PeerError):
        return error
    if isinstance(error, DamageError):
        return PeerError(Reason.CORRUPT, f"{what}: {error}")
    return PeerError(Reason.INTERNAL, f"{what}: {type(error).__name__}: {error}")
