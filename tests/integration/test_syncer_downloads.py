"""Versions and how they are served."""

import numpy as np
import pytest

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.outer import apply_delta
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Version
from tests.integration.syncers import DEADLINES, config_of, syncer, until
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
