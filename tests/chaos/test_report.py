"""The sums of several runs."""

from __future__ import annotations

from chaos.report import total, total_lines


def summary(seed: int, kills: int, back: float | None, violations: int) -> dict:
    recovery = {} if back is None else {"kill-learner": {"back": {"count": 1, "median": back, "worst": back}}}
    return {
        "seed": seed,
        "faults": {"kill-learner": kills},
        "violation_count": violations,
        "violations_by_rule": {"heals": violations, "merged once": 0},
        "recovery_seconds": recovery,
        "rounds_committed": 100,
    }


def test_sums_and_the_worst_of_several_runs():
    whole = total([summary(1, 3, 2.5, 0), summary(2, 4, 7.5, 1), summary(3, 1, None, 0)])
    assert whole["seeds"] == [1, 2, 3]
    assert whole["faults"] == {"kill-learner": 8}
    assert (whole["violation_count"], whole["violations_by_rule"]) == (1, {"heals": 1, "merged once": 0})
    assert whole["longest_seconds_until_back"] == {"kill-learner": 7.5}
    assert total_lines(whole)[-1] == "1 violations in all"


def test_a_kind_that_never_came_back_has_no_figure():
    assert total([summary(1, 3, None, 0)])["longest_seconds_until_back"] == {}
