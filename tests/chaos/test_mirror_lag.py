"""What was lost with a disk, against the lag that the syncer had shown."""

from __future__ import annotations

import pytest

from chaos.mirror_lag import ShownLag, compare_loss, lag_in
from tests.chaos.recorded_run import RecordedRun

PAGE = """# HELP decoupled_diloco_syncer_rounds_total Closed rounds by outcome.
decoupled_diloco_syncer_rounds_total{outcome="committed"} 123.0
decoupled_diloco_syncer_rounds_total{outcome="abandoned"} 4.0
decoupled_diloco_syncer_mirror_lag_rounds 2.0
decoupled_diloco_syncer_mirror_lag_seconds 0.5
"""


def test_the_two_figures_are_found_in_the_metrics():
    assert lag_in(PAGE) == ShownLag(committed_count=123, lag_rounds=2)


def test_without_a_mirror_or_without_rounds_nothing_is_shown():
    assert lag_in(PAGE.replace("mirror_lag_rounds 2.0", "mirror_lag_rounds NaN")) is None
    assert lag_in("") is None


@pytest.mark.parametrize(
    ("mirrored", "shown", "is_kept"),
    [
        (10, ShownLag(10, 0), True),
        (8, ShownLag(10, 2), True),
        (8, ShownLag(9, 1), True),
        (7, ShownLag(10, 2), False),
        (9, ShownLag(10, 0), False),
        (3, None, True),
    ],
)
def test_a_loss_is_within_the_lag_or_not(mirrored, shown, is_kept):
    run = RecordedRun()
    for _ in range(10):
        run.round()
    text, found = compare_loss(run.evidence().ledger, mirrored, shown)
    assert found is is_kept
    assert f"{10 - mirrored} of 10 rounds were lost" in text
