"""Library mode against a real syncer: what a training loop sees of a run."""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest

import decoupled_diloco
from decoupled_diloco.arrays.schema import SchemaError
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import LearnerState, RunPhase
from decoupled_diloco.runtime.config import ConfigError
from learner_service.recoveries import DivergedError
from learner_service.session import LearnerStoppedError
from learner_service.workload import MergeRule
from tests.integration.learner_threads import Trainee, eventually, figure, pull, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer, until

STEP = 0.01


def team(*names, **values):
    return [Trainee(name, start_values(seed), step_seconds=STEP, **values) for seed, name in enumerate(names, 1)]


def state_of(running, name):
    machine = machine_of(running)
    return machine.membership.learners[name].state(machine.policy, running.serving.clock.now())[0]


@pytest.mark.parametrize(
    ("rule", "encoding"), [("overwrite", "float32"), ("overwrite", "bf16"), ("carry", "bf16"), ("blend", "float32")]
)
async def test_two_learners_train_to_the_end_and_hold_what_the_syncer_published(tmp_path, encoding, rule):
    config = config_of(
        run={"total_steps": 32}, encoding={"upload": encoding, "download": encoding}, inner={"apply": rule}
    )
    async with syncer(tmp_path, config) as running:
        trainees = team("a", "b")
        await train(running, config, *trainees)
        machine = machine_of(running)
        assert machine.phase is RunPhase.FINISHED
        status = machine.status(running.serving.clock.now())
        assert status.rounds_committed_count >= 16
        assert status.goodput.participation > 0.5
        for trainee in trainees:
            assert trainee.step_count >= 28
            assert trainee.losses[-1] < trainee.losses[0]
            assert trainee.session.end_reason.startswith("the run has finished")
            assert figure(trainee.session, "verified_versions_total") >= (4 if rule != "overwrite" else 16)
            assert figure(trainee.session, "digest_mismatches_total") == 0
            assert figure(trainee.session, "network_wait_seconds") == 0
            assert state_of(running, trainee.name) is LearnerState.LEFT
        both = [record.rounds_merged for record in machine.membership.everybody()]
        assert np.min(both) >= 1, "every fragment gets contributions of every learner"


async def test_every_second_of_a_learner_is_accounted_for(tmp_path):
    config = config_of(run={"total_steps": 24})
    async with syncer(tmp_path, config) as running:
        trainees = team("a", "b")
        before = running.serving.clock.now()
        await train(running, config, *trainees)
        elapsed = running.serving.clock.now() - before
        for trainee in trainees:
            seconds = trainee.session._handover.activity_seconds()
            assert sum(seconds.values()) == pytest.approx(elapsed, abs=0.5)
            assert seconds["compute"] >= 24 * STEP * 0.8


async def test_a_loss_that_is_not_finite_makes_the_learner_start_over(tmp_path):
    config = config_of(run={"total_steps": 48})
    async with syncer(tmp_path, config) as running:
        a, b = team("a", "b")
        b.loss_of = lambda number, loss: loss * np.nan if number == 15 else loss
        await train(running, config, a, b)
        assert len(b.restarts) == 1
        assert a.restarts == []
        assert np.all(np.isfinite(b.losses))
        assert figure(b.session, "recoveries_total") == 1


async def test_values_that_are_not_finite_are_never_sent(tmp_path):
    config = config_of(run={"total_steps": 48})
    async with syncer(tmp_path, config) as running:
        a, b = team("a", "b")
        b.rate = lambda _: np.inf if b.step_count >= 15 and not b.restarts else 0.1
        b.loss_of = lambda number, loss: 1.0  # it does not tell
        await train(running, config, a, b)
        assert len(b.restarts) == 1
        assert "nonfinite" not in {fate.value for fate in machine_of(running).rounds.fates.values()}
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((a.params, b.params)))


async def test_a_learner_that_drains_leaves_in_good_order_and_the_others_go_on(tmp_path):
    config = config_of(run={"total_steps": 64})
    async with syncer(tmp_path, config) as running:
        a, b = team("a", "b")
        b.on_step = lambda d, number: d.drain("told to") if number == 10 else None
        await train(running, config, a, b)
        assert b.session.end_reason == "told to"
        assert b.step_count <= 14
        assert a.step_count >= 50
        assert machine_of(running).phase is RunPhase.FINISHED


async def test_a_learner_that_an_operator_drains_leaves_in_time_although_no_round_takes_its_steps(tmp_path):
    config = config_of(quorum={"minimum": 2})
    async with syncer(tmp_path, config) as running:
        a, b = team("a", "b")
        b.on_step = lambda d, number: d.drain("told to") if number == 20 else None
        training = asyncio.create_task(train(running, config, a, b, drain_seconds=0.5))
        learners = machine_of(running).membership.learners
        await until(running, lambda: "b" in learners and learners["b"].left)
        await running.serving.driver.request(lambda token: ev.DrainRequested(token, "a", "maintenance"), type(None))
        await training
        assert a.session.end_reason == "maintenance"
        assert learners["a"].left


async def test_a_paused_run_makes_no_steps_until_it_resumes(tmp_path):
    config = config_of(run={"total_steps": 40})
    async with syncer(tmp_path, config) as running:
        (a,) = team("a")
        training = asyncio.create_task(train(running, config, a))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 4)
        await running.serving.driver.request(lambda token: ev.PauseRequested(token, "lunch"), type(None))
        await until(running, lambda: state_of(running, "a") is LearnerState.PAUSED)
        count = a.step_count
        assert a.session.paused
        await asyncio.sleep(5 * STEP)
        assert a.step_count == count
        await running.serving.driver.request(ev.ResumeRequested, type(None))
        await training
        assert a.step_count > count


async def test_a_newer_process_with_the_same_id_stops_the_older_one(tmp_path):
    config = config_of(run={"total_steps": 0})
    async with syncer(tmp_path, config) as running:
        (old,) = team("a")
        training = asyncio.create_task(train(running, config, old))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 2)
        (new,) = team("a", on_step=lambda d, number: d.drain("enough") if number == 5 else None)
        newer = asyncio.create_task(train(running, config, new))
        with pytest.raises(LearnerStoppedError) as stopped:
            await training
        assert isinstance(stopped.value.cause, PeerError)
        assert stopped.value.cause.reason is Reason.STALE_INCARNATION
        await newer


async def test_a_learner_that_the_syncer_has_forgotten_joins_again_by_itself(tmp_path):
    config = config_of(run={"total_steps": 64})
    async with syncer(tmp_path, config) as running:
        (a,) = team("a")
        training = asyncio.create_task(train(running, config, a))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 6)
        record = machine_of(running).membership.learners["a"]
        await running.serving.driver.request(
            lambda token: ev.LearnerLeft(token, "a", record.incarnation, "evicted"), type(None)
        )
        await training
        assert machine_of(running).membership.learners["a"].incarnation > record.incarnation
        assert machine_of(running).phase is RunPhase.FINISHED
        assert a.restarts == [], "the optimizer's state is kept"


async def test_another_model_is_refused_with_both_sides_shown(tmp_path):
    config = config_of(run={"total_steps": 0})
    async with syncer(tmp_path, config) as running:
        (a,) = team("a", on_step=lambda d, number: d.drain("enough") if number == 10 else None)
        training = asyncio.create_task(train(running, config, a))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 1)
        other = Trainee("b", start_values(), params={**start_values(), "head": np.zeros(5, np.float32)})
        with pytest.raises(LearnerStoppedError, match=r"head.*4 in the run.*5 in b|head \(shape \[4\] in the run"):
            await train(running, config, other)
        await training


async def test_another_run_file_is_refused_with_both_sides_shown(tmp_path):
    async with syncer(tmp_path, config_of(run={"total_steps": 0})) as running:
        (a,) = team("a")
        with pytest.raises(LearnerStoppedError, match=r"outer\.learning_rate: syncer 0\.6, a 0\.9"):
            await train(running, config_of(run={"total_steps": 0}, outer={"learning_rate": 0.9}), a)


async def test_learners_with_different_tokenizers_do_not_meet(tmp_path):
    config = config_of(run={"total_steps": 0})
    async with syncer(tmp_path, config) as running:
        a, b = team("a", "b")
        training = asyncio.create_task(train(running, config, a, fingerprint={"tokenizer": "0123"}))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 1)
        with pytest.raises(LearnerStoppedError, match="tokenizer: a 0123, b 4567"):
            await train(running, config, b, fingerprint={"tokenizer": "4567"})
        a.session.drain("enough")
        await training


async def test_a_learner_trains_on_while_the_syncer_is_away_and_finds_it_again(tmp_path):
    config = config_of(run={"total_steps": 0}, inner={"max_detached_seconds": 0.0})
    (a,) = team("a")
    async with syncer(tmp_path, config) as running:
        address = running.addresses.data
        # The first address answers nobody; the learner goes on to the second one.
        settings = {"syncer": ("127.0.0.1:1", str(address))}
        training = asyncio.create_task(train(running, config, a, **settings))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 8)
        committed = {item.version.digest for item in machine_of(running).rounds.closed if item.version}
    alone_from = a.step_count
    await eventually(lambda: a.step_count >= alone_from + 20)
    async with syncer(tmp_path, config, listen=str(address)) as running:
        # Its state was in memory: the learner seeds it again with the newest versions that it holds.
        await until(running, lambda: machine_of(running).versions)
        seeds = {version.digest for version in machine_of(running).versions if version.number == 1}
        assert seeds <= committed
        await until(running, lambda: machine_of(running).rounds.committed_count >= 4)
        a.session.drain("enough")
        await training
    assert a.session.end_reason == "enough"


async def test_a_learner_pauses_when_it_was_alone_for_too_long(tmp_path):
    config = config_of(run={"total_steps": 0}, inner={"max_detached_seconds": 0.2})
    (a,) = team("a")
    async with syncer(tmp_path, config) as running:
        training = asyncio.create_task(train(running, config, a))
        await until(running, lambda: machine_of(running).rounds.committed_count >= 4)
    await eventually(lambda: a.session.paused)
    count = a.step_count
    await asyncio.sleep(10 * STEP)
    assert a.step_count == count
    a.session.drain("enough")
    await training


async def test_the_snippet_of_the_readme(tmp_path):
    config = config_of(run={"total_steps": 12})

    def train(address):
        with decoupled_diloco.learner(config, start_values(), learner_id="a", syncer=address) as d:
            params = d.params
            while not d.finished:
                params, loss = pull(params, start_values(1), 0.1)
                params = d.step_boundary(params, tokens=10, loss=loss)
        return d

    async with syncer(tmp_path, config) as running:
        d = await asyncio.to_thread(train, str(running.addresses.data))
        assert d.finished
        with pytest.raises(RuntimeError, match="go on with what step_boundary returned"):
            d.params  # noqa: B018
        # Whoever comes after the end is told so, and makes no step.
        late = await asyncio.to_thread(train, str(running.addresses.data))
        assert late.end_reason.startswith("the run has finished")


def test_a_setting_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"learner\.learner_name"):
        decoupled_diloco.learner({}, start_values(), learner_name="a")


def test_parameters_that_cannot_be_cut_into_so_many_fragments_are_refused_before_anything_is_sent():
    with pytest.raises(ConfigError, match=r"fragments\.count = 8 cannot be used"):
        decoupled_diloco.learner({}, {"w": np.ones(3, np.float32)}, merge_rule=lambda *_: MergeRule("rda"))


async def test_a_tensor_that_changes_is_refused_at_the_boundary_and_after_the_end_there_are_no_steps(tmp_path):
    config = config_of(run={"total_steps": 0})

    def train_wrongly(address):
        with decoupled_diloco.learner(config, start_values(), learner_id="a", syncer=(address,)) as d:
            params = d.start()
            with pytest.raises(SchemaError, match=r"'head' began with shape \(4,\).* now has shape \(5,\)"):
                d.step_boundary(params | {"head": np.ones(5, np.float32)}, tokens=1)
            with pytest.raises(SchemaError, match=r"'head' began with .* type float32 and now .* type float16"):
                d.step_boundary(params | {"head": np.ones(4, np.float16)}, tokens=1)
            with pytest.raises(SchemaError, match=r"'scale' began as an array .* is now a float"):
                d.step_boundary(params | {"scale": 1.0}, tokens=1)
            d.drain("told to")
            while not d.finished:
                params = d.step_boundary(params, tokens=1)
            with pytest.raises(RuntimeError, match=r"has finished \(told to\)"):
                d.step_boundary(params, tokens=1)
        with decoupled_diloco.learner(config, start_values(), learner_id="b", syncer=(address,)) as d:
            params = d.start()
        with pytest.raises(RuntimeError, match="outside of the session's `with` block"):
            d.step_boundary(params, tokens=1)

    async with syncer(tmp_path, config) as running:
        await asyncio.to_thread(train_wrongly, str(running.addresses.data))


async def test_a_loss_that_never_becomes_finite_ends_the_learner_with_the_place(tmp_path):
    config = config_of(run={"total_steps": 0})
    async with syncer(tmp_path, config) as running:
        [a] = team("a")
        a.loss_of = lambda number, loss: loss * np.nan if number >= 4 else loss
        with pytest.raises(DivergedError, match=r"5 times in a row, .* slot \d+, cursor 7 \(the last one was"):
            await train(running, config, a)
        assert a.restarts == [4, 5, 6, 7]
