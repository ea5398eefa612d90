"""A run of one learner, which has nobody to wait for it or to go on without it."""

import math

import pytest

from tests.integration.learner_threads import Trainee, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer


@pytest.mark.parametrize("fragment_count", [1, 3])
async def test_a_lone_learner_whose_loss_is_not_finite_starts_over_and_the_run_goes_on(tmp_path, fragment_count):
    config = config_of(
        run={"total_steps": 48}, fragments={"count": fragment_count, "interval_steps": 4, "overlap_steps": 1}
    )
    async with syncer(tmp_path, config) as running:
        lone = Trainee("lone", start_values(5), step_seconds=0.01)
        lone.loss_of = lambda number, loss: math.nan if number == 20 else loss
        await train(running, config, lone, seconds=60)
        assert len(lone.restarts) == 1
        assert machine_of(running).rounds.committed_count >= 8 * fragment_count
