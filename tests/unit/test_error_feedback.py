"""Error feedback: what an encoding drops is sent later, once and never twice."""

from __future__ import annotations

import numpy as np
import pytest

from decoupled_diloco.arrays.encoding import Encoded, FloatVector, encoding_named
from learner_service.error_feedback import ErrorFeedback, dropped_by

SIZE = 1000
ENCODINGS = ("bf16", "int8", "int4")


LARGE = np.arange(SIZE) % 50 == 0
"""In every block are a few large values; the others are far below a step of int4."""


def deltas(count: int) -> list[FloatVector]:
    """Deltas that all say the same: what an encoding drops of one, it drops of all."""
    source = np.random.default_rng(5)
    return [(source.normal(size=SIZE) * np.where(LARGE, 1e-3, 1e-5)).astype(np.float32)] * count


def send(feedback: ErrorFeedback | None, encoding: str, number: int, delta: FloatVector) -> FloatVector:
    """What the other end reads of a contribution to a round of fragment 0."""
    carried = feedback.carried(number, 0) if feedback is not None else None
    whole = delta if carried is None else delta + carried
    payload = encoding_named(encoding).encode(whole)
    if feedback is not None:
        feedback.sent(number, 0, dropped_by(encoding, payload, whole))
    return Encoded(payload, encoding, SIZE).decode()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_sum_of_what_is_merged_is_the_sum_of_the_deltas_but_for_one_error(encoding: str) -> None:
    feedback, merged = ErrorFeedback(), []
    for number, delta in enumerate(deltas(100), start=1):
        merged.append(send(feedback, encoding, number, delta))
        feedback.settle(number, 0, is_merged=True)
    rest = feedback.carried(101, 0)
    assert rest is not None
    wanted = np.sum(deltas(100), axis=0, dtype=np.float64)
    found = np.sum(merged, axis=0, dtype=np.float64) + rest
    # Each of the 100 sums delta + e is rounded to float32 once, and so is each difference.
    largest = np.abs(merged).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=200 * 2**-24 * largest)


def test_errors_add_up_without_it_and_do_not_with_it() -> None:
    wanted = np.sum(deltas(100), axis=0, dtype=np.float64)

    def lost(feedback: ErrorFeedback | None) -> float:
        total = np.zeros(SIZE)
        for number, delta in enumerate(deltas(100), start=1):
            total += send(feedback, "int4", number, delta)
            if feedback is not None:
                feedback.settle(number, 0, is_merged=True)
        return float(np.linalg.norm((total - wanted)[~LARGE]) / np.linalg.norm(wanted[~LARGE]))

    assert lost(None) > 0.9
    assert lost(ErrorFeedback()) < 0.1


def test_what_was_dropped_is_to_the_bit_what_the_other_end_lacks() -> None:
    delta = np.array([1.0, 0.3, -0.07, 0.0], np.float32)
    payload = encoding_named("int4").encode(delta)
    read = Encoded(payload, "int4", 4).decode()
    assert list(dropped_by("int4", payload, delta)) == list(delta - read)
    assert list(delta) == [1.0, np.float32(0.3), np.float32(-0.07), 0.0]


DROPPED, NEWER = np.full(3, 0.5, np.float32), np.full(3, 0.25, np.float32)


def with_one_error() -> ErrorFeedback:
    """Round 1 of fragment 0 was merged."""
    feedback = ErrorFeedback()
    feedback.sent(1, 0, DROPPED)
    feedback.settle(1, 0, is_merged=True)
    return feedback


def test_nothing_is_carried_before_a_contribution_was_merged() -> None:
    feedback = ErrorFeedback()
    assert feedback.carried(1, 0) is None
    feedback.sent(1, 0, DROPPED)
    assert feedback.carried(1, 0) is None
    feedback.settle(1, 0, is_merged=True)
    assert feedback.carried(9, 0) is DROPPED
    assert feedback.carried(10, 1) is None, "another fragment"


def test_an_error_replaces_the_one_that_was_sent_with_it() -> None:
    feedback = with_one_error()
    feedback.sent(9, 0, NEWER)
    feedback.settle(9, 0, is_merged=True)
    assert feedback.carried(17, 0) is NEWER


def test_a_contribution_that_was_not_merged_changes_nothing() -> None:
    feedback = with_one_error()
    feedback.sent(9, 0, NEWER)
    feedback.settle(9, 0, is_merged=False)
    assert feedback.carried(17, 0) is DROPPED


def test_a_round_that_is_asked_again_carries_the_same_and_its_last_contribution_counts() -> None:
    feedback = with_one_error()
    feedback.sent(9, 0, np.zeros(3, np.float32))
    assert feedback.carried(9, 0) is DROPPED
    feedback.sent(9, 0, NEWER)
    feedback.settle(9, 0, is_merged=True)
    assert feedback.carried(17, 0) is NEWER


def test_nothing_is_carried_where_nobody_said_what_became_of_the_round_before() -> None:
    feedback = with_one_error()
    feedback.sent(9, 0, NEWER)
    assert feedback.carried(17, 0) is None
    feedback.settle(9, 0, is_merged=True)  # the news comes too late
    assert feedback.carried(17, 0) is None


def test_the_end_of_a_round_without_a_contribution_of_this_learner_changes_nothing() -> None:
    feedback = with_one_error()
    feedback.settle(9, 0, is_merged=False)
    feedback.settle(10, 1, is_merged=False)
    assert feedback.carried(17, 0) is DROPPED


def test_after_a_recovery_nothing_is_carried_and_news_of_earlier_rounds_mean_nothing() -> None:
    feedback = with_one_error()
    feedback.sent(9, 0, NEWER)
    feedback.forget()
    feedback.settle(9, 0, is_merged=True)
    assert feedback.carried(17, 0) is None
