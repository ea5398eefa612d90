"""Versions and how they are served."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import numpy as np
import pytest

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.outer import apply_delta
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.events import FragmentApplied, ProgressReported
from decoupled_diloco.core.ids import Version
from decoupled_diloco.v1 import syncer_pb2
from decoupled_diloco.wire import codec
from syncer_service import readings
from tests.integration.protocol_link import Link, compute, refusal_of
from tests.integration.syncers import DEADLINES, config_of, machine_of, syncer, until
from tests.integration.test_syncer_uploads import SIZES, Attached, attached, delta_of


def config(download="bf16"):
    return config_of(
        encoding={"download": download}, deadlines=DEADLINES | {"lease_seconds": 60.0, "stall_seconds": 60.0}
    )


async def committed(learner, value=0.2):
    """Runs one round; returns the version before and the one after."""
    ask = await learner.event(lev.Asked)
    await learner.link.upload(learner.link.header(ask, "float32"), delta_of(ask.fragment, value))
    news = await learner.event(lev.Published, 4)
    return ask.fragment, ask.base, news.version


async def test_a_delta_goes_to_holders_of_the_version_before_and_float32_to_all_others(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        fragment, before, after = await committed(learner)
        ones = np.ones(SIZES[fragment], np.float32)

        header, payload = await learner.link.download(fragment, after, held=before)
        assert header.delta_base.number == before.number
        assert len(payload) == 2 * SIZES[fragment]
        assert vector_digest(apply_delta(ones, payload, "bf16")) == after.digest

        for held, encodings in ((None, ("float32", "bf16")), (Version(1, 9, "x"), ("bf16",)), (before, ("float32",))):
            header, payload = await learner.link.download(fragment, after, held, encodings)
            assert not header.HasField("delta_base")
            assert vector_digest(np.frombuffer(payload, np.float32)) == after.digest


async def test_a_download_goes_on_at_any_offset(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        fragment, _, after = await committed(learner)
        _, whole = await learner.link.download(fragment, after)
        for offset in (1, 100, len(whole) - 1, len(whole)):
            _, payload = await learner.link.download(fragment, after, offset=offset, received=whole)
            assert payload == whole
        with pytest.raises(PeerError, match="offset = 99999999"):
            await learner.link.download(fragment, after, offset=99_999_999, received=b"")


async def test_a_version_that_was_replaced_is_superseded_by_the_newest(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        fragment, before, after = await committed(learner)
        with pytest.raises(PeerError) as refused:
            await learner.link.download(fragment, before)
        assert refused.value.reason is Reason.SUPERSEDED
        assert refused.value.metadata["newest-digest"] == after.digest
        with pytest.raises(PeerError) as refused:
            await learner.link.download(fragment, Version(1, 77, "x"))
        assert refused.value.reason is Reason.NOT_FOUND
        with pytest.raises(PeerError, match="fragment = 7: must be 0 to 3"):
            await learner.link.download(7, after)


async def test_one_payload_serves_all(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        fragment, _, after = await committed(learner)
        publications = running.serving.publications
        first, second = [
            await publications.publication(fragment, after, None, frozenset({"float32"})) for _ in range(2)
        ]
        assert first.payload is second.payload


async def test_before_there_are_parameters_nothing_can_be_had(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running, initialize=False) as learner:
        with pytest.raises(PeerError) as refused:
            await learner.link.download(0, Version(1, 1, "x"))
        assert refused.value.reason is Reason.NOT_READY


async def test_a_receiver_that_takes_nothing_holds_a_few_messages_and_loses_its_stream(tmp_path):
    async with large(tmp_path, upload_idle_seconds=0.3) as (running, learner):
        call = download_of(learner.link, machine_of(running).versions[0])
        assert await call.read() is not None
        await until(running, lambda: running.serving.publications.reading_count == 0)
        assert 0 < sent_bytes(running) <= 3 * LARGE.size, "what gRPC reads ahead, 16 MiB at most, and a message in hand"
        assert (await refusal_of(call)).reason is Reason.TRANSFER_IDLE


def sent_bytes(running):
    """Payload bytes that the syncer has handed to gRPC."""
    return running.telemetry.registry.get_sample_value("decoupled_diloco_syncer_sent_bytes_total")


async def test_more_downloads_than_the_limit_are_asked_to_retry(tmp_path, monkeypatch):
    monkeypatch.setattr(readings, "PARTICIPANT_DOWNLOADS_MAX", 1)
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        fragment, _, after = await committed(learner)
        with running.serving.publications.readings.begin("a", learner.link.incarnation, fragment, after):
            with pytest.raises(PeerError, match="1 downloads of a are under way") as refused:
                await learner.link.download(fragment, after)
            assert refused.value.reason is Reason.OVERLOADED
            assert refused.value.retry_seconds == readings.DOWNLOAD_RETRY_SECONDS
        await learner.link.download(fragment, after)


@pytest.mark.parametrize("seconds", [0.3, 600.0])
async def test_a_slow_reader_of_a_version_that_was_replaced_is_sent_for_the_newest(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(readings, "SUPERSEDED_SECONDS_MAX", seconds)
    monkeypatch.setattr(readings, "SLOWEST_BYTES_PER_SECOND", 1e15)
    async with large(tmp_path) as (running, learner):
        ask = await learner.event(lev.Asked)
        call = download_of(learner.link, ask.base)
        parts = [await call.read()]
        payload = memoryview(bytearray(4 * LARGE.size)).cast("B")
        await learner.link.upload(learner.link.header(ask, "float32"), payload)
        news = await learner.event(lev.Published, 1)
        publications = running.serving.publications
        assert publications.reading_count == 1
        assert publications.held_bytes >= 4 * LARGE.size
        if seconds < 1:
            await until(running, lambda: publications.reading_count == 0)
            refusal = await refusal_of(call)
            assert (refusal.reason, refusal.metadata["newest-digest"]) == (Reason.SUPERSEDED, news.version.digest)
        else:
            while (part := await call.read()) is not grpc.aio.EOF:
                parts.append(part)
            assert parts[-1].trailer.digest == ask.base.digest
        assert publications.reading_count == 0


LARGE = Schema([TensorSpec("kernel", ((32 << 20) // 4096, 1024))])


@asynccontextmanager
async def large(folder, **deadlines):
    """A syncer and a learner of one fragment that is too large for what gRPC buffers."""
    only = config_of(
        fragments={"count": 1},
        encoding={"download": "float32"},
        deadlines={"lease_seconds": 60.0, "stall_seconds": 60.0} | deadlines,
    )
    async with syncer(folder, only) as running:
        link = Link(str(running.addresses.data), "a", LARGE)
        try:
            await link.join()
            async with link.attached(progress=compute(0, 0, 0.05)) as stream:
                learner = Attached(running, link, stream)
                reader = asyncio.create_task(learner.read())
                await learner.event(lev.InitialAsked)
                await link.upload_initial(0, np.ones(LARGE.size, np.float32))
                news = await learner.event(lev.Published)
                await learner.say(FragmentApplied("", 0, 0, news.version, 0, 0))
                await learner.say(ProgressReported("", 0, compute(10, 1000, 0.05)))
                yield running, learner
                reader.cancel()
        finally:
            await link.close()


def download_of(link, version):
    """A call for a version of the only fragment, of which nothing is read yet."""
    return link.bulk.DownloadFragment(
        syncer_pb2.DownloadFragmentRequest(
            learner_id=link.name, incarnation=link.incarnation, fragment=0, version=codec.version_to_wire(version)
        )
    )
