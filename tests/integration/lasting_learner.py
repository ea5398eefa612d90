"""A protocol learner that outlives its syncer: attaches again, sends again, joins again when it is told to."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np

from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_effects as le
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Recourse, UnreachableError
from decoupled_diloco.core.ids import Activity
from decoupled_diloco.wire import control
from decoupled_diloco.wire.status import from_rpc_error
from tests.integration.protocol_learner import ProtocolLearner

RETRY_SECONDS = 0.1
"""Wait before a call that failed is made again."""


class LastingLearner(ProtocolLearner):
    """Runs until the run has finished, whatever becomes of the syncer meanwhile."""

    joins: int = 0
    attaches: int = 0

    async def run(self) -> None:
        self._uploads: dict[int, asyncio.Task] = {}
        try:
            await self._join_at_last()
            stepping = asyncio.create_task(self._step_for_ever())
            try:
                while not self.finished:
                    try:
                        await self._stay_attached(stepping)
                    except (grpc.RpcError, asyncio.InvalidStateError):  # the stream broke before its first word
                        await asyncio.sleep(RETRY_SECONDS)
            finally:
                for task in [stepping, *self._work]:
                    task.cancel()
                await asyncio.gather(stepping, *self._work, return_exceptions=True)
            try:
                await self.link.leave()
                self.left = True
            except (PeerError, UnreachableError):
                pass  # the syncer of a finished run may be gone
        finally:
            await self.link.close()

    async def _join_at_last(self) -> None:
        while True:
            try:
                await self._join()
            except UnreachableError:
                await asyncio.sleep(RETRY_SECONDS)
            except PeerError as error:
                if error.recourse is not Recourse.RETRY:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
            else:
                self.joins += 1
                return

    async def _stay_attached(self, stepping: asyncio.Task) -> None:
        """One control stream; returns when it has ended, or when there is nothing more to step."""
        applied = tuple(sorted(self.machine.applied_versions.items()))
        hello = ev.Progress(self.machine.local_step, self.machine.token_count, Activity.COMPUTE)
        async with self.link.attached(applied, hello) as stream:
            work = [
                asyncio.create_task(self._read_stream(stream)),
                asyncio.create_task(self._write(stream)),
                asyncio.create_task(self._heartbeat()),
            ]
            try:
                await asyncio.wait([work[0], stepping], return_when=asyncio.FIRST_COMPLETED)
                if stepping.done():
                    stepping.result()
                    return
                failure = work[0].result()
            finally:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
        if isinstance(failure, PeerError) and failure.recourse is Recourse.JOIN_AGAIN:
            for task in list(self._work):
                task.cancel()
            self.fates.clear()  # a run that was restored from a copy uses numbers of rounds that are lost again
            await self._join_at_last()
            self._wake.set()
            return
        if isinstance(failure, PeerError) and failure.recourse is not Recourse.RETRY:
            raise failure
        await asyncio.sleep(RETRY_SECONDS)

    async def _read_stream(self, stream) -> PeerError | UnreachableError:
        """Handles what comes; returns why the stream has ended."""
        is_first = True
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                if is_first:
                    self.attaches += 1
                    self._handle(lev.AttachedAgain())
                    is_first = False
                event = control.instruction_from_wire(message)
                if event is not None:
                    self._handle(event)
            trailing = await stream.trailing_metadata()
            code, details = await stream.code(), await stream.details()
            return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details, None))
        except grpc.RpcError as error:
            return from_rpc_error(error)

    async def _upload(self, upload: le.Upload, delta: np.ndarray) -> None:
        """Sends again until there is an answer, or the machine gives the round up."""
        self._uploads[upload.round] = asyncio.current_task()
        while upload.round not in self.fates:
            await super()._upload(upload, delta)
            await asyncio.sleep(RETRY_SECONDS if upload.round not in self.fates else 0.0)

    def _perform(self, effects) -> None:
        effects = list(effects)
        for effect in effects:
            if isinstance(effect, le.CancelUpload):
                self.fates.pop(effect.round, None)
                if (task := self._uploads.pop(effect.round, None)) is not None:
                    task.cancel()
        super()._perform(effects)

    def _handle(self, event: lev.LearnerEvent) -> None:
        if isinstance(event, lev.DownloadFailed):
            asyncio.get_running_loop().call_later(RETRY_SECONDS, super()._handle, event)
        else:
            super()._handle(event)
