"""Memory for the results of merges, used again as soon as nobody holds what lies in it.

A merge makes a new version of a fragment, and soon after the one before is let go. The system hands out new memory page
by page and clears it, which takes longer than the merge itself (16 ms instead of 4 for 64 MiB, and far more where pages
were never used before). So the memory of an old version becomes that of a later one.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES: Final = 64
"""Vectors begin on a cache line, which is where results are written fastest."""

RECYCLED_BYTES_MIN: Final = 1 << 20
"""Smaller vectors come from the C library, which is fast for them."""

KEPT_BLOCKS_MAX: Final = 5
"""Free blocks that are kept: as many as a merge takes (theta, momentum, residual, delta and the published step)."""

SPARE_SHARE: Final = 8
"""A block may be larger than what is wanted by this part of it: fragments differ by some per cent."""

Bytes = npt.NDArray[np.uint8]


class Recycler:
    """Blocks of memory that come back by themselves. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        # Appended to wherever the last reference to a vector happens to go, so without the lock.
        self._returned: deque[Bytes] = deque()

    @property
    def free_bytes(self) -> int:
        """Memory that is kept for the next vectors."""
        with self._lock:
            self._collect()
            return sum(block.size for block in self._free)

    def take(self, size_bytes: int) -> Bytes:
        """Uninitialised bytes that begin on a cache line; their memory comes back with the last view of them."""
        if size_bytes < RECYCLED_BYTES_MIN:
            return aligned(np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8), size_bytes)
        block = self._fitting(size_bytes + ALIGNMENT_BYTES)
        # Not a slice: views of a slice would refer to the block, and the slice would seem to be gone.
        vector = np.frombuffer(aligned(block, size_bytes).data, np.uint8)
        weakref.finalize(vector, self._returned.append, block).atexit = False
        return vector

    def _fitting(self, size_bytes: int) -> Bytes:
        with self._lock:
            self._collect()
            for index, block in enumerate(self._free):
                if size_bytes <= block.size <= size_bytes + size_bytes // SPARE_SHARE:
                    return self._free.pop(index)
        return np.empty(size_bytes, np.uint8)

    def _collect(self) -> None:
        """Takes back what was returned; the oldest free blocks go where there are too many."""
        while self._returned:
            self._free.append(self._returned.popleft())
        del self._free[: max(0, len(self._free) - KEPT_BLOCKS_MAX)]


def aligned(block: Bytes, size_bytes: int) -> Bytes:
    """The part of a block that begins on a cache line."""
    begin = -block.ctypes.data % ALIGNMENT_BYTES
    return block[begin : begin + size_bytes]


RECYCLER: Final = Recycler()
"""The one of the process."""
