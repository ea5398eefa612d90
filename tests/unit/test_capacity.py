"""What one syncer sustains, against values that were worked out by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from decoupled_diloco.arrays.encoding import Encoded, encoding_named
from decoupled_diloco.arrays.fragments import Segment
from decoupled_diloco.arrays.outer import FragmentState
from simulator.bandwidth import Plan
from simulator.capacity import (
    BASE_INTERVAL_COMMITS,
    PROGRAM_BYTES,
    RATE_FIGURES,
    STATE_VECTORS,
    UPLOAD_BUFFER_BYTES,
    MissingRatesError,
    Rates,
    ResultsError,
    commit_bytes,
    contribution_bytes,
    known_rates,
    memory_parts,
    merge_bytes,
    resident_bytes,
    sustained,
)
from syncer_service import buffers
from syncer_service.config import SyncerSettings
from syncer_service.merger import MergeInput, merge_round

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


def test_the_syncer_s_memory_is_the_sum_of_its_parts():
    # M = 4, bf16, P = 8 and 3 rounds in flight: 3 x (delta 4 + step 2 + state 12 less 8 of contributions) / 8.
    assert memory_parts(PLAN) == {"state": 12, "published steps": 2, "contributions": 3, "merges": 3 * 10 / 8}
    exact = replace(PLAN, upload_bits=32.0, download_bits=32.0)
    assert memory_parts(exact) == {"state": 12, "published steps": 0, "contributions": 6, "merges": 3 * 4 / 8}
    alone = replace(PLAN, learner_count=1, fragment_count=2, interval_steps=8, overlap_steps=2)
    assert memory_parts(alone) == {"state": 12, "published steps": 2, "contributions": 2, "merges": 2 * 16 / 2}


def test_the_constants_of_memory_are_those_of_the_syncer():
    """State, delta and step of a real merge, and the syncer's own account of its memory."""
    size = 1 << 18
    state = FragmentState(*np.zeros((STATE_VECTORS, size), np.float32))
    upload = Encoded(encoding_named("bf16").encode(np.ones(size, np.float32)), "bf16", size)
    result = merge_round(
        state,
        [MergeInput(upload, 1.0)],
        [Segment(0, size, "avg")],
        learning_rate=0.7,
        momentum=0.9,
        download_encoding="bf16",
    )
    parts = memory_parts(replace(PLAN, learner_count=1, fragment_count=1))
    new_state = sum(vector.nbytes for vector in (result.state.theta, result.state.momentum, result.state.residual))
    assert new_state / size == parts["state"]
    assert result.delta_payload.nbytes / size == parts["published steps"]
    assert len(upload.payload) / size == parts["contributions"]
    assert (result.delta.nbytes + result.delta_payload.nbytes + new_state) / size == parts["merges"] + 2
    assert f"+ {PROGRAM_BYTES >> 20} MiB" in buffers.__doc__


def test_a_syncer_that_has_no_room_for_its_program_has_none_for_a_model():
    assert sustained(PLAN, replace(FAST, memory_bytes=PROGRAM_BYTES / 2)).parameter_count == 0.0


def test_memory_is_a_limit_where_it_is_given():
    # F = 3 rounds in flight of 8 fragments, each of M = 4 contributions of 2 bytes and of results. The
    # 4 contributions of 2 bytes give back 8 of the 12 that the next state takes; delta and next step take 4 and 2.
    assert resident_bytes(PLAN) == 12 + 2 + 3 * (8 + (12 - 8) + 4 + 2) / 8
    assert resident_bytes(replace(PLAN, learner_count=8)) == 12 + 2 + 3 * (16 + 4 + 2) / 8
    assert resident_bytes(replace(PLAN, download_bits=32)) == 12 + 3 * (8 + (12 - 8) + 4) / 8
    found = sustained(PLAN, replace(FAST, memory_bytes=PROGRAM_BYTES + 20.75e6))
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
