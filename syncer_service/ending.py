"""What becomes of a finished run: export of model and figures, time to fetch and leave, end of the process."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Final

from decoupled_diloco.command_line import software_version
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core import effects as fx
from decoupled_diloco.runtime.lifecycle import StopRequest
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.config import SyncerSettings
from syncer_service.export import export_model, export_summary
from syncer_service.overview import Overview
from syncer_service.serving import Serving
from syncer_service.shell import Shell

LINGER_SECONDS_MAX: Final = 60.0
"""After the end of a run learners and observers have this long to fetch the last versions and leave."""

log = get_logger(__name__)


class Ending:
    """Waits for the end of the run and sees to what follows."""

    def __init__(
        self,
        config: RunConfig,
        settings: SyncerSettings,
        serving: Serving,
        shell: Shell,
        overview: Overview,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._settings = settings
        self._serving = serving
        self._shell = shell
        self._overview = overview
        self._stop = stop
        self.exported: asyncio.Future[Path | None] = asyncio.get_running_loop().create_future()
        """The exported model, once it is there; None if the run never had parameters."""

    async def run(self) -> None:
        """From the end of the run to the request to stop, if the settings want it."""
        end = await self._shell.ended
        self.exported.set_result(await self._export(end))
        try:
            async with asyncio.timeout(LINGER_SECONDS_MAX):
                await self._serving.driver.wait_until(self._everybody_left)
        except TimeoutError:
            log.warning("learners_linger", seconds=LINGER_SECONDS_MAX, reason="they have not left; not waiting longer")
        # Figures of the very end: bytes, last evaluation.
        await self._write_summary(end)
        log.info("run_complete", reason=end.reason, global_step=end.global_step)
        if self._settings.exit_when_finished:
            self._stop.request(f"the run has finished: {end.reason}")

    def _everybody_left(self) -> bool:
        records = self._serving.machine.membership.learners.values()
        return not any(record.has_lease() for record in records)

    async def _export(self, end: fx.EndRun) -> Path | None:
        fragmentation = self._serving.agreement.fragmentation
        newest = self._shell.newest()
        if fragmentation is None or not newest:
            log.warning("nothing_to_export", reason="the run never had parameters")
            return None
        thetas = {fragment: commit.state.theta for fragment, commit in newest.items()}
        metadata = {
            "run_id": self._config.run.id,
            "seed": str(self._config.run.seed),
            "global_step": str(end.global_step),
            "workload_factory": self._config.workload.factory,
            "workload_options": json.dumps(self._config.workload.options, sort_keys=True, default=str),
            "software_version": software_version(),
        }
        path = await asyncio.get_running_loop().run_in_executor(
            self._serving.executors.bulk,
            lambda: export_model(self._settings.output_dir, fragmentation, thetas, metadata),
        )
        log.info("model_exported", path=str(path), bytes=path.stat().st_size)
        return path

    async def _write_summary(self, end: fx.EndRun) -> None:
        summary = {**self._overview.page(), "end_reason": end.reason}
        await asyncio.get_running_loop().run_in_executor(
            self._serving.executors.bulk, lambda: export_summary(self._settings.output_dir, summary)
        )
