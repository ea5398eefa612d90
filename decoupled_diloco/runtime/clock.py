"""Time as an argument: the one place where the process reads a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Source of instants."""

    def now(self) -> float:
        """Seconds on a monotonic clock; only differences mean something, and only within this process."""

    def wall_time(self) -> float:
        """Seconds since 1970 UTC, for display and records; never compared between machines."""


class MonotonicClock:
    """The machine's clocks."""

    def now(self) -> float:
        """Seconds on the machine's monotonic clock."""
        return time.monotonic()

    def wall_time(self) -> float:
        """Seconds since 1970 UTC."""
        return time.time()


class ManualClock:
    """A clock that stands still until it is moved; for tests and simulations.

    Args:
        start_seconds: The first instant.
        wall_start_seconds: What `wall_time` says at that instant.
    """

    def __init__(self, start_seconds: float = 0.0, wall_start_seconds: float = 1_700_000_000.0) -> None:
        self._now = start_seconds
        self._wall_offset = wall_start_seconds - start_seconds

    def now(self) -> float:
        """The instant that the clock stands at."""
        return self._now

    def wall_time(self) -> float:
        """Moves along with `now`."""
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        """Moves forward.

        Raises:
            ValueError: For a negative step; a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"seconds = {seconds}: a monotonic clock never goes back")
        self._now += seconds

    def advance_to(self, instant: float) -> None:
        """Moves forward to an instant; an instant in the past changes nothing."""
        self._now = max(self._now, instant)
