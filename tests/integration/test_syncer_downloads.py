"""Versions and how they are served."""

import numpy as np
import pytest

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.outer import apply_delta
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Version
from decoupled_diloco.v1 import syncer_pb2
from decoupled_diloco.wire import codec
from syncer_service import servicer
from tests.integration.protocol_link import Link, compute, refusal_of
from tests.integration.syncers import DEADLINES, config_of, machine_of, syncer, until
from tests.integration.test_syncer_uploads import SIZES, attached, delta_of


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


async def test_a_version_being_read_stays_until_its_last_reader_is_done(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        reading = running.serving.publications.reading(ask.fragment, ask.base, None, frozenset({"float32"}))
        async with reading as publication:
            await committed(learner)
            assert publication.payload.payload_bytes == 4 * SIZES[ask.fragment]
            assert running.serving.store.version_count == 5
        await until(running, lambda: running.serving.store.version_count == 4)


async def test_one_payload_serves_all(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        fragment, _, after = await committed(learner)
        publications = running.serving.publications
        async with publications.reading(fragment, after, None, frozenset({"float32"})) as first:
            async with publications.reading(fragment, after, None, frozenset({"float32"})) as second:
                assert first.payload is second.payload
            assert publications.reading_count == 1


async def test_before_there_are_parameters_nothing_can_be_had(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running, initialize=False) as learner:
        with pytest.raises(PeerError) as refused:
            await learner.link.download(0, Version(1, 1, "x"))
        assert refused.value.reason is Reason.NOT_READY


async def test_a_receiver_that_takes_nothing_holds_a_few_messages_and_loses_its_stream(tmp_path):
    fragment_bytes = 32 << 20
    schema = Schema([TensorSpec("kernel", (fragment_bytes // 4096, 1024))])
    only = config_of(
        fragments={"count": 1},
        encoding={"download": "float32"},
        deadlines=DEADLINES | {"lease_seconds": 60.0, "stall_seconds": 60.0, "upload_idle_seconds": 0.3},
    )
    async with syncer(tmp_path, only) as running:
        link = Link(str(running.addresses.data), "a", schema)
        try:
            await link.join()
            async with link.attached(progress=compute(0, 0, 0.05)):
                await link.upload_initial(0, np.ones(fragment_bytes // 4, np.float32))
                await until(running, lambda: bool(machine_of(running).versions))
                request = syncer_pb2.DownloadFragmentRequest(
                    learner_id="a",
                    incarnation=link.incarnation,
                    fragment=0,
                    version=codec.version_to_wire(machine_of(running).versions[0]),
                )
                call = link.bulk.DownloadFragment(request)
                assert await call.read() is not None
                await until(running, lambda: running.serving.publications.reading_count == 0)
                assert 0 < sent_bytes(running) <= fragment_bytes / 2
                assert (await refusal_of(call)).reason is Reason.TRANSFER_IDLE
        finally:
            await link.close()


def sent_bytes(running):
    """Payload bytes that the syncer has handed to gRPC."""
    return running.telemetry.registry.get_sample_value("decoupled_diloco_syncer_sent_bytes_total")


async def test_more_downloads_than_the_limit_are_asked_to_retry(tmp_path, monkeypatch):
    monkeypatch.setattr(servicer, "DOWNLOADS_MAX", 1)
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        fragment, _, after = await committed(learner)
        async with running.serving.publications.reading(fragment, after, None, frozenset({"float32"})):
            with pytest.raises(PeerError, match="1 downloads are under way") as refused:
                await learner.link.download(fragment, after)
            assert refused.value.reason is Reason.OVERLOADED
            assert refused.value.retry_seconds == servicer.DOWNLOAD_RETRY_SECONDS
        await learner.link.download(fragment, after)
