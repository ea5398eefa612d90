"""Memory for contributions and for the results of merges, used again as soon as nobody needs what lies in it.

A merge makes a new version of a fragment, and soon after the one before is let go. The system hands out new memory page
by page and clears it, which takes longer than the merge itself (16 ms instead of 4 for 64 MiB, and far more where pages
were never used before). So the memory of old versions and of contributions that were merged becomes that of new ones.

Results are *taken*: each has a region of its own, which comes back by itself with the last view of it. Contributions
are *lent*: they share regions of the size of a result, so that two in bf16 lie where one vector of float32 lay, and
come back when their borrower says so, which a merge does before it makes its results.
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

KEPT_REGIONS_MAX: Final = 5
"""Free regions that are kept beside those for contributions: as many as a merge takes (theta, momentum, residual,
delta and the published step)."""

SPARE_SHARE: Final = 8
"""The region of a result may be larger than it by this part of it: fragments differ by some per cent."""

Bytes = npt.NDArray[np.uint8]


class _Region:
    """Memory that is allocated at once, and which parts of it are free.

    Attributes:
        memory: all of it, from a cache line on.
        free: begin and end of the free parts, in order; none next to another.
    """

    def __init__(self, size_bytes: int) -> None:
        self.memory = aligned(np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8), size_bytes)
        self.free: list[tuple[int, int]] = []

    @property
    def is_free(self) -> bool:
        """Whether nobody has any of it."""
        return self.free == [(0, self.memory.size)]

    def cut(self, part: tuple[int, int], size_bytes: int) -> tuple[int, int]:
        """Takes the beginning of a free part."""
        at, (begin, end) = self.free.index(part), part
        self.free[at : at + 1] = [(begin + size_bytes, end)] if begin + size_bytes < end else []
        return begin, begin + size_bytes

    def give_back(self, part: tuple[int, int]) -> None:
        """The part is free again, and one with its free neighbours."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self.free, part]):
            if merged and merged[-1][1] == begin:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((begin, end))
        self.free = merged


class Loan:
    """Bytes that somebody has until he gives them back.

    Attributes:
        data: the bytes, writable, from a cache line on.
    """

    def __init__(self, owner: Recycler, region: _Region | None, part: tuple[int, int], data: Bytes) -> None:
        self.data = data
        self._owner = owner
        self._region = region
        self._part = part

    def give_back(self) -> None:
        """They may be used for something else from now on; to be called once, from any thread."""
        region, self._region = self._region, None
        if region is not None:
            self._owner._give_back(region, self._part)


class Recycler:
    """Memory in regions. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Regions of which something is free, the one that changed last at the end.
        self._open: list[_Region] = []
        # Appended to wherever the last reference to a vector happens to go, so without the lock.
        self._returned: deque[_Region] = deque()
        self._lent_counts: dict[_Region, int] = {}
        self._lent_regions_most = 0

    @property
    def free_bytes(self) -> int:
        """Memory that is kept for what comes."""
        with self._lock:
            self._collect()
            return sum(end - begin for region in self._open for begin, end in region.free)

    def take(self, size_bytes: int) -> Bytes:
        """Uninitialised bytes that begin on a cache line; their memory comes back with the last view of them."""
        if size_bytes < RECYCLED_BYTES_MIN:
            return aligned(np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8), size_bytes)
        region = self._whole(_rounded(size_bytes))
        # Not a slice: views of a slice would refer to the region's memory, and the slice would seem to be gone.
        vector = np.frombuffer(region.memory[:size_bytes].data, np.uint8)
        weakref.finalize(vector, self._returned.append, region).atexit = False
        return vector

    def lend(self, size_bytes: int, region_bytes: int = 0) -> Loan:
        """Uninitialised bytes, until they are given back.

        Args:
            size_bytes: how many.
            region_bytes: what is allocated at once where nothing fits, if that is more: the size of the results that
                will want the memory later.
        """
        if size_bytes < RECYCLED_BYTES_MIN:
            return Loan(self, None, (0, 0), aligned(np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8), size_bytes))
        wanted = _rounded(size_bytes)
        with self._lock:
            self._collect()
            region, part = self._smallest(wanted) or self._new(max(wanted, _rounded(region_bytes)))
            part = region.cut(part, wanted)
            if not region.free:
                self._open.remove(region)
            self._lent_counts[region] = self._lent_counts.get(region, 0) + 1
            self._lent_regions_most = max(self._lent_regions_most, len(self._lent_counts))
        return Loan(self, region, part, region.memory[part[0] : part[0] + size_bytes])

    def _smallest(self, size_bytes: int) -> tuple[_Region, tuple[int, int]] | None:
        """The smallest free part that is large enough."""
        fitting = [
            (end - begin, index, (begin, end))
            for index, region in enumerate(self._open)
            for begin, end in region.free
            if end - begin >= size_bytes
        ]
        if not fitting:
            return None
        _, index, part = min(fitting)
        return self._open[index], part

    def _new(self, size_bytes: int) -> tuple[_Region, tuple[int, int]]:
        region = _Region(size_bytes)
        region.free = [(0, size_bytes)]
        self._open.append(region)
        return region, (0, size_bytes)

    def _whole(self, size_bytes: int) -> _Region:
        """A region for one result."""
        with self._lock:
            self._collect()
            for region in self._open:
                if region.is_free and size_bytes <= region.memory.size <= size_bytes + size_bytes // SPARE_SHARE:
                    self._open.remove(region)
                    region.free = []
                    return region
        return _Region(size_bytes)

    def _give_back(self, region: _Region, part: tuple[int, int]) -> None:
        with self._lock:
            region.give_back(part)
            self._lent_counts[region] -= 1
            if not self._lent_counts[region]:
                del self._lent_counts[region]
            if region in self._open:
                self._open.remove(region)
            self._open.append(region)
            self._collect()

    def _collect(self) -> None:
        """Takes in the regions of results that are gone; the oldest free ones go where there are too many."""
        while self._returned:
            region = self._returned.popleft()
            region.free = [(0, region.memory.size)]
            self._open.append(region)
        free = [region for region in self._open if region.is_free]
        for region in free[: max(0, len(free) - KEPT_REGIONS_MAX - self._lent_regions_most)]:
            self._open.remove(region)


def aligned(block: Bytes, size_bytes: int) -> Bytes:
    """The part of a block that begins on a cache line."""
    begin = -block.ctypes.data % ALIGNMENT_BYTES
    return block[begin : begin + size_bytes]


def _rounded(size_bytes: int) -> int:
    """Up to whole cache lines."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


RECYCLER: Final = Recycler()
"""The one of the process."""
