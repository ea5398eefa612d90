"""What one syncer sustains, against values that were worked out by hand."""

import json
from dataclasses import replace

import pytest

from simulator.bandwidth import Plan
from simulator.capacity import (
    BASE_INTERVAL_COMMITS,
    RATE_FIGURES,
    UPLOAD_BUFFER_BYTES,
    MissingRatesError,
    Rates,
    ResultsError,
    commit_bytes,
    contribution_bytes,
    known_rates,
    merge_bytes,
    resident_bytes,
    sustained,
)
from syncer_service.config import SyncerSettings

PLAN = Plan(1.0, 4, fragment_count=8, interval_steps=24, overlap_steps=6, step_seconds=0.5)
FAST = Rates(1e9, 1e9, 1e9, 1e9)
GIVEN = dict.fromkeys(RATE_FIGURES)


def test_a_parameter_costs_its_bytes_up_down_through_the_merge_and_onto_the_disk():
    # bf16: 4 * 2 up, 4 * 2 down; merge: 8 read, state of 12 read and written, 4 of delta, 2 of payload; disk: 5.
    assert merge_bytes(PLAN) == 8 + 12 + 12 + 4 + 2
    assert commit_bytes() == 5.0
    assert SyncerSettings().base_interval_commits == BASE_INTERVAL_COMMITS
    assert SyncerSettings().upload_buffer_bytes_max == UPLOAD_BUFFER_BYTES
    found = sustained(PLAN, FAST)
    assert list(found.seconds_per_parameter.values()) == pytest.approx([8e-9, 8e-9, 38e-9, 5e-9])
    assert found.parameter_count == pytest.approx(12 / 59e-9)
    assert found.limit == "the merge is the limit"


@pytest.mark.parametrize(
    ("slow", "limit"),
    [
        ("upload", "the wire (upload) is the limit"),
        ("download", "the wire (download) is the limit"),
        ("merge", "the merge is the limit"),
        ("commit", "the commit is the limit"),
    ],
)
def test_the_limit_is_where_most_time_goes(slow, limit):
    assert sustained(PLAN, replace(FAST, **{slow: 1e6})).limit == limit


def test_a_short_overlap_is_named_as_the_limit():
    # A fragment has 2 steps of the 3 until the next one: two thirds of what the throughput would allow.
    found = sustained(replace(PLAN, overlap_steps=2), FAST)
    assert found.parameter_count == pytest.approx(8 / 59e-9)
    assert found.limit == "the overlap of 2 steps is the limit, most of it for the merge"
    none = sustained(replace(PLAN, overlap_steps=2, latency_seconds=0.5), FAST)
    assert none.parameter_count == 0.0


def test_memory_is_a_limit_where_it_is_given():
    # F = 3 rounds in flight of 8 fragments: 12 + (3 * 4 * 2 + 2 * 4) / 8 bytes per parameter.
    # 4 contributions of 2 bytes give back 8 of the 12 that the next state takes; delta and next step take 4 and 2.
    assert resident_bytes(PLAN) == 12 + 2 + (3 * 8 + (12 - 8) + 4 + 2) / 8
    assert resident_bytes(replace(PLAN, learner_count=8)) == 12 + 2 + (3 * 16 + 4 + 2) / 8
    assert resident_bytes(replace(PLAN, download_bits=32)) == 12 + (3 * 8 + (12 - 8) + 4) / 8
    found = sustained(PLAN, replace(FAST, memory_bytes=18.25e6))
    assert (found.parameter_count, found.limit) == (pytest.approx(1e6), "memory is the limit")


@pytest.mark.parametrize(("P", "H", "tau", "rounds"), [(8, 24, 6, 3), (8, 24, 2, 2), (24, 24, 2, 3), (1, 24, 2, 1)])
def test_memory_holds_the_contributions_of_the_rounds_in_flight(P, H, tau, rounds):
    plan = replace(PLAN, fragment_count=P, interval_steps=H, overlap_steps=tau)
    assert contribution_bytes(plan) == pytest.approx(rounds * 4 * 2 / P)


def test_twice_the_learners_sustain_less_and_twice_the_step_twice_as_much():
    one = sustained(PLAN, FAST).parameter_count
    assert one / 2 < sustained(replace(PLAN, learner_count=8), FAST).parameter_count < one
    assert sustained(replace(PLAN, step_seconds=1.0), FAST).parameter_count == pytest.approx(2 * one)


def test_rates_that_are_not_given_come_from_the_results(tmp_path):
    path = tmp_path / "latest.json"
    with pytest.raises(
        MissingRatesError, match="latest.json would hold, but is not there: --download-gbytes-per-second, "
    ):
        known_rates({**GIVEN, "upload": 2.0}, path)
    figures = [{"name": name, "value": 0.5} for _, name in RATE_FIGURES.values()]
    path.write_text(json.dumps({"sections": [{"name": "capacity", "figures": figures}]}))
    assert known_rates({**GIVEN, "upload": 2.0}, path) == Rates(2e9, 0.5e9, 0.5e9, 0.5e9)
    path.write_text(json.dumps({"sections": []}))
    with pytest.raises(MissingRatesError, match="latest.json does not hold: --upload-gbytes-per-second, "):
        known_rates(GIVEN, path)
    path.write_text("[]")
    with pytest.raises(ResultsError, match="no results of"):
        known_rates(GIVEN, path)
