"""The pacing equivalence: whatever the speeds, every learner is in every round and every fragment, and H keeps.

All of it at the level of the machines, in virtual time: one second is one step of the fastest learner.
"""

from __future__ import annotations

import pytest

from decoupled_diloco.core.policy import Policy
from tests.simulation.paced_world import PacedWorld

SPEEDS = {"fast": 1.0, "near": 1 / 1.22, "half": 1 / 2, "third": 1 / 3}
SHAPES = {"P24": (24, 2), "P8": (8, 2), "P24-tau1": (24, 1)}
WARM_UP = 20
"""Rounds until the step times of the learners are known."""
DEPTH_STEPS = 0.6
"""A round may make up for half a step of a late one; the rest is the noise of the measured step time."""


def world_of(shape: str, jitter: float = 0.0, upload: float = 0.0, seed: int = 1, **policy: object) -> PacedWorld:
    fragments, overlap = SHAPES[shape]
    run = Policy(fragment_count=fragments, interval_steps=24, overlap_steps=overlap).changed(**policy)
    world = PacedWorld(run, seed)
    for name, speed in SPEEDS.items():
        world.add(name, speed, jitter=jitter, upload_seconds=upload)
    return world


def check_everybody_is_everywhere(world: PacedWorld, first: int, names: object = SPEEDS) -> None:
    """Every learner in almost every round, and in every fragment as often as there was a round of it."""
    rounds = len(world.closed[first:])
    for name in names:  # type: ignore[attr-defined]
        assert world.participation(name, first) >= 0.97, name
        merged = world.fragments_of(name, first)
        least = min(merged[fragment] for fragment in range(world.policy.fragment_count))
        assert least >= 0.9 * (rounds // world.policy.fragment_count), name


def check_pace(world: PacedWorld, first: int, expected: float = 24.0) -> None:
    """H within a tenth of its setting, and no round far ahead of its pace: no burst."""
    assert world.interval_steps(first) == pytest.approx(expected, rel=0.1)
    assert world.steps_early(first) <= DEPTH_STEPS


@pytest.mark.parametrize("upload", [0.0, 0.5, 3.0], ids="upload{}".format)
@pytest.mark.parametrize("jitter", [0.0, 0.1], ids="jitter{}".format)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_learner_in_every_round_at_every_speed(shape: str, jitter: float, upload: float) -> None:
    world = world_of(shape, jitter, upload)
    world.run_rounds(300 if shape != "P8" else 150)
    check_everybody_is_everywhere(world, WARM_UP)
    check_pace(world, WARM_UP)
    assert world.syncer.rounds.abandoned_count == 0


@pytest.mark.slow
@pytest.mark.parametrize("upload", [0.0, 0.5, 3.0], ids="upload{}".format)
@pytest.mark.parametrize("shape", SHAPES)
def test_thousands_of_rounds(shape: str, upload: float) -> None:
    world = world_of(shape, 0.1, upload, seed=2)
    world.run_rounds(3000)
    check_everybody_is_everywhere(world, WARM_UP)
    check_pace(world, WARM_UP)


@pytest.mark.parametrize("slower", ["near", "half", "third"])
def test_two_learners_of_unequal_speed(slower: str) -> None:
    world = PacedWorld(Policy(fragment_count=24, interval_steps=24))
    for name in ("fast", slower):
        world.add(name, SPEEDS[name], jitter=0.1, upload_seconds=0.5)
    world.run_rounds(200)
    check_everybody_is_everywhere(world, WARM_UP, ("fast", slower))
    check_pace(world, WARM_UP)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_link_with_latency(shape: str) -> None:
    world = PacedWorld(Policy(fragment_count=SHAPES[shape][0], interval_steps=24, overlap_steps=SHAPES[shape][1]))
    for name, speed in SPEEDS.items():
        world.add(name, speed, jitter=0.1, upload_seconds=0.5, download_seconds=0.1, latency_seconds=0.1)
    world.run_rounds(150)
    check_everybody_is_everywhere(world, WARM_UP)
    check_pace(world, WARM_UP)


# ---- outages and joiners -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "name"), [("P24", "half"), ("P8", "half"), ("P24-tau1", "third"), ("P8", "fast")])
def test_an_outage_of_a_thousand_steps_of_one_learner(shape: str, name: str) -> None:
    world = world_of(shape, 0.1, 0.5)
    world.run_rounds(60)
    gone = len(world.closed)
    world.disconnect(world.learners[name])
    world.run(until=world.now + 1000.0)
    back = len(world.closed)
    assert world.participation(name, gone + 4, back) == 0.0
    others = 24.0 if name != "fast" else 24.0 / SPEEDS["near"]
    assert world.interval_steps(gone + 10, back) == pytest.approx(others, rel=0.1)

    world.reconnect(world.learners[name])
    world.run_rounds(max(120, 5 * world.policy.fragment_count))
    check_everybody_is_everywhere(world, back + 6)
    check_pace(world, back + 6)
    assert world.steps_early(gone) <= DEPTH_STEPS, "no burst when it is back"


@pytest.mark.parametrize("shape", SHAPES)
def test_an_outage_of_a_thousand_steps_of_all(shape: str) -> None:
    world = world_of(shape, 0.1, 0.5)
    world.run_rounds(60)
    gone = len(world.closed)
    for learner in world.learners.values():
        world.disconnect(learner)
    world.run(until=world.now + 1000.0)
    back = len(world.closed)
    assert back - gone <= world.policy.rounds_in_flight_max(None, None), "only what was complete"
    assert not world.syncer.membership.live()

    for learner in world.learners.values():
        world.reconnect(learner)
    world.run_rounds(max(120, 5 * world.policy.fragment_count))
    check_everybody_is_everywhere(world, back + 6)
    check_pace(world, back + 6)
    assert world.steps_early(gone) <= DEPTH_STEPS, "a thousand steps are not made up for"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_joiner_in_the_middle(shape: str) -> None:
    world = world_of(shape, 0.1, 0.5)
    world.run_rounds(60)
    world.add("late", 0.6, jitter=0.1, upload_seconds=0.5)
    joined = len(world.closed)
    world.run_rounds(max(120, 5 * world.policy.fragment_count))
    check_everybody_is_everywhere(world, joined + 8, [*SPEEDS, "late"])
    check_pace(world, WARM_UP)


def test_a_joiner_that_is_faster_than_everybody_sets_the_pace() -> None:
    world = world_of("P8", 0.0, 0.5)
    world.run_rounds(60)
    world.add("faster", 2.0, upload_seconds=0.5)
    joined = len(world.closed)
    world.run_rounds(120)
    check_everybody_is_everywhere(world, joined + 8, [*SPEEDS, "faster"])
    assert world.interval_steps(joined + 20) == pytest.approx(12.0, rel=0.1)  # in steps of what was the fastest


# ---- quorums above one ---------------------------------------------------------------------------------------------


def test_while_the_rounds_in_flight_hide_it_a_quorum_of_all_keeps_H() -> None:
    """Asks are by time: every learner answers every round at the pace, with as many steps as it could make."""
    world = world_of("P8", 0.1, 0.5, quorum_minimum=4)
    world.run_rounds(150)
    check_everybody_is_everywhere(world, WARM_UP)
    check_pace(world, WARM_UP)


@pytest.mark.parametrize(("shape", "slow", "expected"), [("P24-tau1", 1 / 4, 48.0), ("P24-tau1", 1 / 6, 72.0)])
def test_H_follows_the_kth_fastest_learner(shape: str, slow: float, expected: float) -> None:
    """A learner answers all rounds in flight with one step: F = 2 rounds for each of its steps, and not more."""
    fragments, overlap = SHAPES[shape]
    policy = Policy(fragment_count=fragments, interval_steps=24, overlap_steps=overlap, quorum_minimum=2)
    world = PacedWorld(policy)
    world.add("fast", 1.0, jitter=0.1, upload_seconds=0.5)
    world.add("slow", slow, jitter=0.1, upload_seconds=0.5)
    world.run_rounds(120)
    check_everybody_is_everywhere(world, WARM_UP, ("fast", "slow"))
    check_pace(world, WARM_UP, expected)


def test_a_learner_beyond_the_quorum_does_not_slow_the_run_down() -> None:
    world = PacedWorld(Policy(fragment_count=8, interval_steps=24, quorum_minimum=2))
    for name, speed in (("fast", 1.0), ("half", 0.5), ("slow", 0.1)):
        world.add(name, speed, jitter=0.1, upload_seconds=0.5)
    world.run_rounds(150)
    check_everybody_is_everywhere(world, WARM_UP, ("fast", "half"))
    check_pace(world, WARM_UP)


# ---- ablations -----------------------------------------------------------------------------------------------------


def test_without_the_last_call_fragments_alias() -> None:
    """Why the last call exists: a learner at half speed meets the same half of the fragments for ever."""
    strict = PacedWorld(Policy(fragment_count=8, interval_steps=24, last_call=False))
    called = PacedWorld(Policy(fragment_count=8, interval_steps=24))
    for world in (strict, called):
        world.add("fast", 1.0)
        world.add("half", 0.5)
        world.run_rounds(150)
    assert set(strict.fragments_of("half", WARM_UP)) == {1, 3, 5, 7}
    assert set(called.fragments_of("half", WARM_UP)) == set(range(8))


@pytest.mark.parametrize("upload", [0.0, 0.5])
def test_the_overlap_costs_no_more_than_its_steps(upload: float) -> None:
    """Nobody answers earlier and earlier: what is made between copy and arrival stays about a step of 24."""
    world = PacedWorld(Policy(fragment_count=8, interval_steps=24))
    for index in range(4):
        world.add(f"equal-{index}", 1.0, jitter=0.1, upload_seconds=upload)
    world.run_rounds(300)
    figures = world.syncer.status(world.now).goodput
    assert figures.tokens_discarded["overlap"] / figures.tokens_processed <= (1.0 + upload + 0.5) / 24


# ---- the barrier ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("fast",), ("fast", "half", "third")])
@pytest.mark.parametrize("fragments", [1, 4])
def test_behind_the_barrier_training_is_synchronous(names: tuple[str, ...], fragments: int) -> None:
    """K = M: every contribution holds exactly H steps (the first ones t_p + 1), nothing is ever overwritten."""
    interval = 8
    policy = Policy(
        fragment_count=fragments, interval_steps=interval, quorum_minimum=len(names), barrier=True, overlap_steps=0
    )
    world = PacedWorld(policy)
    for name in names:
        world.add(name, SPEEDS[name], jitter=0.1, upload_seconds=0.5, download_seconds=0.2)
    world.run_rounds(60)
    for item in world.closed:
        steps = interval if item.round > fragments else policy.fragment_offsets[item.fragment] + 1
        assert item.step_counts == dict.fromkeys(names, steps)
    figures = world.syncer.status(world.now).goodput
    assert sum(figures.tokens_discarded.values()) == 0.0
    # Everybody stands at the run's global step, and so does its learning-rate schedule.
    for learner in world.learners.values():
        assert learner.machine.local_step == learner.machine.schedule_step == world.syncer.global_step
