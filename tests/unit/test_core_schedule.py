"""Schedule, pace and flight against brute force and against the vectors of an independent implementation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.schedule import (
    due_local_step,
    fragment_of,
    global_step_of,
    last_round_of,
    rounds_soon_called,
)

REFERENCE = json.loads((Path(__file__).parent / "core_reference.json").read_text(encoding="utf-8"))
SHAPES = st.integers(1, 60).flatmap(lambda H: st.tuples(st.integers(1, H), st.just(H)))
bounded = settings(max_examples=60, deadline=None, derandomize=True)


def policy(P: int, H: int, tau: int = 2) -> Policy:
    return Policy(fragment_count=P, interval_steps=H, overlap_steps=tau)


def rounds_by_brute_force(P: int, H: int, steps: int) -> list[tuple[int, int]]:
    """(global step, fragment) of every sync of the first steps: fragment p at step t iff t mod H = floor(p*H/P)."""
    return [(t, p) for t in range(steps) for p in range(P) if t % H == p * H // P]


@bounded
@given(SHAPES)
def test_a_fragment_is_synchronised_exactly_when_the_step_is_its_offset_modulo_H(shape: tuple[int, int]) -> None:
    P, H = shape
    expected = rounds_by_brute_force(P, H, 3 * H)
    numbers = range(1, len(expected) + 1)
    assert [(global_step_of(r, policy(P, H)), fragment_of(r, policy(P, H))) for r in numbers] == expected


@bounded
@given(SHAPES)
def test_every_fragment_has_its_own_offset(shape: tuple[int, int]) -> None:
    P, H = shape
    offsets = policy(P, H).fragment_offsets
    assert len(set(offsets)) == P
    assert all(0 <= offset < H for offset in offsets)


@bounded
@given(SHAPES, st.integers(0, 200))
def test_the_last_round_is_the_last_one_before_the_end(shape: tuple[int, int], total: int) -> None:
    P, H = shape
    assert last_round_of(total, policy(P, H)) == len(rounds_by_brute_force(P, H, total))


@pytest.mark.parametrize("case", REFERENCE["schedule"], ids=lambda case: f"P={case['P']}, H={case['H']}")
def test_the_schedule_of_the_independent_implementation(case: dict[str, Any]) -> None:
    run = policy(case["P"], case["H"])
    for item in case["rounds"]:
        assert fragment_of(item["round"], run) == item["fragment"]
        assert global_step_of(item["round"], run) == item["global_step"]


def test_before_the_first_round_the_run_stands_one_step_before_it() -> None:
    assert global_step_of(0, policy(8, 24)) == -1


# ---- rounds in flight ----------------------------------------------------------------------------------------------


@bounded
@given(SHAPES, st.integers(0, 10), st.integers(0, 40), st.integers(1, 10))
def test_rounds_in_flight_by_whole_numbers(shape: tuple[int, int], tau: int, sync: int, step: int) -> None:
    P, H = shape
    sync_steps = max(tau * step, sync)  # in units of 1/step of a step: no division, no rounding
    expected = min(P, 1 + -(-sync_steps * P // (H * step)))
    assert policy(P, H, tau).rounds_in_flight_max(float(sync), float(step)) == expected


def test_rounds_in_flight_before_anything_is_measured() -> None:
    assert policy(8, 24).rounds_in_flight_max(None, None) == 2
    assert policy(24, 24).rounds_in_flight_max(None, 1.0) == 3
    assert policy(24, 24).rounds_in_flight_max(100.0, 1.0) == 24


# ---- due steps -----------------------------------------------------------------------------------------------------


@bounded
@given(st.integers(0, 1000), st.integers(0, 300), st.integers(1, 40), st.integers(0, 40))
def test_due_is_at_least_one_step_on_and_never_more_steps_than_the_fastest_makes(
    local: int, base: int, ahead: int, slowness: int
) -> None:
    ratio = 1.0 / (1.0 + slowness / 10)
    due = due_local_step(local, base + ahead, base, ratio)
    assert local + 1 <= due <= local + max(1, ahead)
    if ahead * ratio >= 1.0:
        assert due - local == math.floor(ahead * ratio + 0.1)


def test_due_by_hand() -> None:
    assert due_local_step(10, 27, 24, 1.0) == 13
    assert due_local_step(10, 27, 24, 0.5) == 11  # one step and a half of its own
    assert due_local_step(10, 25, 24, 1 / 3) == 11  # never less than one
    assert due_local_step(10, 24, 24, 1.0) == 11
    assert due_local_step(10, 27, 24, 0.98) == 13  # as fast as the fastest, but for the noise of the measurement
    assert due_local_step(10.6, 27, 24, 0.5) == 12  # 60 % of a step is done already


@bounded
@given(st.lists(st.integers(1, 6), min_size=1, max_size=60), st.integers(0, 30))
def test_a_slower_learner_is_never_for_ever_behind(gaps: list[int], slowness: int) -> None:
    """Answering every round when it is due, it makes no more steps than its speed gives it (at least one)."""
    ratio = 1.0 / (1.0 + slowness / 10)
    local, step = 0, -1
    for gap in gaps:
        local, step = due_local_step(local, step + gap, step, ratio), step + gap
    assert local <= sum(max(1.0, gap * ratio + 0.1) for gap in gaps)


@pytest.mark.parametrize(
    ("shape", "overdue_steps", "ratio", "count"),
    [
        ((8, 24), -6, 1.0, 0),  # the newest round known is far from due: none after it can be called
        ((8, 24), 0, 1.0, 1),  # the next one is due in three steps
        ((8, 24), 0, 0.5, 1),
        ((24, 24), 0, 1.0, 2),
        ((24, 24), 0, 0.5, 4),  # two rounds a step, and a step may last half as long again
        ((24, 24), 100, 1.0, 3),  # the pace lets no more of them leave OPEN within a step, however late they are
        ((2, 4), 100, 0.01, 2),  # never more than there are fragments
    ],
)
def test_of_the_rounds_that_are_not_known_yet_few_can_be_called_within_a_step(
    shape: tuple[int, int], overdue_steps: int, ratio: float, count: int
) -> None:
    assert rounds_soon_called(overdue_steps, ratio, policy(*shape)) == count
