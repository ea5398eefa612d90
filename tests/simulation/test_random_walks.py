"""Runs with every trouble at once keep every rule, heal, and end. `make simulate` goes through many more of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.walk import Walk

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(12))
def test_a_run_full_of_trouble(seed: int) -> None:
    Walk(seed).go(40.0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(100, 200, 10))
def test_longer_runs_full_of_trouble(first: int) -> None:
    for seed in range(first, first + 10):
        Walk(seed).go(120.0)


def digest_of(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "simulator", "--digest", str(seed)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_same_seed_gives_the_same_run_in_every_process() -> None:
    assert len({digest_of(7, hash_seed) for hash_seed in ("1", "2")}) == 1
    assert digest_of(7, "1") != digest_of(8, "1")


def test_the_tape_of_every_syncer_replays_to_the_same_effects() -> None:
    """A machine alone, fed with the events that it got, decides the same: all randomness is outside."""
    world = Walk(10).run(40.0)
    assert len(world.tape) > 1
    world.check_replays()


class EagerMachine(SyncerMachine):
    """Looks at every round and learner after every event, as if each could change everything."""

    def _leaves_rounds_alone(self, event: ev.Event, now: float) -> bool:
        self.presence.touch()
        return False


@pytest.mark.parametrize("seed", range(20, 80, 10))
def test_leaving_rounds_alone_after_events_that_cannot_change_them_changes_no_decision(seed: int) -> None:
    Walk(seed).run(30.0).check_replays(EagerMachine)
