"""Contributions on their way in and in their buffers, by (learner, incarnation, round).

A slot outlives a broken stream, so that the next stream of the same contribution goes on where the last one stopped.
It ends when its round closes, or when the machine has it aborted. One stream at a time writes to a slot; a newer one
takes it over. A merge takes the buffer out of the slot: a round that has begun to merge is committed or abandoned, and
never needs its contributions again. The slot still says that the contribution is whole.

Fragments of the initial parameters have no slots: each is received by one stream, or from the start by another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.events import ContributionHeader
from decoupled_diloco.wire.stream import PayloadSink
from syncer_service.buffers import BufferHold, BufferPool

Key = tuple[str, int, int]
"""Learner, incarnation, round."""

REPLACED: Final = "a newer stream of the same payload took over"


class UploadStream:
    """One stream that writes to a slot; `stop` breaks it off while it waits for bytes, or before it waits again."""

    def __init__(self) -> None:
        self.stop_reason: str | None = None
        self.ended = asyncio.Event()
        """Set when a stream of the initial parameters has let go of everything."""
        self._wait: asyncio.Timeout | None = None

    def waiting(self, seconds: float) -> asyncio.Timeout:
        """The deadline to wait for bytes under; it is over at once when the stream is stopped."""
        self._wait = asyncio.timeout(0 if self.stop_reason else seconds)
        return self._wait

    def arrived(self) -> None:
        """Bytes came: until the next `waiting` nothing interrupts the stream."""
        self._wait = None

    def stop(self, reason: str) -> None:
        """Breaks the stream off."""
        self.stop_reason = self.stop_reason or reason
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())


@dataclass(slots=True, eq=False)
class UploadSlot:
    """One contribution."""

    header: ContributionHeader
    encoding: str
    buffer: BufferHold
    sink: PayloadSink
    stream: UploadStream = field(default_factory=UploadStream)
    complete: bool = False
    merging: bool = False
    """Its buffer went to the merge of its round."""
    squares: tuple[float, ...] | None = None
    """Squared norm of each segment, once the contribution was looked at."""

    @property
    def key(self) -> Key:
        """What it is found by."""
        return self.header.learner, self.header.incarnation, self.header.round


class Uploads:
    """All slots. For the event loop's thread only.

    Args:
        pool: Where the buffers come from.
    """

    def __init__(self, pool: BufferPool) -> None:
        self.pool = pool
        self._slots: dict[Key, UploadSlot] = {}
        self._initial: dict[tuple[str, int], UploadStream] = {}
        """Streams of the initial parameters, by learner and fragment."""

    def __iter__(self) -> Iterator[UploadSlot]:
        return iter(list(self._slots.values()))

    def __len__(self) -> int:
        return len(self._slots)

    def open(self, header: ContributionHeader, encoding: str, result_bytes: int = 0) -> UploadSlot:
        """The slot for a contribution whose stream has just begun: a new one, or the one that an earlier stream left.

        The earlier bytes count only if the header says the same.

        Args:
            header: The contribution.
            encoding: Of its payload.
            result_bytes: See `BufferPool.acquire`.

        Raises:
            PeerError: OVERLOADED, when there is no buffer.
        """
        key = (header.learner, header.incarnation, header.round)
        slot = self._slots.get(key)
        if slot is not None:
            slot.stream.stop(REPLACED)
            if slot.header == header and slot.encoding == encoding and not slot.complete and not slot.merging:
                slot.stream = UploadStream()
                return slot
            self.discard(slot, REPLACED)
        buffer = self.pool.acquire(header.payload_bytes, result_bytes)
        slot = UploadSlot(header, encoding, buffer, PayloadSink(buffer.data))
        self._slots[key] = slot
        return slot

    def owns(self, slot: UploadSlot, stream: UploadStream) -> bool:
        """Whether this stream still is the slot's, and the slot still exists."""
        return self._slots.get(slot.key) is slot and slot.stream is stream

    def find(self, learner: str, incarnation: int, round_number: int) -> UploadSlot | None:
        """A slot by its key."""
        return self._slots.get((learner, incarnation, round_number))

    def discard(self, slot: UploadSlot, reason: str) -> None:
        """Stops the slot's stream and lets go of its buffer."""
        if self._slots.get(slot.key) is slot:
            del self._slots[slot.key]
            slot.stream.stop(reason)
            if not slot.merging:
                slot.buffer.release()

    def hand_over(self, slot: UploadSlot) -> BufferHold:
        """The slot's own hold of its buffer, for the merge of its round, which releases it."""
        slot.merging = True
        return slot.buffer

    def abort(self, learner: str, incarnation: int, round_number: int, reason: str) -> None:
        """Discards one contribution, if it is there."""
        if (slot := self.find(learner, incarnation, round_number)) is not None:
            self.discard(slot, reason)

    def close_round(self, round_number: int, reason: str) -> None:
        """Discards all contributions to a round."""
        for slot in self:
            if slot.header.round == round_number:
                self.discard(slot, reason)

    def expire(self, learner: str, incarnation: int, reason: str) -> None:
        """Discards what an incarnation has not sent whole; whole contributions stay until their rounds close."""
        for slot in self:
            if (slot.header.learner, slot.header.incarnation) == (learner, incarnation) and not slot.complete:
                self.discard(slot, reason)

    @asynccontextmanager
    async def initial(self, learner: str, fragment: int, size_bytes: int) -> AsyncIterator[UploadStream]:
        """A stream of one fragment of the initial parameters, for as long as the context lasts.

        An earlier one of the same learner and fragment ends first, so that one at a time takes memory.

        Args:
            learner: Whose parameters.
            fragment: Which fragment.
            size_bytes: Of the fragment in float32; they count for the pool's limit.

        Raises:
            PeerError: OVERLOADED, when there is no room, or a newer stream took over.
        """
        before, stream = self._initial.get((learner, fragment)), UploadStream()
        self._initial[learner, fragment] = stream
        try:
            if before is not None:
                before.stop(REPLACED)
                await before.ended.wait()
            if stream.stop_reason is not None:
                raise PeerError(Reason.OVERLOADED, stream.stop_reason)
            with self.pool.reserve(size_bytes):
                yield stream
        finally:
            stream.ended.set()
            if self._initial.get((learner, fragment)) is stream:
                del self._initial[learner, fragment]
