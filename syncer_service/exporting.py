"""The run's model as a safetensors file: at its end, and whenever an operator asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.command_line import software_version
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.checkpoints import Checkpoints
from syncer_service.export import export_model
from syncer_service.serving import Serving
from syncer_service.shell import Shell

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that was written.

    Attributes:
        path: The file, on the syncer's host.
        size_bytes: Its length.
        global_step: Global steps that the run had made.
    """

    path: Path
    size_bytes: int
    global_step: int


class Exports:
    """Writes models into the output directory. For the event loop's thread; the work is done in an executor.

    Args:
        config: The run file.
        folder: The output directory.
        serving: The parts that it works with.
        shell: Has the newest versions.
        checkpoints: Have older ones.
    """

    def __init__(
        self, config: RunConfig, folder: Path, serving: Serving, shell: Shell, checkpoints: Checkpoints
    ) -> None:
        self._config = config
        self._folder = folder
        self._serving = serving
        self._shell = shell
        self._checkpoints = checkpoints

    def write(self, thetas: Mapping[int, FloatVector], global_step: int, name: str) -> Path:
        """Writes one model; blocks.

        Args:
            thetas: The value of every fragment.
            global_step: Global steps that they are of, for the file's header.
            name: The file's name.

        Raises:
            OSError: It cannot be written.
        """
        metadata = {
            "run_id": self._config.run.id,
            "seed": str(self._config.run.seed),
            "global_step": str(global_step),
            "workload_factory": self._config.workload.factory,
            "workload_options": json.dumps(self._config.workload.options, sort_keys=True, default=str),
            "software_version": software_version(),
        }
        return export_model(self._folder, self._serving.agreement.known(), thetas, metadata, name)

    async def export(self, checkpoint: str = "") -> Exported:
        """Writes the model of now, or that of a checkpoint, beside the run's other output.

        Raises:
            PeerError: NOT_READY without parameters, WRONG_STATE where the file cannot be written, and what
                `Checkpoints.values` says of a checkpoint that cannot be read.
        """
        if checkpoint:
            thetas, step = await self._checkpoints.values(checkpoint)
            name = f"model-{checkpoint}.safetensors"
        else:
            newest = self._shell.newest()
            if not newest:
                raise PeerError(Reason.NOT_READY, "the run has no parameters yet", retry_seconds=1.0)
            thetas = {fragment: commit.state.theta for fragment, commit in newest.items()}
            step = self._serving.machine.global_step
            name = f"model-step-{step}.safetensors"
        loop = asyncio.get_running_loop()
        try:
            path = await loop.run_in_executor(self._serving.executors.bulk, self.write, thetas, step, name)
            size = path.stat().st_size
        except OSError as error:
            text = f"{self._folder / name} cannot be written: {error.strerror or error}"
            raise PeerError(Reason.WRONG_STATE, text) from error
        log.info("model_exported", path=str(path), bytes=size, global_step=step)
        return Exported(path, size, step)
