"""What a part of an inner optimizer's state consists of, and what it means that two ends differ in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

DIFFERENCES_SHOWN_MAX = 3
"""So many differing entries are shown in full."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One array in the payload of a part: its elements, little-endian and in C order.

    Attributes:
        name: of a slot of the optimizer, such as `1/0/mu`, or of a leaf that belongs to no parameter, such as
            `1/0/count`.
        dtype: NumPy's name for the type of the elements.
        shape: extents; `()` for a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def payload_bytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The type of the elements, bfloat16 included. Only for entries of this process."""
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


def entries_difference(here: Sequence[StateEntry], there: Sequence[StateEntry]) -> str | None:
    """In words, what of two descriptions of one part differs; None if nothing does."""
    if tuple(here) == tuple(there):
        return None
    only_here = [entry for entry in here if entry not in there]
    only_there = [entry for entry in there if entry not in here]
    if not (only_here or only_there):
        return "the same entries come in another order"
    return f"only here: {_listed(only_here)}; only there: {_listed(only_there)}"


def _listed(entries: Sequence[StateEntry]) -> str:
    shown = ", ".join(map(str, entries[:DIFFERENCES_SHOWN_MAX])) or "nothing"
    left_count = len(entries) - DIFFERENCES_SHOWN_MAX
    return f"{shown} and {left_count} more" if left_count > 0 else shown
