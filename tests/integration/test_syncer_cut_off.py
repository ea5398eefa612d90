"""Calls whose connection breaks, at the syncer's end."""

import asyncio
import logging

import numpy as np
import pytest
import structlog
from grpc._cython.cygrpc import ExecuteBatchError

from chaos.proxy import Conditions, Proxy
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.core.events import ContributionFailed, FragmentApplied, ProgressReported
from decoupled_diloco.core.ids import Fate
from syncer_service import servicer
from tests.integration.protocol_link import Link, compute
from tests.integration.syncers import config_of, syncer, until
from tests.integration.test_syncer_uploads import Attached, attached, delta_of, keep_open


class Stopped:
    """The context of a call of which one end breaks when it writes its answer."""

    def __init__(self, context, failure):
        self.context = context
        self.failure = failure

    async def read(self):
        return await self.context.read()

    async def write(self, message):
        if message.WhichOneof("answer") == "fate":
            raise self.failure
        await self.context.write(message)


@pytest.mark.parametrize("failure", [asyncio.CancelledError(), ExecuteBatchError("Failed execute_batch")])
@pytest.mark.parametrize("moment", ["before the answer of the machine", "after it"])
async def test_a_contribution_that_the_machine_counts_outlives_its_connection(tmp_path, monkeypatch, failure, moment):
    tape = []
    config = config_of(deadlines={"lease_seconds": 60.0, "stall_seconds": 60.0})
    async with syncer(tmp_path, config, tape=tape) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        driver, receive = running.serving.driver, servicer.receive_contribution
        decide = driver.request

        async def cut_off(make_event, *answers):
            answer = await decide(make_event, *answers)
            if answer is Fate.ACCEPTED:
                raise failure
            return answer

        async def received(serving, context):
            await receive(serving, Stopped(context, failure) if moment == "after it" else context)

        if moment == "before the answer of the machine":
            monkeypatch.setattr(driver, "request", cut_off)
        monkeypatch.setattr(servicer, "receive_contribution", received)
        with structlog.testing.capture_logs() as logs:
            # Nobody is told how it ended.
            header = learner.link.header(ask, "float32")
            sending = asyncio.create_task(learner.link.upload(header, delta_of(ask.fragment)))
            closed = await learner.event(lev.RoundEnded)
            sending.cancel()
        assert (closed.round, closed.committed, closed.members) == (ask.round, True, ("a",))
        assert not [event for _, event in tape if isinstance(event, ContributionFailed)]
        assert [entry for entry in logs if entry["log_level"] == "error"] == []


async def test_a_contribution_that_the_machine_was_not_asked_about_may_come_again(tmp_path, monkeypatch):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        driver = running.serving.driver
        decide = driver.request

        async def full(make_event, *answers):
            if answers == (Fate,):
                raise PeerError(Reason.OVERLOADED, "the queue is full", retry_seconds=0.1)
            return await decide(make_event, *answers)

        monkeypatch.setattr(driver, "request", full)
        with pytest.raises(PeerError, match="the queue is full"):
            await learner.link.upload(header, delta_of(ask.fragment))
        monkeypatch.undo()
        slot = running.serving.uploads.find("a", learner.link.incarnation, ask.round)
        assert not slot.complete
        header.resume = True
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED
        assert running.serving.uploads.find("a", learner.link.incarnation, ask.round) is slot


async def test_connections_that_break_in_the_middle_of_transfers_are_no_fault(tmp_path, caplog):
    schema = Schema([TensorSpec("kernel", (4096, 1024))])
    config = config_of(
        fragments={"count": 1}, quorum={"minimum": 2}, deadlines={"lease_seconds": 60.0, "stall_seconds": 60.0}
    )
    async with syncer(tmp_path, config) as running:
        near = Link(str(running.addresses.data), "a", schema)
        with Proxy() as proxy, structlog.testing.capture_logs() as logs, caplog.at_level(logging.WARNING):
            link = proxy.link(("127.0.0.1", running.addresses.data.port))
            try:
                await near.join()
                async with near.attached(progress=compute(10, 1000, 0.05)) as stream:
                    learner = Attached(running, near, stream)
                    reader = asyncio.create_task(learner.read())
                    await learner.event(lev.InitialAsked)
                    await near.upload_initial(0, np.ones(schema.size, np.float32))
                    news = await learner.event(lev.Published)
                    await learner.say(FragmentApplied("", 0, 0, news.version, 0, 0))
                    await learner.say(ProgressReported("", 0, compute(10, 1000, 0.05)))
                    ask = await learner.event(lev.Asked)
                    link.impose(Conditions(break_after_bytes=1 << 20))
                    for attempt in range(8):
                        await cut_off(Link(":".join(map(str, link.address)), "a", schema), near, ask, attempt % 2 == 0)
                    await until(running, lambda: running.serving.publications.reading_count == 0)
                    reader.cancel()
            finally:
                await near.close()
        assert [entry for entry in logs if entry["log_level"] == "error"] == []
        assert [record for record in caplog.records if record.name.startswith("grpc")] == []


async def cut_off(far, near, ask, is_upload):
    """A transfer over a link that does not let it through."""
    far.joined, far.incarnation = near.joined, near.incarnation
    transfer = (
        far.upload(far.header(ask, "float32"), bytes(4 * far.schema.size)) if is_upload else far.download(0, ask.base)
    )
    try:
        with pytest.raises((UnreachableError, PeerError)):
            await transfer
    finally:
        await far.close()
