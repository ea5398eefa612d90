"""Tells a learner that stumbles once from one that starts over for ever."""

from __future__ import annotations

from typing import Final

from decoupled_diloco.core.errors import DecoupledDilocoError
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.lifecycle import ExitCode
from decoupled_diloco.runtime.logs import get_logger

log = get_logger(__name__)

RECOVERIES_IN_A_ROW_MAX: Final = 5
"""So many recoveries without anything finite between them end the learner."""
FINITE_STEPS_MIN: Final = 8
"""Recoveries are in a row if at most this many steps with a finite loss were made between them."""
LOG_SECONDS_MIN: Final = 60.0
"""The same reason is told at most this often, with a count."""


DIVERGED_ADVICE: Final = "Lower the inner learning rate or look at the data of the last batches"


class DivergedError(DecoupledDilocoError):
    """This learner started over again and again, and what it computes did not become finite.

    Attributes:
        exit_code: how a process ends with it.
    """

    exit_code: Final = ExitCode.DIVERGED


class RecoveryWatch:
    """Counts the recoveries for one reason. Used by one thread.

    Args:
        reason: in words.
        finite_count_max: so many finite results may lie between two recoveries that count as in a row.
        clock: instants.
    """

    def __init__(self, reason: str, finite_count_max: int, clock: Clock) -> None:
        self._reason = reason
        self._finite_count_max = finite_count_max
        self._clock = clock
        self._finite_count = 0
        self._untold_count = 0
        self._told_at: float | None = None
        self.in_a_row = 0

    def finite(self) -> None:
        """A result was finite."""
        self._finite_count += 1
        if self._finite_count > self._finite_count_max:
            self.in_a_row = 0

    def recovering(self, detail: str = "") -> bool:
        """A recovery begins. Returns false if it would be one too many."""
        self.in_a_row += 1
        self._finite_count = 0
        self._untold_count += 1
        now = self._clock.now()
        if self._told_at is None or now - self._told_at >= LOG_SECONDS_MIN:
            log.warning("recovering", reason=self._reason + detail, count=self._untold_count)
            self._told_at, self._untold_count = now, 0
        return self.in_a_row < RECOVERIES_IN_A_ROW_MAX
