"""Memory for contributions: lent by the process's recycler, bounded in total.

A buffer goes back as soon as the merge has read it, and becomes the memory of the results (`arrays.recycled`): those of
float32 in float32's place, and two of bf16 in the place of one. What a syncer needs, for its container:

    12 N                    theta, momentum and residual of N parameters
    + 2 N                   the newest step of every fragment in bf16; none where downloads are float32
    + C b                   C contributions in flight, of b bytes each (4 n in float32, 2 n in bf16, for n parameters)
    + F 6 n                 of each of F rounds in flight the merged delta, and the step that is about to be published
    + F (12 n - M b), or 0  their new theta, momentum and residual beyond what their M contributions give back
    + 250 MiB               the program: interpreter, gRPC with what it reads ahead, compiled loops

A contribution is in flight from its header until its round is merged; every round under way has up to one of each
learner. All of that at its largest at once is the most. `python -m benchmarks.memory` measures one round of one
fragment, in which n is N.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from decoupled_diloco.arrays.recycled import RECYCLER, Loan, Recycler
from decoupled_diloco.core.errors import PeerError, Reason

BUFFER_RETRY_SECONDS: Final = 2.0
"""What a caller is told to wait when there is no buffer; about the time that a round takes to close."""


class BufferHold:
    """A buffer in use. Whoever works on it holds it; the last one to let go gives it back. For any thread."""

    def __init__(self, pool: BufferPool, loan: Loan, size_bytes: int) -> None:
        self._pool = pool
        self._loan = loan
        self._size_bytes = size_bytes
        self._hold_count = 1
        self._lock = threading.Lock()

    @property
    def data(self) -> memoryview:
        """The bytes, writable.

        Raises:
            RuntimeError: The buffer has been given back.
        """
        self._require_held()
        return self._loan.data.data

    def hold(self) -> BufferHold:
        """Keeps the buffer from being reused until one more `release`.

        Raises:
            RuntimeError: The buffer has been given back.
        """
        with self._lock:
            self._require_held()
            self._hold_count += 1
        return self

    def release(self) -> None:
        """Lets go.

        Raises:
            RuntimeError: The buffer has been given back.
        """
        with self._lock:
            self._require_held()
            self._hold_count -= 1
            is_last = self._hold_count == 0
        if is_last:
            self._pool._take_back(self._loan, self._size_bytes)

    def _require_held(self) -> None:
        if self._hold_count == 0:
            raise RuntimeError("the buffer has been given back already")


class BufferPool:
    """All buffers. They are acquired by the event loop's thread, and given back by any.

    Args:
        bytes_max: Most bytes of all buffers together.
        recycler: Whose memory it is.
    """

    def __init__(self, bytes_max: int, recycler: Recycler = RECYCLER) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._recycler = recycler
        self._lock = threading.Lock()

    @property
    def allocated_bytes(self) -> int:
        """Buffers in use, and what is kept for the next ones and for results."""
        return self.used_bytes + self._recycler.free_bytes

    def acquire(self, size_bytes: int, result_bytes: int = 0) -> BufferHold:
        """A buffer of exactly this size; what is in it is undefined.

        Args:
            size_bytes: Of the contribution.
            result_bytes: Of a vector of results that will want the memory next: the fragment in float32.

        Raises:
            PeerError: OVERLOADED, when the limit does not allow it now.
        """
        with self._lock:
            if self.used_bytes + size_bytes > self.bytes_max:
                raise self._full(size_bytes)
            self.used_bytes += size_bytes
        return BufferHold(self, self._recycler.lend(size_bytes, result_bytes), size_bytes)

    @contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        """Counts memory for what is received and kept, which the pool cannot lend, for as long as the context lasts.

        The limit may be less than a fragment in float32, where contributions are smaller: one always has room.

        Raises:
            PeerError: OVERLOADED, when the limit does not allow it now.
        """
        with self._lock:
            if self.used_bytes and self.used_bytes + size_bytes > self.bytes_max:
                raise self._full(size_bytes)
            self.used_bytes += size_bytes
        try:
            yield
        finally:
            with self._lock:
                self.used_bytes -= size_bytes

    def _full(self, size_bytes: int) -> PeerError:
        return PeerError(
            Reason.OVERLOADED,
            f"contributions being received take {self.used_bytes} bytes of {self.bytes_max} "
            f"(syncer.upload_buffer_bytes_max), so there is no room for {size_bytes} more; call again",
            retry_seconds=BUFFER_RETRY_SECONDS,
        )

    def _take_back(self, loan: Loan, size_bytes: int) -> None:
        loan.give_back()
        with self._lock:
            self.used_bytes -= size_bytes
