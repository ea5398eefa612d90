"""What of a run is kept elsewhere: its checkpoints and its mirror, opened as the settings say."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.lifecycle import TaskSupervisor
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.checkpoint_cuts import Cuts
from syncer_service.checkpoint_folder import CheckpointFolder
from syncer_service.checkpoint_storage import StorageFolder, open_folder
from syncer_service.checkpoints import Checkpoints
from syncer_service.config import SyncerSettings
from syncer_service.mirror import Mirror, MirrorFiles
from syncer_service.serving import Serving
from syncer_service.shell import Shell

CHECKPOINT_THREADS: Final = 2
"""One writes, one reads."""

log = get_logger(__name__)


class Safekeeping:
    """Owns the checkpoints and the mirror of a syncer. For the event loop's thread.

    Args:
        settings: Where to.
        serving: The run.
        shell: Carries a roll-back out.
        stack: Ends the threads.

    Raises:
        ConfigError: A URL cannot be used.
    """

    def __init__(self, settings: SyncerSettings, serving: Serving, shell: Shell, stack: ExitStack) -> None:
        self._serving = serving
        cuts = Cuts(serving, shell)
        threads = stack.enter_context(ThreadPoolExecutor(CHECKPOINT_THREADS, thread_name_prefix="checkpoints"))
        self.checkpoints = Checkpoints(
            serving,
            shell,
            cuts,
            CheckpointFolder(_opened("checkpoint_url", settings.checkpoint_folder, rests=True)),
            threads,
            interval_steps=settings.checkpoint_interval_steps,
            kept_count=settings.checkpoints_kept,
        )
        stack.callback(self.checkpoints.close)
        self.mirror: Mirror | None = None
        if settings.mirror_url:
            thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="mirror"))
            files = MirrorFiles(_opened("mirror_url", settings.mirror_url), settings.state_dir)
            self.mirror = Mirror(serving, cuts, files, thread)

    def start(self, tasks: TaskSupervisor) -> None:
        """Begins with what goes on by itself."""
        tasks.start(self.checkpoints.run(), "automatic checkpoints", may_finish=True)
        if self.mirror is not None:
            tasks.start(self.mirror.run(), "mirror", may_finish=True)
            tasks.start(self.mirror.tell_lag(), "telling how far the mirror lags")

    def warnings(self) -> list[str]:
        """What an operator should know, in words."""
        found = []
        if self.checkpoints.problem:
            found.append(f"no checkpoint can be written: {self.checkpoints.problem}")
        if self.mirror is not None and (problem := self.mirror.problem()):
            found.append(problem)
        return found

    async def at_end(self, seconds_max: float) -> None:
        """Keeps the end of a run; never fails."""
        try:
            await self.checkpoints.at_end(asyncio.get_running_loop().time() + seconds_max)
            await self.catch_up(seconds_max)
        except Exception as error:  # the model and the goodbye matter more
            log.exception("end_not_kept", reason=f"{type(error).__name__}: {error}")

    async def catch_up(self, seconds_max: float) -> None:
        """Before the process ends: gives the mirror time for what it does not have yet."""
        if self.mirror is not None:
            await self.mirror.catch_up(seconds_max)


def _opened(setting: str, url: str, *, rests: bool = False) -> StorageFolder:
    """A folder; whether it can be written shows when it is."""
    try:
        return open_folder(url, rests=rests)
    except Exception as error:  # whatever the file system's library has against it
        raise ConfigError(f'syncer.{setting} = "{url}" cannot be used: {type(error).__name__}: {error}') from error
