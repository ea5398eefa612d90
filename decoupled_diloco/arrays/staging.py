"""Published fragments on the devices, on their way into the parameters.

Needs jax; only learners import it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

import jax
import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragment
from decoupled_diloco.arrays.placement import Group, Part, Placement

GroupedArrays = tuple[tuple[jax.Array, ...], ...]
"""Arrays of the parts of each group."""


@dataclass(frozen=True)
class StagedFragment:
    """A published fragment on the devices, ready to be applied; keeps `flat`, which must not be written to.

    Attributes:
        fragment: which.
        flat: its value in host memory.
        placement: how the leaves lie that it is to be written to; None: it is not on the devices.
        values: for each group of `placement.writing`, the float32 elements of its parts, one part after the other. One
            array is moved in a fraction of the time that many take.
    """

    fragment: Fragment
    flat: FloatVector = field(repr=False)
    placement: Placement | None = field(repr=False)
    values: tuple[jax.Array, ...] = field(repr=False)

    @staticmethod
    def on_devices(fragment: Fragment, flat: FloatVector, placement: Placement) -> StagedFragment:
        """Puts a fragment where its leaves are."""

        def put(group: Group) -> jax.Array:
            # Programs commit all their results if one operand is committed, so the leaf decides for the whole group.
            committed = any(placement.committed[part.piece] for part in group.parts)
            return _put(_in_a_row(fragment, group, flat), group.device, committed)

        return StagedFragment(fragment, flat, placement, tuple(map(put, placement.writing)))

    def in_host_memory(self) -> StagedFragment:
        """The same without its arrays on the devices; to apply it again puts them there again."""
        return replace(self, placement=None, values=())


def spread(fragment: Fragment, flat: FloatVector, placement: Placement) -> GroupedArrays:
    """A fragment on the devices with an array of its own for each part."""

    def put(group: Group, part: Part) -> jax.Array:
        values = np.array(_elements(fragment, part, flat), order="C")
        return _put(values, group.device, placement.committed[part.piece])

    return tuple(tuple(put(group, part) for part in group.parts) for group in placement.writing)


def _in_a_row(fragment: Fragment, group: Group, flat: FloatVector) -> FloatVector:
    """The elements of the parts of a group, in the order that the leaves have them in."""
    parts = [_elements(fragment, part, flat) for part in group.parts]
    # A copy of its own: on the CPU the device array may go on using this memory.
    row = np.empty(sum(part.size for part in parts), np.float32)
    end = 0
    for part in parts:
        start, end = end, end + part.size
        np.copyto(row[start:end].reshape(part.shape), part)
    return row


def _elements(fragment: Fragment, part: Part, flat: FloatVector) -> npt.NDArray[np.float32]:
    """The elements of a part as a view of the flat vector, with the axes of the leaf."""
    piece = fragment.pieces[part.piece]
    elements: npt.NDArray[np.float32] = part.of(piece, flat)
    return elements if piece.axis is None else np.moveaxis(elements, 0, piece.axis)


def _put(values: npt.NDArray[np.float32], device: jax.Device, committed: bool) -> jax.Array:
    with contextlib.nullcontext() if committed else jax.default_device(device):
        array: jax.Array = jax.device_put(values, device if committed else None)
    return array
