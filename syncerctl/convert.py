"""Models from one form into another: safetensors and Orbax trees, by way of a name map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.layout import Shape
from decoupled_diloco.arrays.name_map import NameMapError
from decoupled_diloco.arrays.planner import plan_tensors
from decoupled_diloco.arrays.tensor_plan import PlannedTensor, TensorSource
from decoupled_diloco.name_maps import load_name_map
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.safetensors_file import INDEX_FILE, SafetensorsError, SafetensorsFolder, write_safetensors
from syncerctl.orbax_tree import OrbaxTree, write_orbax

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""What can be written."""


def convert_model(
    source: str, target: str, name_map: str = "", exports: bool = False, dtype: str = "float32", like: str = ""
) -> str:
    """Reads a model, renames and rearranges its tensors, and writes it.

    One tensor at a time is in memory, except that Orbax writes whole trees only.

    Args:
        source: a safetensors file, a folder of safetensors, or an Orbax tree.
        target: a path that ends in .safetensors, else the folder of an Orbax tree, which must not exist yet.
        name_map: name or path of a map; empty to keep all names.
        exports: from the run's names to the file's, the map read backwards.
        dtype: of what is written, a key of `DTYPES`.
        like: a model whose names and shapes are wanted, where the map alone does not say them; or empty.

    Returns:
        One line that says what was done.

    Raises:
        ConfigError: it cannot be done; everything that does not fit.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}")
    if "://" in target and target.endswith(".safetensors"):
        raise ConfigError(f"{target}: safetensors are written to local disks only; convert there, then copy the file")
    opened = open_model(source)
    wanted = {name: info.shape for name, info in open_model(like).tensors.items()} if like else None
    plans = _planned(source, opened, name_map, wanted, exports)
    contents = _contents(opened, plans, DTYPES[dtype])
    try:
        if target.endswith(".safetensors"):
            kinds = {name: (DTYPES[dtype], plan.shape) for name, plan in plans.items()}
            metadata = dict(opened.metadata) if isinstance(opened, SafetensorsFolder) else {}
            if exports:
                metadata["format"] = "pt"  # what the readers of Hugging Face files look for
            write_safetensors(Path(target), kinds, contents, metadata)
        else:
            write_orbax(target, dict(contents))
    except SafetensorsError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}") from error
    by = f" by name map {name_map}" if name_map else ""
    return f"{len(plans)} tensors of {source}{by} written to {target} in {dtype}"


def open_model(location: str) -> TensorSource:
    """Opens a model in either form.

    Raises:
        ConfigError: it is neither, or cannot be read.
    """
    folder = Path(location)
    is_safetensors = location.endswith(".safetensors") or any(
        (folder / name).is_file() for name in (INDEX_FILE, "model.safetensors")
    )
    try:
        return SafetensorsFolder(location) if is_safetensors else OrbaxTree(location)
    except SafetensorsError as error:
        raise ConfigError(str(error)) from error


def _planned(
    source: str, opened: TensorSource, name_map: str, wanted: Mapping[str, Shape] | None, exports: bool
) -> dict[str, PlannedTensor]:
    try:
        return plan_tensors(opened.tensors, load_name_map(name_map), wanted, exports)
    except NameMapError as error:
        raise ConfigError([f"{source}: {problem}" for problem in error.problems]) from error


def _contents(
    opened: TensorSource, plans: Mapping[str, PlannedTensor], dtype: np.dtype[Any]
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The tensors in an order in which each tensor of the source is needed at one go."""
    for plan in sorted(plans.values(), key=lambda plan: (plan.cells[0].source, plan.name)):
        yield plan.name, np.array(plan.read(opened), dtype)
