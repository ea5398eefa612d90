"""What the syncer's machine says of itself, and what it does when its own process stood still."""

from __future__ import annotations

import pytest

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import RoundState, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.round import TRANSITIONS, Round
from tests.scenarios.scenario_file import parse_command
from tests.scenarios.syncer_driver import SyncerDriver
from tests.simulation.paced_world import PacedWorld


def warnings_of(world: PacedWorld) -> str:
    return "\n".join(world.syncer.status(world.now).warnings)


def two_learners(policy: Policy, slow: float, **speed: float) -> PacedWorld:
    world = PacedWorld(policy)
    world.add("fast", 1.0, **speed)
    world.add("slow", slow, **speed)
    return world


def test_an_ordinary_run_warns_of_nothing() -> None:
    world = two_learners(Policy(fragment_count=8, interval_steps=24), 0.5, jitter=0.1, upload_seconds=0.5)
    world.run_rounds(100)
    assert warnings_of(world) == ""
    assert world.syncer.status(world.now).effective_interval_steps == pytest.approx(24.0, rel=0.05)


def test_an_outage_does_not_count_as_a_longer_interval() -> None:
    world = two_learners(Policy(fragment_count=8, interval_steps=24), 0.5)
    world.run_rounds(40)
    for learner in world.learners.values():
        world.disconnect(learner)
    world.run(until=world.now + 1000.0)
    for learner in world.learners.values():
        world.reconnect(learner)
    world.run_rounds(10)
    assert warnings_of(world) == ""
    assert world.syncer.status(world.now).effective_interval_steps == pytest.approx(24.0, rel=0.1)


def test_a_sync_that_takes_longer_than_tau_says_raise_tau() -> None:
    policy = Policy(fragment_count=24, interval_steps=24, overlap_steps=1)
    world = two_learners(policy, 0.5, upload_seconds=3.0)
    world.run_rounds(120)
    assert "more than tau = 1: raise tau (effective H = 24" in warnings_of(world)


def test_rounds_in_flight_that_are_used_up_say_so_with_the_effective_interval() -> None:
    policy = Policy(fragment_count=24, interval_steps=24, overlap_steps=1, quorum_minimum=2)
    world = two_learners(policy, 0.25)
    world.run_rounds(150)
    text = warnings_of(world)
    assert "instead of 24: the 2 rounds in flight are used up by waiting for a quorum of 2; raise tau" in text
    assert world.syncer.status(world.now).effective_interval_steps == pytest.approx(48.0, rel=0.1)


def test_fewer_than_half_of_the_learners_in_the_newest_round_is_worth_a_warning() -> None:
    driver = SyncerDriver({"stall": "100", "lease": "100"})
    for command in ("begin a b c", "at 1 upload a round=1 step=1", "timer", "timer", "finish_round 1"):
        driver.execute(parse_command(command))
    assert driver.machine.status(driver.now).warnings == ("only 1 of 3 live learners made the newest round",)


def test_while_the_syncer_stood_still_nobody_lost_a_lease_or_an_upload() -> None:
    """A suspended host, a debugger, a machine that swaps: everybody's reports lie in the queue when it goes on."""
    driver = SyncerDriver({"lease": "10"})
    for command in ("begin a b", "at 1 progress a step=1", "progress b step=1", "start a round=1", "start b round=1"):
        driver.execute(parse_command(command))
    driver.now = 100.0  # no timer fired on the way
    effects = driver.machine.handle(ev.ProgressReported("a", 1, ev.Progress(99, 990, step_seconds=1.0)), driver.now)
    assert effects == []
    assert [learner.state.value for learner in driver.machine.learners(driver.now)] == ["live", "live"]
    assert driver.execute(parse_command("receive b round=1")) == ["answer: accepted"]
    # From then on the deadlines count again. The timer was due at 3 s and came at 100 s: 97 s are forgiven.
    lines = driver.execute(parse_command("at 109 progress a step=108"))
    assert lines[0] == "(at 103 s) abort upload of a to round 1: its upload passed its deadline"
    assert driver.execute(parse_command("at 111 status"))[0] == "(at 110 s) cut off b/2: not heard of for 10.0 s"


def test_a_round_changes_state_only_along_its_table() -> None:
    for before in RoundState:
        for after in RoundState:
            item = Round(1, 0, Version(1, 1), 0, 0.0, state=before)
            if after in TRANSITIONS[before]:
                item.move(after, "a reason")
                assert (item.state, item.reason) == (after, "a reason")
            else:
                with pytest.raises(ValueError, match="cannot go from"):
                    item.move(after, "a reason")
