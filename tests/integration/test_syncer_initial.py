"""Streams of the initial parameters, and what they may take of the syncer's memory."""

import asyncio

import numpy as np
import pytest

from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.v1 import syncer_pb2
from decoupled_diloco.wire.stream import payload_messages
from learner_service.bulk_client import BulkClient
from syncer_service import upload_servicer
from syncer_service.buffers import BUFFER_RETRY_SECONDS
from tests.integration.protocol_link import answered
from tests.integration.syncers import machine_of, syncer, until
from tests.integration.test_syncer_downloads import LARGE, config, large
from tests.integration.test_syncer_uploads import SIZES, attached

THETA = np.ones(SIZES[0], np.float32)


async def begun(link, fragment=0, theta=THETA):
    """A stream that has sent its header and half of its payload."""
    call = link.bulk.UploadInitialFragment()
    header = syncer_pb2.InitialFragmentHeader(
        learner_id=link.name,
        incarnation=link.incarnation,
        fragment=fragment,
        value_count=theta.size,
        schema_digest=link.schema.digest,
    )
    await call.write(syncer_pb2.UploadInitialFragmentRequest(header=header))
    messages = list(payload_messages(theta.view(np.uint8).data, chunk_bytes=2 * theta.size))
    await call.write(messages[0])
    return call, messages[1:]


async def finished(call, messages):
    """The end of a stream that `begun` gave."""
    for message in messages:
        await call.write(message)
    await call.done_writing()
    return await answered(call)


async def refusal(call):
    with pytest.raises(PeerError) as refused:
        await answered(call)
    return refused.value


@pytest.mark.parametrize("moment", ["before the run has parameters", "afterwards"])
async def test_who_was_not_asked_is_refused_at_the_header(tmp_path, moment):
    is_after = moment == "afterwards"
    async with syncer(tmp_path, config()) as running, attached(running, "a", initialize=is_after) as first:
        if not is_after:
            await first.event(lev.InitialAsked)
        async with attached(running, "b", initialize=False) as second:
            for learner in (first, second) if is_after else (second,):
                call = learner.link.bulk.UploadInitialFragment()
                await call.write(
                    syncer_pb2.UploadInitialFragmentRequest(
                        header=syncer_pb2.InitialFragmentHeader(
                            learner_id=learner.link.name,
                            incarnation=learner.link.incarnation,
                            fragment=0,
                            value_count=SIZES[0],
                            schema_digest=learner.link.schema.digest,
                        )
                    )
                )
                refused = await refusal(call)
                assert refused.reason is Reason.WRONG_STATE
                assert refused.text == f"{learner.link.name} was not asked for the initial parameters, or no longer is"


async def test_the_learner_hears_why_its_parameters_are_not_wanted_while_it_sends_them(tmp_path):
    async with large(tmp_path) as (running, learner):
        deadlines = machine_of(running).policy.deadlines
        client = BulkClient(learner.link._channels[1], "a", learner.link.incarnation, LARGE.digest, deadlines)
        for _ in range(3):
            with pytest.raises(PeerError) as refused:
                await client.upload_initial(0, np.ones(LARGE.size, np.float32), lambda _: None)
            assert refused.value.reason is Reason.WRONG_STATE


async def test_who_is_no_longer_asked_is_refused_in_the_middle(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running, initialize=False) as learner:
        await learner.event(lev.InitialAsked)
        call, messages = await begun(learner.link)
        await until_used(running, THETA.nbytes)
        machine_of(running).initial.asked = ("b", 7)
        await call.write(messages[0])
        assert (await refusal(call)).reason is Reason.WRONG_STATE
        assert running.serving.uploads.pool.used_bytes == 0


async def until_used(running, size_bytes):
    """The driver sees no event when memory is taken, so this looks again and again."""
    async with asyncio.timeout(10):
        while running.serving.uploads.pool.used_bytes != size_bytes:  # noqa: ASYNC110 (as the docstring says)
            await asyncio.sleep(0.005)


async def test_a_newer_stream_of_the_same_fragment_takes_over_and_memory_is_that_of_one(tmp_path, monkeypatch):
    async with syncer(tmp_path, config()) as running, attached(running, initialize=False) as learner:
        pool, used = running.serving.uploads.pool, []
        take = servicer_memory(monkeypatch, pool, used)
        await learner.event(lev.InitialAsked)
        streams = [await begun(learner.link) for _ in range(20)]
        other = await begun(learner.link, 1, np.ones(SIZES[1], np.float32))
        for call, _ in streams[:-1]:
            refused = await refusal(call)
            assert refused.reason is Reason.OVERLOADED
            assert "newer stream" in refused.text
        await finished(*streams[-1])
        await finished(*other)
        assert sorted(machine_of(running).initial.digests) == [0, 1]
        assert pool.used_bytes == 0
        assert take.count(THETA.nbytes) >= 1
        assert max(used) <= THETA.nbytes + 4 * SIZES[1]


def servicer_memory(monkeypatch, pool, used):
    """Notes what is taken, and what the pool counts at that moment."""
    taken, take = [], upload_servicer.RECYCLER.take

    class Noting:
        def take(self, size_bytes):
            taken.append(size_bytes)
            used.append(pool.used_bytes)
            return take(size_bytes)

    monkeypatch.setattr(upload_servicer, "RECYCLER", Noting())
    return taken


async def test_parameters_without_room_are_asked_to_retry(tmp_path):
    async with syncer(tmp_path, config(), upload_buffer_bytes_max=1 << 20) as running:
        pool = running.serving.uploads.pool
        async with attached(running, initialize=False) as learner:
            await learner.event(lev.InitialAsked)
            hold = pool.acquire(pool.bytes_max)
            call, _ = await begun(learner.link)
            refused = await refusal(call)
            assert (refused.reason, refused.retry_seconds) == (Reason.OVERLOADED, BUFFER_RETRY_SECONDS)
            hold.release()
            # A limit for contributions in a narrow encoding may be less than a fragment in float32.
            pool.bytes_max = THETA.nbytes - 1
            await finished(*await begun(learner.link))
            assert list(machine_of(running).initial.digests) == [0]


async def test_a_connection_that_dies_gives_its_memory_back(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running, initialize=False) as learner:
        await learner.event(lev.InitialAsked)
        call, _ = await begun(learner.link)
        await until_used(running, THETA.nbytes)
        call.cancel()
        await until_used(running, 0)
        await finished(*await begun(learner.link))
        await until(running, lambda: 0 in machine_of(running).initial.digests)
