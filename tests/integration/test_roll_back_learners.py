"""Real learner sessions of a run that is rolled back."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise

from decoupled_diloco.core.ids import RunPhase
from tests.integration.learner_threads import Trainee, figure, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer, until
from tests.integration.test_mirror import Gate


async def test_learners_train_on_from_the_checkpoint_by_themselves(tmp_path):
    config = config_of(run={"total_steps": 96})
    trainees = [Trainee(name, start_values(seed), step_seconds=0.01) for seed, name in enumerate("ab")]
    cursors: dict[str, list[int]] = {"a": [], "b": []}
    for trainee in trainees:
        trainee.on_step = lambda session, _, seen=cursors[trainee.name]: seen.append(session.cursor)
    async with syncer(tmp_path, config) as running:
        machine = machine_of(running)
        training = asyncio.create_task(train(running, config, *trainees, seconds=60))
        await until(running, lambda: machine.rounds.committed_count >= 6)
        checkpoints = running.safekeeping.checkpoints
        manifest = await checkpoints.create("good")
        await until(running, lambda: machine.rounds.committed_count >= manifest.state.committed_count + 8)
        count = machine.rounds.committed_count
        await checkpoints.roll_back("good", "to see whether they come back")
        assert machine.global_step == manifest.state.global_step
        await training
        assert machine.phase is RunPhase.FINISHED
        assert machine.global_step == 96
        assert {version.timeline for version in machine.versions} == {2}
        assert machine.rounds.committed_count > count + 8
        pairs = zip(machine.versions, manifest.state.versions, strict=True)
        assert all(version.number > old.number for version, old in pairs)
    for trainee in trainees:
        assert figure(trainee.session, "digest_mismatches_total") == 0
        seen = cursors[trainee.name]
        backwards = [later for earlier, later in pairwise(seen) if later < earlier]
        assert len(backwards) == 1, "the data of the undone steps is read again, once"
        slot = next(a for a in manifest.state.learners if a.learner == trainee.name).slot
        assert backwards[0] - manifest.state.slot_cursors[slot] <= 1


async def test_learners_go_on_with_a_syncer_that_has_only_the_mirror(tmp_path, monkeypatch):
    url, config = str(tmp_path / "mirror"), config_of(run={"total_steps": 96})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
    trainee = Trainee("a", start_values(), step_seconds=0.01)
    training = asyncio.create_task(train(listen, config, trainee, seconds=60))
    gate = Gate(monkeypatch)
    async with syncer(tmp_path / "one", config, listen=listen, mirror_url=url) as running:
        machine = machine_of(running)
        await until(running, lambda: machine.rounds.committed_count >= 6)
        await until(running, lambda: running.safekeeping.mirror.lag_rounds() <= 2)
        gate.failure = OSError("the whole place is gone")
        await until(running, lambda: running.safekeeping.mirror.lag_rounds() >= 8)
        steps = trainee.step_count
    async with syncer(tmp_path / "two", config, listen=listen, restore_from=url) as running:
        machine = machine_of(running)
        assert machine.timeline > 1
        await training
        assert machine.phase is RunPhase.FINISHED
        assert machine.global_step == 96
    assert trainee.step_count > steps
    assert figure(trainee.session, "digest_mismatches_total") == 0
