"""The bandwidth formulas against values that were worked out by hand."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest

from decoupled_diloco.arrays.encoding import ENCODINGS
from decoupled_diloco.core.encoding_bits import ENCODING_BITS
from decoupled_diloco.core.policy import Policy
from simulator.bandwidth import (
    Plan,
    data_parallel,
    decoupled,
    fitting_encodings,
    largest_model,
    least_rate,
    most_learners,
    smallest_interval,
    smallest_overlap,
    streaming,
)

TWELVE = Plan(12e9, 8, fragment_count=24, interval_steps=24, overlap_steps=2, step_seconds=1.0)
"""The run of the paper's size: fragments of 500M parameters, 8 Gbit each in bf16."""


def test_bits_of_every_encoding_are_those_that_its_payloads_have():
    count = 1 << 20
    assert {name: 8 * entry.payload_bytes(count) / count for name, entry in ENCODINGS.items()} == ENCODING_BITS
    assert ENCODING_BITS["int4"] == 4.125


def test_averages_are_bits_times_parameters_over_the_interval():
    need = decoupled(replace(TWELVE, upload_bits=4.125))
    assert need.up == pytest.approx(4.125 * 12e9 / 24)
    assert need.down == pytest.approx(16 * 12e9 / 24)
    assert need.times(8).up == pytest.approx(8 * need.up)


def test_half_a_step_doubles_every_rate():
    half = replace(TWELVE, step_seconds=0.5)
    for way in (decoupled, streaming, data_parallel):
        whole = way(TWELVE)
        assert (way(half).up, way(half).hidden) == pytest.approx((2 * whole.up, 2 * whole.hidden))


def test_a_fragment_goes_up_and_down_within_tau_steps():
    # One fragment every 4 steps, so nobody queues: 8 + 8 Gbit in 2 s, less 2 latencies of 0.1 s, 0.2 s and 0.4 s.
    alone = replace(TWELVE, interval_steps=96)
    assert decoupled(alone).hidden == pytest.approx(16e9 / 2)
    slow = replace(alone, latency_seconds=0.1, quorum_seconds=0.2, merge_seconds=0.4)
    assert decoupled(slow).hidden == pytest.approx(16e9 / (2 - 0.2 - 0.2 - 0.4))
    assert decoupled(replace(alone, upload_bits=4.0)).hidden == pytest.approx(10e9 / 2)


def test_more_overlap_tolerates_latency_and_cannot_go_below_the_average():
    # tau = 20 with a fragment every step: 20 uploads share the window, and the average of 8 Gbit/s binds.
    assert decoupled(replace(TWELVE, overlap_steps=20)).hidden == pytest.approx(8e9)
    assert decoupled(replace(TWELVE, overlap_steps=20, latency_seconds=4.0)).hidden == pytest.approx(8e9)


def test_what_queues_behind_others_asks_for_more():
    # A fragment at every step, 6 bits up and 2 down, 3 s for each: n = 1 asks for 8/3, n = 2 for 14/4, n = 3 for 20/5,
    # n = 4 for 26/6, and so on towards 6, the average.
    plan = Plan(1.0, 2, fragment_count=4, interval_steps=4, overlap_steps=3)
    assert least_rate(plan, 6.0, 2.0, 3.0) == pytest.approx(6.0)
    # Two fragments in an interval of 3 steps start at 0 and 1: both queue in a window of 1 s, 2 * 6 + 2 in 1 + 1 s.
    uneven = replace(plan, fragment_count=2, interval_steps=3)
    assert least_rate(uneven, 6.0, 2.0, 1.0) == pytest.approx(max(8 / 1, 14 / 2))
    assert least_rate(uneven, 6.0, 2.0, 2.0) == pytest.approx(max(8 / 2, 14 / 3, 6 * 2 / 3))


def test_a_grace_window_takes_its_length_over_gamma_from_the_window():
    # 1 step of grace at gamma 0.8 needs 1.25 steps of slack: 0.75 s are left for 16 Gbit.
    assert decoupled(TWELVE, grace_steps=1.0).hidden == pytest.approx(16e9 / 0.75)
    assert decoupled(replace(TWELVE, overlap_steps=1), grace_steps=1.0).hidden == math.inf
    assert decoupled(replace(TWELVE, grace_share=0.0), grace_steps=1.0).hidden == math.inf


def test_an_all_reduce_moves_both_halves_in_both_directions():
    need = streaming(TWELVE)
    assert need.up == need.down == pytest.approx(7 / 8 * 32 * 12e9 / 24)
    # 14 Gbit per fragment and direction, every second, in windows of 2 s: the average binds.
    assert need.hidden == pytest.approx(14e9)
    assert streaming(replace(TWELVE, overlap_steps=1, latency_seconds=0.1)).hidden == pytest.approx(14e9 / 0.8)
    assert streaming(replace(TWELVE, learner_count=1)) == replace(need, up=0.0, down=0.0, hidden=0.0)


def test_data_parallel_moves_the_whole_gradient_at_every_step():
    need = data_parallel(replace(TWELVE, latency_seconds=0.25))
    assert need.up == pytest.approx(2 * 7 / 8 * 16 * 12e9)
    assert need.hidden == pytest.approx(2 * need.up)
    assert data_parallel(replace(TWELVE, latency_seconds=0.5)).hidden == math.inf
    assert data_parallel(replace(TWELVE, learner_count=1, latency_seconds=0.5)).hidden == 0.0


@pytest.mark.parametrize("plan", [TWELVE, replace(TWELVE, fragment_count=7, overlap_steps=5, latency_seconds=0.05)])
def test_no_queue_of_fragments_is_late_at_the_rate_and_some_is_just_below(plan):
    """The closed formula against the queues themselves, in exact arithmetic."""
    rate = decoupled(plan).hidden
    assert not _is_late(plan, rate * (1 + 1e-9))
    assert _is_late(plan, rate * (1 - 1e-6))


def test_the_queues_agree_for_many_shapes():
    for fragments, interval, overlap, up in [
        (1, 1, 0, 16),
        (3, 7, 2, 4),
        (5, 24, 6, 32),
        (10, 24, 3, 16),
        (7, 9, 8, 8),
    ]:
        plan = Plan(1e9, 4, fragments, interval, max(overlap, 0), 0.5, upload_bits=up, latency_seconds=0.01)
        rate = decoupled(plan).hidden
        if rate < math.inf:
            assert not _is_late(plan, rate * (1 + 1e-9)), plan
            assert _is_late(plan, rate * (1 - 1e-6)), plan


def _is_late(plan, rate):
    """Whether any fragment of many intervals is late on a link of a rate: two queues, one after the other.

    What is to be served is added up for so long that a link just below the average falls behind by a window.
    """
    policy = Policy(fragment_count=plan.fragment_count, interval_steps=plan.interval_steps)
    up, down = (Fraction(plan.fragment_parameters * bits / rate) for bits in (plan.upload_bits, plan.download_bits))
    delay = Fraction(plan.merge_seconds) + 2 * Fraction(plan.latency_seconds)
    window = plan.overlap_steps * Fraction(plan.step_seconds) - Fraction(plan.quorum_seconds)
    short = max(up, down) * plan.fragment_count - Fraction(plan.interval_seconds)
    if short > 0:
        return True  # it falls behind by so much in every interval
    up_free = down_free = Fraction(0)
    for cycle in range(3):
        for offset in policy.fragment_offsets:
            copied = (cycle * plan.interval_steps + offset) * Fraction(plan.step_seconds)
            up_free = max(up_free, copied) + up
            down_free = max(down_free, up_free + delay) + down
            if down_free > copied + window:
                return True
    return False


def test_what_fits_a_link_is_found_on_its_edge():
    link = 6e9
    assert not decoupled(TWELVE).fits(link)
    assert decoupled(replace(TWELVE, parameter_count=largest_model(TWELVE, link))).hidden == pytest.approx(link)
    int4 = replace(TWELVE, upload_bits=4.125)
    # The average down of 8 Gbit/s halves at H = 48; (2 + 8) / 2 Gbit/s for a fragment alone fit.
    steps = smallest_interval(int4, link)
    assert steps == 48
    assert decoupled(replace(int4, interval_steps=steps)).fits(link)
    assert not decoupled(replace(int4, interval_steps=steps - 1)).fits(link)
    # A fragment alone needs (8 + 8) / 2 Gbit/s whatever H is.
    assert smallest_interval(TWELVE, link) is None
    assert smallest_overlap(TWELVE, link) is None
    assert smallest_overlap(replace(TWELVE, interval_steps=96), 4e9) == 4
    assert fitting_encodings(replace(TWELVE, interval_steps=96), 6.1e9) == ("int8", "int4")


def test_the_syncers_link_serves_so_many_learners():
    assert most_learners(TWELVE, 64e9) == 8
    assert most_learners(TWELVE, 63.9e9) == 7
    assert most_learners(replace(TWELVE, latency_seconds=1.0), 64e9) == 0
