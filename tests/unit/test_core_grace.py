"""The grace window (Eq. 3), its averages, and the weights of contributions."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.core.grace import Average, grace_seconds, median, slack_seconds
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.weights import FLOAT32_SAFE_MAX, contribution_weight, is_safe

GRACE = json.loads((Path(__file__).parent / "core_reference.json").read_text(encoding="utf-8"))["grace"]
bounded = settings(max_examples=100, deadline=None, derandomize=True)
durations = st.floats(0.0, 1e4)


@pytest.mark.parametrize("case", GRACE)
def test_slack_and_grace_of_the_independent_implementation(case: dict[str, float]) -> None:
    policy = Policy(overlap_steps=int(case["tau"]), grace_share=case["gamma"], grace_cap_steps=case["cap_steps"])
    times = (case["xi_step"], case["xi_quorum"], case["xi_sync"])
    assert slack_seconds(policy, *times) == pytest.approx(case["xi_slack"], rel=1e-12, abs=1e-12)
    assert grace_seconds(policy, *times) == pytest.approx(case["xi_grace"], rel=1e-12, abs=1e-12)


@bounded
@given(st.integers(0, 4), st.floats(0.0, 0.99), st.floats(0.0, 3.0), st.floats(1e-3, 1e3), durations, durations)
def test_grace_never_exceeds_its_share_of_the_slack_nor_its_cap(
    tau: int, gamma: float, cap: float, step: float, quorum: float, sync: float
) -> None:
    policy = Policy(overlap_steps=tau, grace_share=gamma, grace_cap_steps=cap)
    window = grace_seconds(policy, step, quorum, sync)
    slack = tau * step - (quorum + sync)
    assert 0.0 <= window <= cap * step
    assert window <= max(0.0, gamma * slack)
    if window == 0.0:
        assert slack <= 0.0 or gamma * slack == 0.0 or cap == 0.0


def test_no_grace_before_a_step_was_measured() -> None:
    assert grace_seconds(Policy(), None, 0.0, 0.0) == 0.0


def test_the_average_starts_at_the_first_sample_and_moves_by_its_gain() -> None:
    average = Average(0.125)
    assert average.get(7.0) == 7.0
    average.add(8.0)
    assert average.get() == 8.0
    average.add(16.0)
    assert average.get() == 9.0


def test_median() -> None:
    assert median([]) == 0.0
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


@bounded
@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_a_weight_is_tokens_times_tokens_per_step(tokens: int, steps: int) -> None:
    assert contribution_weight(tokens, steps) == pytest.approx(float(Fraction(tokens) ** 2 / steps), rel=1e-12)


def test_what_float32_cannot_hold_is_not_safe() -> None:
    assert is_safe(1e30)
    assert not is_safe(math.nextafter(FLOAT32_SAFE_MAX, math.inf))
    assert not is_safe(math.nan)
    assert not is_safe(-math.inf)
