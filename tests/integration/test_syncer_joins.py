"""What both sides must agree on at the join, and the control stream."""

import asyncio

import grpc
import pytest

from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Role, RunPhase
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire import codec, control
from syncer_service.sessions import SESSION_MESSAGES_MAX
from syncer_service.store.reader import open_ledger
from tests.integration.protocol_link import TINY_SCHEMA, Link, compute, refusal_of
from tests.integration.syncers import DEADLINES, config_of, machine_of, syncer, until
from tests.integration.test_syncer_uploads import attached


def link(running, name="a", schema=TINY_SCHEMA):
    return Link(str(running.addresses.data), name, schema)


async def refused(call):
    with pytest.raises(PeerError) as caught:
        await call
    return caught.value


async def test_the_answer_to_a_join_holds_all_that_a_learner_must_know(tmp_path):
    config = config_of(run={"total_steps": 96}, encoding={"upload": "bf16"})
    async with syncer(tmp_path, config) as running:
        one, two = link(running, "a"), link(running, "b")
        first, second = await one.join(run_id="test"), await two.join()
        assert first.run_id == "test"
        assert (first.incarnation, second.incarnation) == (1, 2)
        assert (first.slot, second.slot, first.cursor) == (0, 1, 0)
        assert not first.initialized
        assert codec.deadlines_from_wire(first.deadlines).lease_seconds == 2.0
        policy = codec.policy_from_wire(first.policy, config.to_policy())
        assert (policy.total_steps, policy.upload_encoding, policy.fragment_count) == (96, "bf16", 4)
        again = await one.join()
        assert (again.incarnation, again.slot) == (3, 0)
        with open_ledger(tmp_path / "state") as ledger:  # durable before it was answered
            account = next(account for account in ledger.state().learners if account.learner == "a")
        assert (account.incarnation, account.role, account.slot) == (3, Role.LEARNER, 0)
        await one.close()
        await two.close()


async def test_whoever_does_not_agree_is_shown_both_sides(tmp_path):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        first, other = link(running), link(running, "eu-1")
        await first.join()

        error = await refused(other.join(protocol=spb.ProtocolVersionRange(minimum=2, maximum=3)))
        assert error.reason is Reason.PROTOCOL_MISMATCH
        assert "speaks protocol version 1, eu-1 speaks 2 to 3" in error.text

        error = await refused(other.join(run_id="elsewhere"))
        assert error.reason is Reason.RUN_MISMATCH
        assert '"test"' in error.text
        assert '"elsewhere"' in error.text

        theirs = config_of(fragments={"interval_steps": 12}, run={"seed": 5})
        error = await refused(other.join(config_digest=theirs.digest(), config_values=theirs.agreed_values()))
        assert error.reason is Reason.CONFIG_MISMATCH
        assert "fragments.interval_steps: syncer 8, eu-1 12" in error.text
        assert "run.seed: syncer 0, eu-1 5" in error.text

        await other.join(config_digest=config.digest(), config_values=config.agreed_values())
        await first.close()
        await other.close()


async def test_another_model_is_refused_with_the_difference(tmp_path):
    async with syncer(tmp_path) as running:
        first = link(running, "first")
        await first.join()
        specs = [TensorSpec("embed/table", (64, 8), rule="avg"), *TINY_SCHEMA.tensors[1:]]
        other = link(running, "b", Schema(specs))
        error = await refused(other.join())
        assert error.reason is Reason.SCHEMA_MISMATCH
        assert "whose model is that of first" in error.text
        assert "embed/table (shape [32, 8] in the run, [64, 8] in b)" in error.text
        for caller in (first, other):
            await caller.close()


async def test_a_model_with_too_few_tensors_for_the_fragments_is_refused(tmp_path):
    async with syncer(tmp_path) as running:
        caller = link(running, "a", Schema([TensorSpec("w", (3,)), TensorSpec("v", (3,))]))
        error = await refused(caller.join())
        assert error.reason is Reason.SCHEMA_MISMATCH
        assert "fragments.count = 4" in error.text
        await caller.close()


@pytest.mark.parametrize("name", ["", "Upper", "-a", "a b", "x" * 64])
async def test_a_learner_id_is_a_dns_label(tmp_path, name):
    async with syncer(tmp_path) as running:
        caller = link(running, name)
        error = await refused(caller.join())
        assert error.reason is Reason.INVALID_FIELD
        assert error.text.startswith("learner_id = ")
        await caller.close()


async def test_one_learner_too_many_is_refused_and_observers_are_not_counted(tmp_path):
    config = config_of(run={"learners_max": 1, "learners_expected": 1})
    async with syncer(tmp_path, config) as running:
        callers = [link(running, name) for name in ("a", "b", "eval")]
        await callers[0].join()
        error = await refused(callers[1].join())
        assert error.reason is Reason.TOO_MANY_LEARNERS
        assert error.retry_seconds is not None
        assert (await callers[2].join(Role.OBSERVER)).slot == -1
        for caller in callers:
            await caller.close()


async def test_who_has_not_joined_cannot_attach(tmp_path):
    async with syncer(tmp_path) as running:
        caller = link(running)
        caller.incarnation = 7
        async with caller.attached() as stream:
            error = await refusal_of(stream)
            assert error.reason is Reason.NOT_JOINED
            assert "join (again)" in error.text
        await caller.close()


async def test_a_stream_must_begin_with_hello(tmp_path):
    async with syncer(tmp_path) as running:
        caller = link(running)
        await caller.join()
        call = caller.control.Attach()
        await call.write(control.report_to_wire(ev.LeavingAnnounced("", 0, "bye")))
        error = await refusal_of(call)
        assert error.reason is Reason.INVALID_FIELD
        assert "first message on Attach must be hello" in error.text
        await caller.close()


async def test_a_quiet_stream_says_that_it_lives(tmp_path):
    config = config_of(quorum={"minimum": 2}, deadlines=DEADLINES | {"attach_idle_seconds": 0.2})
    async with syncer(tmp_path, config) as running:
        caller = link(running)
        await caller.join(Role.OBSERVER)
        async with caller.attached() as stream:
            message = await asyncio.wait_for(stream.read(), 5)
            assert message.WhichOneof("message") == "alive"
        await caller.close()


async def test_a_re_attach_repeats_what_still_holds(tmp_path):
    config = config_of(quorum={"minimum": 2}, deadlines=DEADLINES | {"lease_seconds": 60.0, "stall_seconds": 60.0})
    async with syncer(tmp_path, config) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        applied = list(enumerate(machine_of(running).versions))
        async with learner.link.attached(applied, compute(10, 1000, 0.05)) as again:
            events = []
            while not any(isinstance(event, lev.Asked) for event in events):
                events.append(control.instruction_from_wire(await again.read()))
            repeated = next(event for event in events if isinstance(event, lev.Asked))
            assert (repeated.round, repeated.base) == (ask.round, ask.base)
            assert not any(isinstance(event, lev.Published) for event in events)
            assert machine_of(running).membership.learners["a"].attached
            # The stream before was ended, and its end does not count as the learner's.
            assert await asyncio.wait_for(learner.stream.code(), 5) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert machine_of(running).membership.learners["a"].attached
        await until(running, lambda: not machine_of(running).membership.learners["a"].attached)


async def test_a_learner_that_does_not_read_loses_its_stream_and_nothing_else(tmp_path):
    async with syncer(tmp_path) as running, attached(running) as learner:
        session = running.serving.sessions._sessions["a"]
        for _ in range(SESSION_MESSAGES_MAX + 1):
            session.send(fx.ResumeLearner("a", learner.link.incarnation))
        assert session.error.reason is Reason.OVERLOADED
        await until(running, lambda: not machine_of(running).membership.learners["a"].attached)
        async with learner.link.attached():
            await until(running, lambda: machine_of(running).membership.learners["a"].attached)


async def test_a_lease_that_runs_out_ends_the_stream_and_the_learner_may_come_back(tmp_path):
    config = config_of(deadlines=DEADLINES | {"lease_seconds": 0.4, "stall_seconds": 0.2})
    async with syncer(tmp_path, config) as running:
        caller = link(running)
        await caller.join()
        async with caller.attached() as stream:
            error = await refusal_of(stream)
            assert error.reason is Reason.TRANSFER_IDLE
            assert "attach again" in error.text
        async with caller.attached():
            await until(running, lambda: machine_of(running).membership.learners["a"].attached)
        await caller.close()


async def test_leaving_twice_is_leaving_once(tmp_path):
    async with syncer(tmp_path) as running, attached(running, initialize=False) as learner:
        await learner.link.leave()
        await learner.link.leave()
        await until(running, lambda: machine_of(running).membership.learners["a"].left)
        assert len(running.serving.sessions) == 0


async def test_the_one_who_was_asked_dies_and_the_next_one_brings_the_parameters(tmp_path):
    async with syncer(tmp_path) as running:
        async with attached(running, "a", initialize=False) as first:
            await first.event(lev.InitialAsked)
            await first.link.leave("gone")
        async with attached(running, "b") as second:
            assert await second.event(lev.InitialAsked)
            await until(running, lambda: machine_of(running).phase is RunPhase.RUNNING)


async def test_a_full_queue_asks_callers_to_retry(tmp_path):
    async with syncer(tmp_path, queue_events_max=16) as running:
        driver = running.serving.driver
        for _ in range(16):
            driver.report(ev.BytesMoved("nobody", 1))
        # The driver has had no turn since.
        error = await refused(driver.request(ev.ResumeRequested, type(None)))
        assert error.reason is Reason.OVERLOADED
        assert error.retry_seconds == 0.5
        assert "syncer.queue_events_max" in error.text
        caller = link(running)
        await caller.join()  # it has run dry
        await caller.close()
