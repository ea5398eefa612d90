"""What becomes of a finished run: export of model and figures, time to fetch and leave, end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from decoupled_diloco.core import effects as fx
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.config import SyncerSettings
from syncer_service.export import MODEL_FILE, SUMMARY_FILE, export_summary
from syncer_service.exporting import Exports
from syncer_service.overview import Overview
from syncer_service.safekeeping import Safekeeping
from syncer_service.serving import Serving
from syncer_service.shell import Shell

LINGER_SECONDS_MAX: Final = 60.0
"""After the end of a run learners and observers have this long to fetch the last versions and leave."""

WRITE_SECONDS_MAX: Final = 60.0
"""A file that cannot be written is tried again for this long after the end of the run, so that room can be made."""

WRITE_RETRY_SECONDS: Final = 3.0
"""Between two attempts to write a file."""

log = get_logger(__name__)


class Ending:
    """Waits for the end of the run and sees to what follows."""

    def __init__(
        self,
        settings: SyncerSettings,
        serving: Serving,
        shell: Shell,
        overview: Overview,
        stop: StopRequest,
        safekeeping: Safekeeping,
        exports: Exports,
    ) -> None:
        self._exports = exports
        self._settings = settings
        self._serving = serving
        self._shell = shell
        self._overview = overview
        self._stop = stop
        self._safekeeping = safekeeping
        self.exported: asyncio.Future[Path | None] = asyncio.get_running_loop().create_future()
        """The exported model, once it is there; None if the run never had parameters, or if it was given up."""
        self.model_is_missing = False
        """Whether the run has ended and its model is not written; true until the export has succeeded."""

    async def run(self) -> None:
        """From the end of the run to the request to stop, if the settings want it.

        Nothing that goes wrong with a file ends it early: learners are told, and can fetch and leave, all the same.
        """
        end = await self._shell.ended
        give_up_at = asyncio.get_running_loop().time() + WRITE_SECONDS_MAX
        async with asyncio.TaskGroup() as work:
            work.create_task(self._export(end, give_up_at))
            work.create_task(self._linger())
            work.create_task(self._safekeeping.at_end(WRITE_SECONDS_MAX))
        # Figures of the very end: bytes, last evaluation.
        await self._write_summary(end, give_up_at)
        log.info("run_complete", reason=end.reason, global_step=end.global_step)
        if not self._settings.exit_when_finished:
            return
        if self.model_is_missing:
            self._stop.request(
                f"the run has finished, but its model could not be written to {self._settings.output_dir}",
                ExitCode.FAILED,
            )
        else:
            self._stop.request(f"the run has finished: {end.reason}")

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(LINGER_SECONDS_MAX):
                await self._serving.driver.wait_until(self._everybody_left)
        except TimeoutError:
            log.warning("learners_linger", seconds=LINGER_SECONDS_MAX, reason="they have not left; not waiting longer")

    def _everybody_left(self) -> bool:
        records = self._serving.machine.membership.learners.values()
        return not any(record.has_lease() for record in records)

    async def _export(self, end: fx.EndRun, give_up_at: float) -> None:
        newest = self._shell.newest()
        if not newest:
            log.warning("nothing_to_export", reason="the run never had parameters")
            self.exported.set_result(None)
            return
        thetas = {fragment: commit.state.theta for fragment, commit in newest.items()}
        self.model_is_missing = True
        path = await self._write(
            MODEL_FILE,
            lambda: self._exports.write(thetas, end.global_step, MODEL_FILE),
            give_up_at,
        )
        self.model_is_missing = path is None
        if path is not None:
            log.info("model_exported", path=str(path), bytes=path.stat().st_size)
        self.exported.set_result(path)

    async def _write_summary(self, end: fx.EndRun, give_up_at: float) -> None:
        summary = {**self._overview.page(), "end_reason": end.reason}
        await self._write(SUMMARY_FILE, lambda: export_summary(self._settings.output_dir, summary), give_up_at)

    async def _write(self, name: str, write: Callable[[], Path], give_up_at: float) -> Path | None:
        """Writes a file in the background, again and again if it fails; None if it was given up.

        A process that does not end by itself never gives up: the values are nowhere else.
        """
        loop = asyncio.get_running_loop()
        path = self._settings.output_dir / name
        told = ""
        while True:
            try:
                return await loop.run_in_executor(self._serving.executors.bulk, write)
            except Exception as error:  # the operating system's errors, and those of the file format's library
                reason = f"{type(error).__name__}: {error}"
            is_last = self._settings.exit_when_finished and loop.time() + WRITE_RETRY_SECONDS > give_up_at
            if is_last:
                log.error("export_given_up", file=name, path=str(path), reason=reason)
                return None
            if reason != told:
                told = reason
                log.error(
                    "export_failed",
                    file=name,
                    path=str(path),
                    reason=reason,
                    remedy=f"make room or make the directory writable; tried again every {WRITE_RETRY_SECONDS:g} s"
                    + (f" for {give_up_at - loop.time():.0f} s" if self._settings.exit_when_finished else ""),
                )
            await asyncio.sleep(WRITE_RETRY_SECONDS)
