"""The first parameters of a run that starts from a model: read, staged, and committed like those of a learner."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.core.effects import CommitInitialParameters
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.checkpoint_source import CheckpointSource, find_manifest
from syncer_service.serving import Serving, carried_out
from syncer_service.warm_start import InitialSource, WarmStartError, check_start, open_safetensors

NO_INCARNATION: Final = 0
"""What is staged is nobody's: incarnations begin at 1."""

MAP_OF_A_CHECKPOINT: Final = "a checkpoint has the run's own names: leave run.name_map out"

log = get_logger(__name__)


def check_first_parameters(location: str, name_map: str) -> None:
    """What can be said before the first learner has told the schema; blocks.

    Raises:
        WarmStartError: What is wrong.
    """
    if find_manifest(location) is None:
        check_start(location, name_map)
    elif name_map:
        raise WarmStartError(location, [MAP_OF_A_CHECKPOINT])


def open_source(location: str, name_map: str, schema: Schema) -> InitialSource:
    """What `run.start_from` names, checked to the last value; blocks.

    Raises:
        WarmStartError: It cannot be used.
    """
    manifest = find_manifest(location)
    if manifest is None:
        return open_safetensors(location, name_map, schema)
    if name_map:
        raise WarmStartError(location, [MAP_OF_A_CHECKPOINT])
    return CheckpointSource(location, manifest, schema)


class FirstParameters:
    """Reads them once the first learner has told the schema. For the event loop's thread.

    Args:
        location: `run.start_from`.
        name_map: `run.name_map`.
        serving: The run.
        stop: Requested, with `ExitCode.CONFIG`, if they cannot be used.
    """

    def __init__(self, location: str, name_map: str, serving: Serving, stop: StopRequest) -> None:
        self._location = location
        self._name_map = name_map
        self._serving = serving
        self._stop = stop

    async def stage(self) -> CommitInitialParameters | None:
        """Stages all fragments; None if they cannot be used, and then the process stops."""
        serving, fragmentation = self._serving, self._serving.agreement.known()
        started, name = serving.clock.now(), self._location
        try:
            source = await carried_out(
                serving.executors.bulk, lambda: open_source(self._location, self._name_map, fragmentation.schema)
            )
            for fragment in fragmentation.fragments:
                theta = await carried_out(serving.executors.bulk, partial(source.theta, fragment))
                await serving.in_store(
                    partial(serving.store.stage_initial, name, NO_INCARNATION, fragment.index, theta)
                )
        except asyncio.CancelledError:
            raise
        except Exception as error:
            words = str(error) if isinstance(error, WarmStartError) else f"{type(error).__name__}: {error}"
            log.error("start_from_failed", reason=words)
            self._stop.request(words, ExitCode.CONFIG)
            return None
        seconds = round(serving.clock.now() - started, 2)
        log.info("started_from", reason=source.describe(), seconds=seconds)
        return CommitInitialParameters(name, NO_INCARNATION)
