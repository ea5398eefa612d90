"""A checkpoint, or a mirror, as what another run starts from: its parameters alone."""

from __future__ import annotations

import numpy as np

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragment, assemble, fragment_schema, gather
from decoupled_diloco.arrays.schema import Schema
from syncer_service.checkpoint_files import MANIFEST_FILE, Manifest, read_manifest, read_states
from syncer_service.checkpoint_storage import open_folder
from syncer_service.store.records import DamageError
from syncer_service.warm_start import WarmStartError


def find_manifest(location: str) -> Manifest | None:
    """The manifest of a checkpoint; None if the location holds none, and so is something else. Blocks.

    Raises:
        WarmStartError: It is damaged, or the place cannot be read.
    """
    if location.endswith(".safetensors"):
        return None
    try:
        return read_manifest(open_folder(location), "")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DamageError as error:
        raise WarmStartError(location, [str(error)]) from error
    except Exception as error:  # whatever the file system's library raises
        raise WarmStartError(location, [f"it cannot be read: {type(error).__name__}: {error}"]) from error


class CheckpointSource:
    """The parameters of a checkpoint; see `InitialSource`. Momentum, data and schedule of its run stay behind.

    The number of fragments may be another one. The whole model is in memory.

    Args:
        location: The folder of the checkpoint.
        manifest: Its manifest.
        schema: The run's.

    Raises:
        WarmStartError: It is damaged, of another model, or has values that are not finite.
    """

    def __init__(self, location: str, manifest: Manifest, schema: Schema) -> None:
        self._location = location
        self._manifest = manifest
        theirs = Schema.from_dict(manifest.model.schema)
        if problems := _differences(theirs, schema):
            raise WarmStartError(location, problems)
        try:
            states = read_states(open_folder(location), "", manifest)
        except DamageError as error:
            raise WarmStartError(location, [str(error)]) from error
        fragmentation = fragment_schema(theirs, len(states))
        self._tensors = assemble(fragmentation, {fragment: state.theta for fragment, state in states.items()})
        broken = [name for name, values in sorted(self._tensors.items()) if not np.isfinite(values).all()]
        if broken:
            raise WarmStartError(location, [f"tensor {name!r} has values that are not finite" for name in broken])

    def theta(self, fragment: Fragment) -> FloatVector:
        """See `InitialSource.theta`."""
        return gather(fragment, self._tensors)

    def describe(self) -> str:
        """See `InitialSource.describe`."""
        step = self._manifest.state.global_step
        return f"{self._manifest.kind} {self._location} of run {self._manifest.run_id} at global step {step}"


def _differences(theirs: Schema, ours: Schema) -> list[str]:
    """Names and shapes; how a tensor is merged may be another."""
    there = {spec.name: tuple(spec.shape) for spec in theirs.tensors}
    here = {spec.name: tuple(spec.shape) for spec in ours.tensors}
    return [
        f"tensor {name!r}: the run has {here.get(name, 'none')}, {MANIFEST_FILE} has {there.get(name, 'none')}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
