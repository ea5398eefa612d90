"""Tensors in memory as something that a plan can read from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.name_map import NameMap
from decoupled_diloco.arrays.planner import plan_tensors
from decoupled_diloco.arrays.tensor_plan import Index, TensorInfo


class ArraySource:
    """Arrays by name; counts the elements that were read."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self.arrays = dict(arrays)
        self.tensors = {name: TensorInfo(array.shape, array.dtype.name) for name, array in arrays.items()}
        self.elements_read = 0

    def read(self, name: str, index: Index = ()) -> npt.NDArray[Any]:
        part: npt.NDArray[Any] = self.arrays[name][index]
        self.elements_read += part.size
        return part


def converted(
    arrays: Mapping[str, npt.NDArray[Any]],
    name_map: NameMap,
    wanted: Mapping[str, tuple[int, ...]] | None = None,
    exports: bool = False,
) -> dict[str, npt.NDArray[np.float32]]:
    """All that the map makes of the arrays."""
    source = ArraySource(arrays)
    return {name: plan.read(source) for name, plan in plan_tensors(source.tensors, name_map, wanted, exports).items()}


def shapes_of(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}
