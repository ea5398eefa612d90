"""Learners that die, pause, finish: the others go on."""

import asyncio

import numpy as np
import structlog

from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Fate, Role, RunPhase
from decoupled_diloco.core.learner_effects import Hold
from decoupled_diloco.wire import control
from syncer_service import overview
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.protocol_link import Link
from tests.integration.syncers import config_of, machine_of, syncer, until


def learner(running, config, name, **script):
    return ProtocolLearner(str(running.addresses.data), name, config.to_policy(), Script(**script))


def committed(running):
    return machine_of(running).rounds.committed_count


async def ended(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_learner_dies_and_comes_back_and_nobody_else_stops(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        machine = machine_of(running)
        stayer, victim = learner(running, config, "a"), learner(running, config, "b", seed=1)
        staying, dying = asyncio.create_task(stayer.run()), asyncio.create_task(victim.run())
        await until(running, lambda: committed(running) >= 6 and machine.participating_count == 2)
        await ended(dying)
        before = committed(running)
        await until(running, lambda: committed(running) >= before + 8)

        reborn = learner(running, config, "b", seed=1)
        living = asyncio.create_task(reborn.run())
        await until(running, lambda: machine.participating_count == 2)
        record = machine.membership.learners["b"]
        assert record.slot == victim.link.joined.slot
        assert record.cursor > 0
        assert stayer.machine.local_step > reborn.machine.local_step
        await until(running, lambda: len(reborn.fates) >= 3)
        assert all(digest == version.digest for _, version, digest in reborn.applied)
        await ended(staying, living)


async def test_a_learner_with_values_that_are_not_finite_recovers_and_takes_part_again(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        sick = learner(running, config, "a", poison_round=5)
        sound = learner(running, config, "b", seed=1)
        tasks = [asyncio.create_task(sick.run()), asyncio.create_task(sound.run())]
        await until(running, lambda: 5 in sick.fates)
        assert sick.fates[5] is Fate.NONFINITE
        await until(running, lambda: any(number > 5 and fate is Fate.ACCEPTED for number, fate in sick.fates.items()))
        for commit in running.serving.store.newest().values():
            assert np.isfinite(commit.state.theta).all()
        await ended(*tasks)


async def test_pause_holds_the_steps_and_resume_lets_them_go_on(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        one = learner(running, config, "a")
        task = asyncio.create_task(one.run())
        await until(running, lambda: committed(running) >= 4)
        driver = running.serving.driver
        await driver.request(lambda token: ev.PauseRequested(token, "lunch"), type(None))
        await until(running, lambda: one.hold is Hold.PAUSED)
        paused_at = one.machine.local_step
        assert machine_of(running).status(running.serving.clock.now()).phase is RunPhase.PAUSED
        await driver.request(ev.ResumeRequested, type(None))
        await until(running, lambda: one.machine.local_step > paused_at + 5)
        await ended(task)


async def test_finish_takes_one_last_round_of_every_fragment_and_exports(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        team = [learner(running, config, name, seed=seed) for seed, name in enumerate("ab")]
        tasks = [asyncio.create_task(one.run()) for one in team]
        await until(running, lambda: committed(running) >= 4)
        finish = lambda token: ev.FinishRequested(token, "enough")  # noqa: E731
        await running.serving.driver.request(finish, type(None))
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)
            assert (await running.ending.exported).exists()
        assert all(one.left for one in team)
        assert machine_of(running).steering.finish_reason == "enough"


async def test_observers_are_told_of_versions_and_never_waited_for(tmp_path):
    config = config_of(run={"total_steps": 16})
    async with syncer(tmp_path, config) as running:
        watcher = Link(str(running.addresses.data), "evaluator")
        await watcher.join(Role.OBSERVER)
        async with watcher.attached() as stream:
            task = asyncio.create_task(learner(running, config, "a").run())
            seen = []
            async with asyncio.timeout(20):
                while not any(isinstance(event, lev.Ended) for event in seen):
                    seen.append(control.instruction_from_wire(await stream.read()))
                # After the end the last versions can still be had.
                for fragment, version in enumerate(machine_of(running).versions):
                    await watcher.download(fragment, version)
                await watcher.leave()
                await task
            assert not any(isinstance(event, lev.Asked) for event in seen)
            published = [event.version for event in seen if isinstance(event, lev.Published)]
            assert set(machine_of(running).versions) <= set(published)
        await watcher.close()


async def test_a_run_that_never_began_can_be_finished(tmp_path):
    async with syncer(tmp_path) as running:
        finish = lambda token: ev.FinishRequested(token, "nobody came")  # noqa: E731
        await running.serving.driver.request(finish, type(None))
        assert await asyncio.wait_for(running.ending.exported, 10) is None


async def test_without_learners_the_syncer_says_that_it_waits(tmp_path):
    with structlog.testing.capture_logs() as lines:
        config = config_of()
        async with syncer(tmp_path, config) as running:
            task = asyncio.create_task(learner(running, config, "a").run())
            await until(running, lambda: any(line["event"] == "run_goes_on" for line in lines))
            await ended(task)
    told = [(line["event"], line["reason"]) for line in lines if line["event"].startswith("run_")]
    assert told[0] == ("run_waits", "waiting for learners to join")
    assert told.count(("run_goes_on", "1 learner is live")) == 1


async def test_a_pause_and_the_end_are_no_going_on(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "WAITS_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(overview, "PROGRESS_SECONDS", 0.02)
    with structlog.testing.capture_logs() as lines:
        config = config_of()
        async with syncer(tmp_path, config) as running:
            task = asyncio.create_task(learner(running, config, "a").run())
            await until(running, lambda: any(line["event"] == "run_progress" for line in lines))
            driver = running.serving.driver
            await driver.request(lambda token: ev.PauseRequested(token, "lunch"), type(None))
            await asyncio.sleep(0.1)
            await driver.request(lambda token: ev.FinishRequested(token, "enough"), type(None))
            await asyncio.wait_for(running.ending.exported, 20)
            await asyncio.wait_for(task, 20)
    goes_on = [line["reason"] for line in lines if line["event"] == "run_goes_on"]
    assert goes_on == ["1 learner is live"]
    progress = [line for line in lines if line["event"] == "run_progress"]
    counts = [line["rounds_committed"] for line in progress]
    assert counts == sorted(set(counts))
    assert progress[0]["learners_live"] == 1
