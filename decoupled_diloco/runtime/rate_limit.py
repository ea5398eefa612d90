"""Limits on how fast this process moves bytes, so that a link that others use too is left room.

    limits = TransferLimits(RateLimit(upload_bytes_per_second), RateLimit(download_bytes_per_second))
    await limits.upload.passed(len(message))                  # before it is written
    await allowance.for_next(received_bytes, payload_bytes)   # before it is read; `Allowance(limits.download, ...)`

One limit is shared by all streams of a direction, which take turns piece by piece, so that each gets the same share. A
stream that waits for its turn leaves the event loop to others. What is not read is not sent: a receiver that waits
holds the sender back by the flow control of the connection, but for what the transport reads ahead.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from decoupled_diloco.runtime.clock import Clock, MonotonicClock

BURST_SECONDS: Final = 0.05
"""Credit for idle time, in seconds of the rate: makes up for timers that ring late, and no more."""
PIECE_SECONDS: Final = 0.05
"""A sender cuts its bytes into pieces that take this long, so that bytes flow evenly and streams take turns often."""
READ_AHEAD_SECONDS: Final = 1 / 16
"""A stream that is not read from takes in what comes in this time at the full rate; one that is alone still gets the
whole rate over links with round trips of as long."""
READ_AHEAD_BYTES_MIN: Final = 64 << 10
"""The smallest window that HTTP/2 streams begin with."""
READ_AHEAD_BYTES_MAX: Final = 1 << 30
"""Half of the largest window that HTTP/2 knows, 2^31 - 1 bytes, which is also the largest number that gRPC takes."""
BYTES_PER_SECOND_MAX: Final = 10**12
"""The largest limit that settings take: 8 Tbit/s, more than any link of one process; who wants none says 0."""
PIECE_BYTES_MIN: Final = 16 << 10
"""Pieces are not smaller than this; below, what surrounds them costs more than they."""


class TokenBucket:
    """Says when bytes may pass so that a rate holds; knows no clock, instants are arguments.

    Bytes pass whenever nothing is owed. What passes is owed from then on and paid off at the rate. Time in which
    nothing is owed earns credit, `burst_bytes` at most. So in a window of w seconds at most rate * w + `burst_bytes`
    and one piece pass, whatever the pieces; and while somebody always asks, the rate is used in full.

    Args:
        bytes_per_second: the rate, > 0.
        burst_bytes: credit at most, >= 0.
        now: the first instant, in seconds; the credit is full.
    """

    def __init__(self, bytes_per_second: float, burst_bytes: float, now: float) -> None:
        if bytes_per_second <= 0:
            raise ValueError(f"bytes_per_second = {bytes_per_second}: must be above 0")
        self._rate = bytes_per_second
        self._burst_seconds = burst_bytes / bytes_per_second
        self._clear_at = now - self._burst_seconds

    @property
    def clear_at(self) -> float:
        """The instant from which on nothing is owed; bytes may pass then."""
        return self._clear_at

    def passed(self, byte_count: int, now: float) -> None:
        """Bytes pass at an instant; earlier than `clear_at` makes others wait for longer."""
        self._clear_at = max(self._clear_at, now - self._burst_seconds) + byte_count / self._rate


class RateLimit:
    """One direction of all transfers of a process. Used within one event loop.

    Args:
        bytes_per_second: 0: no limit.
        clock: instants.
        sleep: waits for so many seconds; given by tests whose time is not the machine's.
    """

    def __init__(
        self,
        bytes_per_second: float = 0.0,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock or MonotonicClock()
        self._sleep = sleep
        self._bucket = (
            TokenBucket(bytes_per_second, BURST_SECONDS * bytes_per_second, self._clock.now())
            if bytes_per_second > 0
            else None
        )
        self._turn = asyncio.Lock()  # wakes its waiters in the order in which they came

    async def passed(self, byte_count: int) -> None:
        """Waits for the turn of a piece, and books it. A caller that is cancelled meanwhile has used nothing."""
        if self._bucket is None:
            return
        async with self._turn:
            while (wait := self._bucket.clear_at - self._clock.now()) > 0:
                await self._sleep(wait)
            self._bucket.passed(byte_count, self._clock.now())

    def piece_bytes(self, piece_bytes_max: int) -> int:
        """How large a sender's pieces should be, in bytes: `piece_bytes_max` where the limit leaves room for it."""
        if self._bucket is None:
            return piece_bytes_max
        return max(min(piece_bytes_max, int(PIECE_SECONDS * self.bytes_per_second)), PIECE_BYTES_MIN)


class Allowance:
    """What one stream may still receive: bytes are paid for before they are read, a piece at a time.

    Args:
        limit: shared with other streams.
        piece_bytes: size of the pieces that the sender cuts, in bytes.
    """

    def __init__(self, limit: RateLimit, piece_bytes: int) -> None:
        self._limit = limit
        self._piece_bytes = piece_bytes
        self._paid_bytes = 0
        self._seen_bytes: int | None = None

    async def for_next(self, received_bytes: int, payload_bytes: int) -> None:
        """Waits until the next bytes of a payload, of which so many have arrived, may be read."""
        if self._seen_bytes is None or received_bytes < self._seen_bytes:
            self._paid_bytes = received_bytes  # an earlier stream has paid for them, or the payload begins anew
        self._seen_bytes = received_bytes
        while self._paid_bytes <= received_bytes < payload_bytes:
            due = min(self._piece_bytes, payload_bytes - self._paid_bytes)
            await self._limit.passed(due)
            self._paid_bytes += due


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """The limits of one process, shared by all its transfers.

    Attributes:
        upload: of bytes that leave.
        download: of bytes that arrive.
    """

    upload: RateLimit = field(default_factory=RateLimit)
    download: RateLimit = field(default_factory=RateLimit)


def read_ahead_bytes(bytes_per_second: float) -> int:
    """What the transport may take in on a stream that waits for its turn, `READ_AHEAD_BYTES_MIN` to `_MAX`.

    0 without a limit: as it likes.
    """
    if bytes_per_second <= 0:
        return 0
    return int(min(max(READ_AHEAD_SECONDS * bytes_per_second, READ_AHEAD_BYTES_MIN), READ_AHEAD_BYTES_MAX))


def bytes_per_second_min(piece_bytes: int, stream_count: int, idle_seconds: float) -> int:
    """The lowest rate at which no stream is taken for dead.

    With all of them taking turns, two pieces of each pass in the time after which the other end gives a silent one up.

    Args:
        piece_bytes: size of a piece.
        stream_count: streams at a time, at most.
        idle_seconds: how long nothing may move, > 0 and finite.
    """
    return math.ceil(2 * stream_count * piece_bytes / Fraction(idle_seconds))  # a float may overflow
