"""Memory for contributions: buffers that are allocated once, reused, and bounded in total.

A buffer has the exact size of a fragment's payload, and there are as few sizes as fragments, so free buffers are kept
by size. Memory is given back only to make room for another size.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np

from decoupled_diloco.core.errors import PeerError, Reason

BUFFER_RETRY_SECONDS: Final = 2.0
"""What a caller is told to wait when there is no buffer; about the time that a round takes to close."""


class BufferHold:
    """A buffer in use. Whoever works on it holds it; the last one to let go returns it to the pool.

    Attributes:
        data: The bytes, writable.
    """

    def __init__(self, pool: BufferPool, data: memoryview) -> None:
        self.data = data
        self._pool = pool
        self._hold_count = 1

    def hold(self) -> BufferHold:
        """Keeps the buffer from being reused until one more `release`."""
        if self._hold_count == 0:
            raise RuntimeError("the buffer has been given back already")
        self._hold_count += 1
        return self

    def release(self) -> None:
        """Lets go."""
        if self._hold_count == 0:
            raise RuntimeError("the buffer has been given back already")
        self._hold_count -= 1
        if self._hold_count == 0:
            self._pool._take_back(self.data)


class BufferPool:
    """All buffers. For the event loop's thread only.

    Args:
        bytes_max: Most bytes of all buffers together.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.allocated_bytes = 0
        self.used_bytes = 0
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)

    def acquire(self, size_bytes: int) -> BufferHold:
        """A buffer of exactly this size; what is in it is undefined.

        Raises:
            PeerError: OVERLOADED, when the limit does not allow it now.
        """
        if self.used_bytes + size_bytes > self.bytes_max:
            raise PeerError(
                Reason.OVERLOADED,
                f"contributions being received take {self.used_bytes} bytes of {self.bytes_max} "
                f"(syncer.upload_buffer_bytes_max), so there is no room for {size_bytes} more; call again",
                retry_seconds=BUFFER_RETRY_SECONDS,
            )
        free = self._free[size_bytes]
        data = free.pop() if free else self._allocate(size_bytes)
        self.used_bytes += size_bytes
        return BufferHold(self, data)

    def _allocate(self, size_bytes: int) -> memoryview:
        for size, free in self._free.items():
            while free and self.allocated_bytes + size_bytes > self.bytes_max:
                free.pop()
                self.allocated_bytes -= size
        self.allocated_bytes += size_bytes
        return np.empty(size_bytes, np.uint8).data

    def _take_back(self, data: memoryview) -> None:
        self.used_bytes -= len(data)
        self._free[len(data)].append(data)
