"""Interoperation: who has nothing but the protos can take part, at either end.

A client of generated stubs (`plain_client`, which imports nothing else of this project) against the real syncer, and
the real learner's client against a server of generated serializers.
"""

from __future__ import annotations

import asyncio
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Fate, Version
from decoupled_diloco.core.policy import Deadlines
from decoupled_diloco.runtime.channel import open_channel
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.runtime.ports import Address
from decoupled_diloco.v1 import fragment_pb2, syncer_pb2
from decoupled_diloco.v1.syncer_pb2_grpc import SyncerServiceServicer, add_SyncerServiceServicer_to_server
from learner_service.bulk_client import BulkClient
from learner_service.downloader import Downloader, Held
from tests.integration.plain_client import (
    ENCODINGS,
    PlainLearner,
    chunks_of,
    digest_of,
    put_in_place,
    read_bf16,
    trailer_of,
    write_bf16,
    write_float32,
)
from tests.integration.syncers import DEADLINES, config_of, syncer
from tests.tidy.source_tree import imports

SHAPE = (11, 191)
"""2101 values: 16 blocks of 128 and one of 53, an odd number, so that int4 has half a byte left over."""
LARGE_SHAPE = (1025, 1024)
"""4 198 400 bytes, more than one chunk of the largest size."""


def run_of(**sections):
    """One learner is enough, leases outlast the test, and an outer step adds the merged delta as it is."""
    defaults = {
        "fragments": {"count": 2, "interval_steps": 8, "overlap_steps": 2},
        "encoding": {"upload": "bf16", "download": "bf16"},
        "outer": {"learning_rate": 1.0, "momentum": 0.0},
        "deadlines": DEADLINES | {"lease_seconds": 60.0, "stall_seconds": 60.0, "attach_idle_seconds": 60.0},
    }
    return config_of(**(defaults | sections))


async def against_a_syncer(folder, scenario, config=None, shape=SHAPE):
    """Runs a scenario with a learner that has brought the first parameters."""

    def played(address):
        with PlainLearner(address, "plain", shape) as learner:
            learner.join()
            learner.attach()
            learner.bring_first_parameters()
            scenario(learner)

    async with syncer(folder, config or run_of()) as running:
        await asyncio.to_thread(played, str(running.addresses.data))


def delta_for(learner, seed=1):
    return (0.01 * np.random.default_rng(seed).standard_normal(learner.count)).astype("<f4")


def test_the_client_is_made_of_generated_code_alone():
    allowed = {*sys.stdlib_module_names, "google", "grpc", "numpy", "xxhash"}
    names = {name for _, name in imports("tests/integration/plain_client.py")}
    assert {name for name in names if name.split(".")[0] not in allowed} == {
        "decoupled_diloco.v1.fragment_pb2",
        "decoupled_diloco.v1.syncer_pb2",
        "decoupled_diloco.v1.syncer_pb2_grpc.SyncerServiceStub",
    }


def test_the_client_writes_every_encoding_that_there_is():
    assert set(ENCODINGS) == set(fragment_pb2.Encoding.values()) - {fragment_pb2.ENCODING_UNSPECIFIED}


# ---- a plain client, the real syncer ---------------------------------------------------------------------------------


async def test_contributions_in_every_encoding_mean_the_same_at_both_ends(tmp_path):
    def scenario(learner):
        for encoding, writing in ENCODINGS.items():
            ask = learner.told("ask_contribution")
            index, held, before = ask.fragment, ask.base, learner.theta[ask.fragment]
            assert held == learner.versions[index]
            delta = delta_for(learner, encoding)
            meant = writing.read(writing.write(delta), learner.count)
            fate = learner.contribute(ask, delta, encoding)
            assert fate == syncer_pb2.CONTRIBUTION_FATE_ACCEPTED

            closed = learner.told("round_closed")
            assert (closed.round, list(closed.members)) == (ask.round, ["plain"])
            assert closed.outcome == syncer_pb2.ROUND_OUTCOME_COMMITTED
            news = learner.told("fragment_published").version
            assert (news.fragment, news.version.number) == (index, held.number + 1)

            # Who holds the version before gets a delta to it, all others the whole; both end with the same bits.
            header, payload = learner.fetch(news, held=held)
            assert (header.encoding, header.delta_base) == (fragment_pb2.ENCODING_BF16, held)
            theta = before + read_bf16(payload, learner.count)
            header, payload = learner.fetch(news)
            assert header.encoding == fragment_pb2.ENCODING_FLOAT32
            assert not header.HasField("delta_base")
            assert payload == write_float32(theta)
            assert digest_of(payload) == news.version.digest

            # What was merged is what the payload says, but for the rounding of the download.
            np.testing.assert_allclose(theta - before, meant, atol=2**-8 * np.abs(meant).max())
            assert np.abs(meant - delta).max() < 0.1 * np.abs(delta).max()
            learner.theta[index] = theta
            learner.applied(news)

    await against_a_syncer(tmp_path, scenario)


@pytest.mark.parametrize(
    "sizes",
    [[1, 2, 3, 5, 4093], [8403], [(4 << 20) - (64 << 10)]],
    ids=["a few bytes", "all but one", "the largest that is allowed"],
)
async def test_chunks_may_have_any_size(tmp_path, sizes):
    def scenario(learner):
        ask = learner.told("ask_contribution")
        fate = learner.contribute(ask, delta_for(learner), fragment_pb2.ENCODING_FLOAT32, sizes)
        assert fate == syncer_pb2.CONTRIBUTION_FATE_ACCEPTED
        assert list(learner.told("round_closed").members) == ["plain"]

    await against_a_syncer(tmp_path, scenario, shape=LARGE_SHAPE if sizes[0] > 8403 else SHAPE)


async def test_an_upload_that_broke_off_goes_on_where_the_syncer_stands(tmp_path):
    def scenario(learner):
        ask = learner.told("ask_contribution")
        delta = delta_for(learner)
        payload = write_float32(delta)
        header = learner.header(ask, fragment_pb2.ENCODING_FLOAT32, payload)

        def three_chunks():
            yield syncer_pb2.UploadContributionRequest(header=header)
            for chunk, _ in zip(chunks_of(payload, 0, [1000, 2000, 500]), range(3), strict=False):
                yield syncer_pb2.UploadContributionRequest(chunk=chunk)

        _, answer = learner.stub.UploadContribution(three_chunks())
        assert answer.fate == syncer_pb2.CONTRIBUTION_FATE_ABORTED  # may be sent again
        assert learner.resume(header, payload) == (3500, syncer_pb2.CONTRIBUTION_FATE_ACCEPTED)
        # Once more, as by a learner that has lost the answer: no byte is wanted.
        assert learner.resume(header, payload) == (len(payload), syncer_pb2.CONTRIBUTION_FATE_ACCEPTED)

    # The round stays open: two are required, and only one is there.
    await against_a_syncer(tmp_path, scenario, run_of(quorum={"minimum": 2}))


async def test_a_download_that_broke_off_goes_on_at_any_offset(tmp_path):
    def scenario(learner):
        news = fragment_pb2.FragmentVersion(fragment=1, version=learner.versions[1])
        header, payload = learner.fetch(news, break_at=1)
        assert header.payload_bytes == 4 * learner.count > 4 << 20
        assert payload == write_float32(learner.theta[1])

    await against_a_syncer(tmp_path, scenario, shape=LARGE_SHAPE)


async def test_a_refusal_has_a_reason_that_every_client_can_read(tmp_path):
    def scenario(learner):
        with pytest.raises(grpc.RpcError) as caught:
            learner.fetch(fragment_pb2.FragmentVersion(fragment=2, version=learner.versions[1]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "fragment = 2: must be 0 to 1"
        status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert (info.domain, info.reason) == ("decoupled-diloco", "ERROR_REASON_INVALID_FIELD")

    await against_a_syncer(tmp_path, scenario)


# ---- the real client, a plain server ---------------------------------------------------------------------------------


class PlainSyncer(SyncerServiceServicer):
    """Moves bytes and decides nothing; registered with the generated function, so all its serializers are generated."""

    def __init__(self, theta, delta):
        self.theta = write_float32(theta)
        self.delta = write_bf16(delta)
        self.uploads = {}
        self.offsets = []
        self.breaks = [5000, 9000]
        """Downloads are broken off once they have come to these offsets."""

    async def UploadInitialFragment(self, request_iterator, context):
        header = (await anext(request_iterator)).header
        payload = await self._received(request_iterator, bytearray(4 * header.value_count), 0)
        self.uploads["initial", header.fragment] = bytes(payload)
        return syncer_pb2.UploadInitialFragmentResponse()

    async def UploadContribution(self, request_iterator, context):
        header = (await anext(request_iterator)).header
        buffer = self.uploads.setdefault((header.round, header.encoding), bytearray(header.payload_bytes))
        offset = header.payload_bytes // 3 if header.resume else 0
        yield syncer_pb2.UploadContributionResponse(wanted_offset=offset)
        await self._received(request_iterator, buffer, offset)
        yield syncer_pb2.UploadContributionResponse(fate=syncer_pb2.CONTRIBUTION_FATE_ACCEPTED)

    async def _received(self, parts, buffer, at):
        async for part in parts:
            if part.HasField("trailer"):
                assert (at, part.trailer.digest) == (len(buffer), digest_of(bytes(buffer)))
                return buffer
            assert part.chunk.offset == at
            at = put_in_place(buffer, part.chunk)
        raise AssertionError("no trailer came")

    async def DownloadFragment(self, request, context):
        is_delta = request.HasField("held")
        payload = self.delta if is_delta else self.theta
        self.offsets.append(request.offset)
        header = syncer_pb2.DownloadHeader(
            version=fragment_pb2.FragmentVersion(fragment=request.fragment, version=request.version),
            encoding=fragment_pb2.ENCODING_BF16 if is_delta else fragment_pb2.ENCODING_FLOAT32,
            delta_base=request.held if is_delta else None,
            payload_bytes=len(payload),
        )
        yield syncer_pb2.DownloadFragmentResponse(header=header)
        for chunk in chunks_of(payload, request.offset, [1, 999, 3000] + 20 * [1000]):
            yield syncer_pb2.DownloadFragmentResponse(chunk=chunk)
            if self.breaks and chunk.offset + len(chunk.data) >= self.breaks[0]:
                self.breaks.pop(0)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut off")
        yield syncer_pb2.DownloadFragmentResponse(trailer=trailer_of(payload))


@asynccontextmanager
async def plain_syncer(theta, delta):
    """A plain server, and the client of a real learner that talks to it."""
    servicer, server = PlainSyncer(theta, delta), grpc.aio.server()
    add_SyncerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(Address("127.0.0.1", port), None)
    try:
        yield servicer, BulkClient(channel, "real", 1, "schema", Deadlines())
    finally:
        await channel.close()
        await server.stop(None)


def nobody(_):
    """Is told about moved bytes."""


async def test_the_learners_uploads_are_understood_by_a_plain_server():
    values = np.random.default_rng(3).standard_normal(700_001).astype("<f4")
    async with plain_syncer(values, values) as (servicer, client):
        await client.upload_initial(1, values, nobody)
        assert servicer.uploads["initial", 1] == write_float32(values)
        for encoding, writing in ENCODINGS.items():
            name = fragment_pb2.Encoding.Name(encoding).removeprefix("ENCODING_").lower()
            payload = encoding_named(name).encode(values)
            header = ev.ContributionHeader("real", 1, 7, 0, Version(1, 1, "x"), 5, 50, 5, 50, 5, len(payload))
            for resume in (False, True):
                assert await client.upload(header, payload, encoding=name, resume=resume, moved=nobody) is Fate.ACCEPTED
                assert servicer.uploads[7, encoding] == writing.write(values)


async def test_the_learners_downloads_go_on_where_a_plain_server_broke_them_off():
    base, delta = np.random.default_rng(4).standard_normal((2, 6000)).astype("<f4")
    moved = base + read_bf16(write_bf16(delta), delta.size)
    async with plain_syncer(base, delta) as (servicer, client):
        with ThreadPoolExecutor(1) as executor:
            downloader = Downloader(
                lambda: client, (delta.size,), executor, nobody, random.Random(0), get_logger("test")
            )
            first = Version(1, 1, digest_of(write_float32(base)))
            values = await downloader.fetch(0, first, None)
            assert servicer.offsets == [0, 5000, 9000]
            assert write_float32(values) == write_float32(base)

            # The second version comes as a delta to the first one, again from a server that knows only the protos.
            second = Version(1, 2, digest_of(write_float32(moved)))
            values = await downloader.fetch(0, second, Held(first, values))
            assert write_float32(values) == write_float32(moved)
