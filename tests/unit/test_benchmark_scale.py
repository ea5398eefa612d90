import pytest

from benchmarks.figures import Section
from benchmarks.scale import Measured, growth, line_through, measure_learners, section_of, spread_ms


def test_points_on_a_line_do_not_deviate_from_it():
    line = line_through([(8, 45.0), (16, 85.0), (64, 325.0)])
    assert (line.base, line.slope, line.deviation) == pytest.approx((5.0, 5.0, 0.0), abs=1e-9)


def test_what_grows_with_the_square_deviates():
    assert line_through([(8, 64.0), (16, 256.0), (32, 1024.0), (64, 4096.0)]).deviation > 0.3
    assert growth([(8, 64.0), (64, 4096.0)]) == pytest.approx(2.0)
    assert growth([(8, 45.0), (64, 325.0)]) < 1.0
    with pytest.raises(ValueError, match="different x"):
        line_through([(8, 1.0), (8, 2.0)])


def test_the_spread_of_decisions_is_in_milliseconds():
    assert spread_ms([0.001 * number for number in range(1, 101)]) == pytest.approx((51.0, 100.0, 100.0))


async def test_a_few_learners_take_part_in_every_round_and_their_decisions_are_timed():
    found = await measure_learners(3, 3, step_seconds=0.1)
    assert found.contributors == 3.0
    assert found.rounds >= 3
    assert found.committed == found.opened > found.rounds
    assert (found.overloaded, found.broken) == (0, 0)
    assert 0 < found.queue_highest < 4096
    assert found.question_ms > 0
    assert 0 < found.decision_ms[0] <= found.decision_ms[1] <= found.decision_ms[2]


def measured(learners, cpu_seconds, **more):
    values = {
        "contributors": float(learners), "rounds": 10, "wall_seconds": 10.0, "opened": 20, "committed": 20,
        "queue_highest": learners, "overloaded": 0, "broken": 0, "upload_ms": 3.0, "question_ms": 1.0,
        "decision_ms": (0.01, 0.1, 1.0), "merge_decision_ms": 0.1,
    }  # fmt: skip
    return Measured(learners=learners, cpu_seconds=cpu_seconds, **(values | more))


def test_a_straight_line_meets_its_target_and_a_lost_round_misses_its_own():
    found = [measured(count, 0.1 + 0.05 * count) for count in (8, 16, 32, 64, 64, 32, 16, 8)]
    figures = {figure.name: figure for figure in section_of(found).figures}
    assert all(figure.is_met is not False for figure in figures.values())
    assert figures["processor time for one more contributor"].value == pytest.approx(5.0)
    assert figures["processor time for a round of nobody"].value == pytest.approx(10.0)
    assert figures["processor time per round, 64 learners"].value == pytest.approx(330.0)
    section = section_of([*found, measured(64, 3.3, committed=19, overloaded=1)])
    missed = {figure.name for figure in section.figures if figure.is_met is False}
    assert missed == {"rounds that were committed", "transfers refused for want of room"}
    assert Section.from_json(section.to_json()).figures == section.figures
