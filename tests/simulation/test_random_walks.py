"""Runs with every trouble at once keep every promise (`WatchedWorld` checks them), recover, and end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.syncer import SyncerMachine
from tests.simulation.random_walk import Walk, digest_of

ROOT = Path(__file__).parents[2]


def walk(seed: int, seconds: float) -> None:
    run = Walk(seed)
    world = run.run(seconds)
    assert run.has_recovered(), world.syncer.status(world.now).reason
    run.finish()
    assert world.finished, world.syncer.status(world.now).reason


@pytest.mark.parametrize("seed", range(20))
def test_a_run_full_of_trouble(seed: int) -> None:
    walk(seed, seconds=40.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_a_longer_run_full_of_trouble(seed: int) -> None:
    walk(seed, seconds=150.0)


def test_the_same_events_give_the_same_effects_in_every_process() -> None:
    digests = {digest_of(7, 20.0)}
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.simulation.random_walk", "7", "20"]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_the_tape_of_a_run_replays_to_the_same_effects() -> None:
    """The machine alone, fed with the events that it got, decides the same: all randomness is outside."""
    world = Walk(11).run(30.0)
    assert world.replay(SyncerMachine(world.policy)) == world.effects


class EagerMachine(SyncerMachine):
    """Looks at every round and learner after every event, as if each could change everything."""

    def _leaves_rounds_alone(self, event: ev.Event, now: float) -> bool:
        self.presence.touch()
        return False


@pytest.mark.parametrize("seed", range(20, 32))
def test_leaving_rounds_alone_after_events_that_cannot_change_them_changes_no_decision(seed: int) -> None:
    world = Walk(seed).run(30.0)
    assert world.replay(EagerMachine(world.policy)) == world.effects
