"""From the tensors that are there to those that are wanted, by a name map, one tensor at a time.

A plan is made from names and shapes alone (`planner` does it), so that everything that does not fit is known, and
said at once, before a single element is read. Then each wanted tensor, or a part of it, is read by itself: never
two of them are in memory, and a file may be far larger than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.layout import Shape
from decoupled_diloco.arrays.name_map import Rule

FLOAT_KINDS: Final = ("float32", "bfloat16", "float16", "float64")
"""Types that can become float32 parameters."""

Index: TypeAlias = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of a tensor: its shape, and its type by NumPy's name ("bfloat16" included)."""

    shape: Shape
    dtype: str = "float32"


class TensorSource(Protocol):
    """Tensors by name that can be read one at a time."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All of them."""
        ...

    def read(self, name: str, index: Index = ()) -> npt.NDArray[Any]:
        """A tensor, or the part of it that the index selects as in NumPy."""
        ...


@dataclass(frozen=True, slots=True)
class Cell:
    """A tensor of the source, or a slice of one, that becomes a tensor or slice of the target.

    Attributes:
        rule: how.
        source: name of the tensor to read.
        source_index: what to read of it.
        target_index: what it becomes of the target.
        sizes: extents of the layout's axes.
    """

    rule: Rule
    source: str
    source_index: Index
    target_index: Index
    sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A wanted tensor: its shape and the cells that make it up."""

    name: str
    shape: Shape
    cells: tuple[Cell, ...]

    def read(
        self, source: TensorSource, axis: int = 0, start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.float32]:
        """The tensor in float32, or its indices from start to stop along an axis.

        Args:
            source: what the plan was made for.
            axis: of this tensor; ignored for a scalar.
            start: first index.
            stop: one past the last index; None for all.
        """
        if not self.shape:
            return self._whole(source)
        stop = self.shape[axis] if stop is None else stop
        if (start, stop) == (0, self.shape[axis]):
            return self._whole(source)
        narrowed = self._narrowed(axis, start, stop)
        if narrowed is not None:
            return narrowed._whole(source)
        return self._whole(source)[(slice(None),) * axis + (slice(start, stop),)]

    def _whole(self, source: TensorSource) -> npt.NDArray[np.float32]:
        if len(self.cells) == 1 and not self.cells[0].target_index:
            (cell,) = self.cells
            return cell.rule.convert(source.read(cell.source, cell.source_index), cell.sizes)
        out = np.empty(self.shape, np.float32)
        for cell in self.cells:
            out[cell.target_index] = cell.rule.convert(source.read(cell.source, cell.source_index), cell.sizes)
        return out

    def _narrowed(self, axis: int, start: int, stop: int) -> PlannedTensor | None:
        """The same tensor with fewer slices, where that means reading fewer; else None."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        before: Index = (slice(None),) * axis
        if all(len(cell.target_index) == axis + 1 and isinstance(cell.target_index[axis], int) for cell in self.cells):
            kept = [
                Cell(cell.rule, cell.source, cell.source_index, (*before, index - start), cell.sizes)
                for cell in self.cells
                if isinstance(index := cell.target_index[axis], int) and start <= index < stop
            ]
            return PlannedTensor(self.name, shape, tuple(kept))
        (cell, *others) = self.cells
        if others or cell.source_index:
            return None
        layout = cell.rule.layout
        kept_axis = axis if layout is None else layout.kept_axis(axis)
        if kept_axis is None:
            return None
        sizes = cell.sizes if layout is None else {**cell.sizes, layout.after[axis][0]: stop - start}
        part: Index = (*(slice(None),) * kept_axis, slice(start, stop))
        return PlannedTensor(self.name, shape, (Cell(cell.rule, cell.source, part, (), sizes),))
