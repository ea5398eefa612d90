"""Hundreds of rounds: what learners hold is, to the bit, what the syncer published."""

from __future__ import annotations

import pytest

from tests.integration.learner_threads import Trainee, figure, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer

ROUNDS = 200


@pytest.mark.slow
async def test_after_200_rounds_every_applied_version_has_the_syncers_digest(tmp_path):
    config = config_of(run={"total_steps": 2 * ROUNDS}, encoding={"upload": "bf16", "download": "bf16"})
    trainees = [Trainee(name, start_values(seed), step_seconds=0.005) for seed, name in enumerate("abc")]
    async with syncer(tmp_path, config) as running:
        await train(running, config, *trainees, seconds=100)
        machine = machine_of(running)
        published = {(fragment, version) for fragment, version, _ in machine.published()}
        assert machine.rounds.committed_count >= ROUNDS
    for trainee in trainees:
        # Every version was compared when it was applied, by its digest and on the devices.
        assert figure(trainee.session, "digest_mismatches_total") == 0
        assert figure(trainee.session, "verified_versions_total") >= 0.9 * ROUNDS
        applied = trainee.session._handover.snapshot().applied
        newest = {fragment: version.number for fragment, version in published}
        assert all(newest[fragment] - version.number <= 3 for fragment, version in applied.items())
