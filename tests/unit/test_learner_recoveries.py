"""Recoveries in a row: when a learner gives up, and how often it says that it starts over."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.runtime.clock import ManualClock
from learner_service import recoveries
from learner_service.recoveries import FINITE_STEPS_MIN, LOG_SECONDS_MIN, RECOVERIES_IN_A_ROW_MAX, RecoveryWatch


def test_recoveries_in_a_row_end_the_learner_and_others_do_not() -> None:
    watch = RecoveryWatch("not finite", FINITE_STEPS_MIN, ManualClock())
    for _ in range(3 * RECOVERIES_IN_A_ROW_MAX):
        assert watch.recovering(), "a recovery now and then is what they are for"
        for _ in range(FINITE_STEPS_MIN + 1):
            watch.finite()
    answers = []
    for _ in range(RECOVERIES_IN_A_ROW_MAX):
        answers.append(watch.recovering())
        for _ in range(FINITE_STEPS_MIN):
            watch.finite()
    assert answers == [True] * (RECOVERIES_IN_A_ROW_MAX - 1) + [False]


def test_the_reason_is_told_once_and_then_with_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Log:
        def warning(self, _event: str, *, reason: str, count: int) -> None:
            told.append((reason, count))

    monkeypatch.setattr(recoveries, "log", Log())
    clock = ManualClock()
    watch = RecoveryWatch("not finite", 0, clock)
    for _ in range(4):
        watch.recovering()
        clock.advance(LOG_SECONDS_MIN / 4 - 1)
    clock.advance(LOG_SECONDS_MIN)
    watch.recovering()
    assert told == [("not finite", 1), ("not finite", 4)]
