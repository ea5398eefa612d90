"""How the axes of a tensor in a file become those of the run's tensor: "out (head dim) -> head dim out".

Each side lists the axes in order. A name stands for one axis; names in parentheses are one axis that is
made of several, the last one running fastest. Both sides have the same names, so a layout only moves elements
about and can be turned round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]

_SIDE = re.compile(r"\s*(?:\(\s*([a-z_]\w*(?:\s+[a-z_]\w*)*)\s*\)|([a-z_]\w*))")


class LayoutError(ValueError):
    """A layout cannot be read, or does not fit a shape; the message says which axis and what would fit."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A rearrangement of axes.

    Attributes:
        before: the axes of the array that is given, each as the names that it is made of.
        after: the same of the array that comes out.
    """

    before: tuple[tuple[str, ...], ...]
    after: tuple[tuple[str, ...], ...]

    @property
    def text(self) -> str:
        """As in a name map."""
        return f"{_written(self.before)} -> {_written(self.after)}"

    def reversed(self) -> Layout:
        """The way back."""
        return Layout(self.after, self.before)

    def kept_axis(self, axis: int) -> int | None:
        """Which axis before is the axis `axis` after, or None if either is more than the other."""
        names = self.after[axis]
        return self.before.index(names) if len(names) == 1 and names in self.before else None

    def sizes(
        self, known: Mapping[str, int], before: Shape | None = None, after: Shape | None = None
    ) -> dict[str, int]:
        """The extent of each named axis.

        Args:
            known: extents that are given.
            before: the shape of the array that is given, if known.
            after: the shape that should come out, if known; it is used only for what else is not known.

        Raises:
            LayoutError: an extent does not follow from these, or they contradict each other.
        """
        names = {name for axis in self.before for name in axis}
        found = {name: extent for name, extent in known.items() if name in names}
        for side, shape in ((self.before, before), (self.after, after), (self.before, before)):
            if shape is None:
                continue
            if len(shape) != len(side):
                raise LayoutError(f"shape {shape} has {len(shape)} axes, and {_written(side)!r} has {len(side)}")
            for axis, extent in zip(side, shape, strict=True):
                _infer(found, axis, extent)
        for side, shape in ((self.before, before), (self.after, after)):
            if shape is None:
                continue
            for axis, extent in zip(side, shape, strict=True):
                product = math.prod(found.get(name, 1) for name in axis)
                if all(name in found for name in axis) and product != extent:
                    raise LayoutError(f"shape {shape} does not fit {_written(side)!r} with {_listed(found)}")
        if missing := sorted(names - found.keys()):
            raise LayoutError(
                f"the extent of {', '.join(missing)} in {self.text!r} is not known; give it in the map's [sizes]"
            )
        return found

    def shape_after(self, sizes: Mapping[str, int]) -> Shape:
        """The shape that comes out."""
        return tuple(math.prod(sizes[name] for name in axis) for axis in self.after)

    def apply(self, array: npt.NDArray[Any], sizes: Mapping[str, int]) -> npt.NDArray[Any]:
        """The array with its elements in the order of the other side; a view where possible."""
        first = [name for axis in self.before for name in axis]
        second = [name for axis in self.after for name in axis]
        apart = array.reshape([sizes[name] for name in first])
        return np.transpose(apart, [first.index(name) for name in second]).reshape(self.shape_after(sizes))


def parse_layout(text: str) -> Layout:
    """Reads "a (b c) -> c b a".

    Raises:
        LayoutError: the text has another form, a name comes twice, or the sides have different names.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise LayoutError(f"{text!r} must have one ->, as in 'out in -> in out'")
    before, after = _axes(sides[0], text), _axes(sides[1], text)
    first, second = ([name for axis in side for name in axis] for side in (before, after))
    for names in (first, second):
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise LayoutError(f"{text!r} has {', '.join(twice)} twice on one side; every axis needs a name of its own")
    if alone := sorted(set(first) ^ set(second)):
        raise LayoutError(f"{text!r} has {', '.join(alone)} on one side only; nothing may be added or left out")
    return Layout(before, after)


def _axes(side: str, text: str) -> tuple[tuple[str, ...], ...]:
    axes, position = [], 0
    side = side.rstrip()
    while position < len(side):
        found = _SIDE.match(side, position)
        if found is None:
            raise LayoutError(
                f"{text!r} cannot be read from {side[position:]!r} on; write names of lower-case letters, and "
                "parentheses around those that are one axis"
            )
        axes.append(tuple((found[1] or found[2]).split()))
        position = found.end()
    return tuple(axes)


def _infer(found: dict[str, int], axis: tuple[str, ...], extent: int) -> None:
    unknown = [name for name in axis if name not in found]
    rest = math.prod(found[name] for name in axis if name in found)
    if len(unknown) == 1 and rest and extent % rest == 0:
        found[unknown[0]] = extent // rest


def _written(side: tuple[tuple[str, ...], ...]) -> str:
    return " ".join(axis[0] if len(axis) == 1 else f"({' '.join(axis)})" for axis in side)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {extent}" for name, extent in sorted(sizes.items()))
