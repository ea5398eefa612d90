"""Downloads that are asked for before their version is there."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import numpy as np
import pytest

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.outer import apply_delta
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Role
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.v1 import syncer_pb2
from decoupled_diloco.wire import codec, enums
from learner_service.bulk_client import BulkClient
from learner_service.downloader import Downloader, Held
from syncer_service import following, readings
from tests.integration.learner_threads import Trainee, figure, start_values, train
from tests.integration.protocol_link import Link, answered, refusal_of
from tests.integration.syncers import config_of, machine_of, syncer
from tests.integration.test_syncer_downloads import committed, config
from tests.integration.test_syncer_restart import SyncerProcess
from tests.integration.test_syncer_restart import until as until_done
from tests.integration.test_syncer_uploads import SIZES, attached, delta_of


def expecting(link, fragment, held, **fields):
    """A call for the version that follows `held`."""
    encodings = [enums.encoding_to_wire(name) for name in ("float32", "bf16")]
    request = syncer_pb2.DownloadFragmentRequest(
        learner_id=link.name,
        incarnation=link.incarnation,
        fragment=fragment,
        held=codec.version_to_wire(held) if held is not None else None,
        encodings=encodings,
        next_version=True,
        **fields,
    )
    return link.bulk.DownloadFragment(request)


def waiting(running):
    return len(running.serving.publications.following)


async def whole(call):
    """Header and payload of a call that is served to its end."""
    header, payload = (await answered(call.read())).header, bytearray()
    while hasattr(part := await answered(call.read()), "data"):
        payload += part.data
    assert part.trailer.digest
    assert await answered(call.read()) is grpc.aio.EOF
    return header, bytes(payload)


async def ended_without_a_version(call):
    """Whether it ended in good order, with nothing in it."""
    return await answered(call.read()) is grpc.aio.EOF and await call.code() is grpc.StatusCode.OK


async def until_waiting(running, count):
    """Until so many calls wait; the driver sees no event when one begins or ends."""
    async with asyncio.timeout(10):
        while waiting(running) != count:  # noqa: ASYNC110 (as the docstring says)
            await asyncio.sleep(0.005)


async def test_it_is_served_when_its_version_is_published_and_counts_for_nothing_until_then(tmp_path, monkeypatch):
    monkeypatch.setattr(readings, "DOWNLOADS_MAX", 1)
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        call = expecting(learner.link, ask.fragment, ask.base)
        others = [expecting(learner.link, p, machine_of(running).versions[p]) for p in range(4) if p != ask.fragment]
        await until_waiting(running, 4)
        shell = running.overview.figures().shell
        assert (shell["downloads_active"], shell["downloads_waiting"]) == (0, 4)
        await learner.link.download(ask.fragment, ask.base)
        fragment, before, after = await committed(learner)
        header, payload = await whole(call)
        assert codec.version_from_wire(header.version.version) == after
        assert codec.version_from_wire(header.delta_base) == before == ask.base
        ones = np.ones(SIZES[fragment], np.float32)
        assert vector_digest(apply_delta(ones, payload, "bf16")) == after.digest
        assert waiting(running) == 3
        for other in others:
            other.cancel()
        await until_waiting(running, 0)


async def test_who_does_not_hold_the_newest_version_gets_it_at_once(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        fragment, before, after = await committed(learner)
        header, _ = await whole(expecting(learner.link, fragment, before))
        assert codec.version_from_wire(header.version.version) == after
        assert codec.version_from_wire(header.delta_base) == before


async def test_a_newer_call_takes_the_place_of_an_earlier_one(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        first = expecting(learner.link, ask.fragment, ask.base)
        await until_waiting(running, 1)
        second = expecting(learner.link, ask.fragment, ask.base)
        assert await ended_without_a_version(first)
        assert waiting(running) == 1
        _, _, after = await committed(learner)
        header, _ = await whole(second)
        assert codec.version_from_wire(header.version.version) == after


@pytest.mark.parametrize("end", ["the learner leaves", "another incarnation", "the time is over"])
async def test_it_ends_in_good_order_when_it_will_not_be_served(tmp_path, monkeypatch, end):
    if end == "the time is over":
        monkeypatch.setattr(following, "NEXT_VERSION_SECONDS_MAX", 0.2)
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        call = expecting(learner.link, ask.fragment, ask.base)
        if end != "the time is over":
            await until_waiting(running, 1)
        if end == "the learner leaves":
            await learner.link.leave()
        if end == "another incarnation":
            await learner.link.join()
        assert await ended_without_a_version(call)
        await until_waiting(running, 0)


async def test_a_syncer_that_stops_does_not_wait_for_it(tmp_path):
    link = None
    try:
        async with syncer(tmp_path, config(), drain_seconds=60.0) as running, attached(running) as learner:
            link = Link(str(running.addresses.data), "eye")
            await link.join(Role.OBSERVER)
            await learner.event(lev.Asked)
            call = expecting(link, 0, machine_of(running).versions[0])
            await until_waiting(running, 1)
        # The context's end would last as long as `drain_seconds`, longer than the test may.
        assert await ended_without_a_version(call)
    finally:
        await link.close()


async def test_a_roll_back_gives_versions_of_the_new_timeline_or_nothing(tmp_path):
    url = (tmp_path / "checkpoints").as_uri()
    async with syncer(tmp_path, config(), checkpoint_url=url) as running, attached(running) as learner:
        await learner.event(lev.Asked)
        await running.safekeeping.checkpoints.create("good")
        versions = list(machine_of(running).versions)
        calls = [expecting(learner.link, fragment, version) for fragment, version in enumerate(versions)]
        await until_waiting(running, 4)
        await running.safekeeping.checkpoints.roll_back("good", "for this test")
        for call in calls:
            header, _ = await whole(call)
            assert header.version.version.timeline == 2
        await until_waiting(running, 0)


async def test_everybody_who_waits_gets_the_same_bits(tmp_path):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        eyes = [Link(str(running.addresses.data), f"eye-{number}") for number in range(63)]
        try:
            await asyncio.gather(*(eye.join(Role.OBSERVER) for eye in eyes))
            ask = await learner.event(lev.Asked)
            calls = [expecting(link, ask.fragment, ask.base) for link in (learner.link, *eyes)]
            await until_waiting(running, 64)
            _, _, after = await committed(learner)
            found = await asyncio.gather(*map(whole, calls))
            assert {codec.version_from_wire(header.version.version) for header, _ in found} == {after}
            assert len({payload for _, payload in found}) == 1
        finally:
            await asyncio.gather(*(eye.close() for eye in eyes))


@pytest.mark.parametrize(
    ("held", "fields"),
    [(False, {}), (True, {"offset": 1}), (True, {"version": syncer_pb2.DownloadFragmentRequest().version})],
)
async def test_what_does_not_go_together_is_refused(tmp_path, held, fields):
    async with syncer(tmp_path, config()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        refused = await refusal_of(expecting(learner.link, ask.fragment, ask.base if held else None, **fields))
        assert isinstance(refused, PeerError)
        assert refused.reason is Reason.INVALID_FIELD
        assert waiting(running) == 0


# --- with the learner's own client ---


class Counting(BulkClient):
    """Counts the calls for a version that is there."""

    downloads = 0

    async def download(self, *args, **options):
        self.downloads += 1
        await super().download(*args, **options)


def client_of(running, link):
    policy = machine_of(running).policy
    channel = link._channels[1]
    return Counting(channel, link.name, link.incarnation, link.schema.digest, policy.deadlines)


def downloader_of(client, executor):
    return Downloader(client, SIZES, executor, lambda _: None, random.Random(1), get_logger("test"))


@pytest.mark.parametrize("encoding", ["bf16", "float32"])
async def test_the_learner_takes_what_it_asked_for_in_advance(tmp_path, encoding):
    with ThreadPoolExecutor(1) as executor:
        async with syncer(tmp_path, config(encoding)) as running, attached(running) as learner:
            client = client_of(running, learner.link)
            downloads = downloader_of(lambda: client, executor)
            ask = await learner.event(lev.Asked)
            downloads.expect(ask.fragment, ask.base)
            downloads.expect(ask.fragment, ask.base)
            await until_waiting(running, 1)
            fragment, before, after = await committed(learner)
            held = Held(before, np.ones(SIZES[fragment], np.float32))
            assert vector_digest(await downloads.fetch(fragment, after, held)) == after.digest
            assert client.downloads == 0
            # Without it, as ever.
            assert vector_digest(await downloads.fetch(fragment, after, held)) == after.digest
            assert client.downloads == 1


async def test_a_syncer_that_is_started_again_meanwhile_costs_nothing_but_the_advance(tmp_path):
    with ThreadPoolExecutor(1) as executor:
        async with syncer(tmp_path, config()) as running, attached(running) as learner:
            client = client_of(running, learner.link)
            downloads = downloader_of(lambda: client, executor)
            ask = await learner.event(lev.Asked)
            downloads.expect(ask.fragment, ask.base)
            await until_waiting(running, 1)
            held = Held(ask.base, np.ones(SIZES[ask.fragment], np.float32))
        async with syncer(tmp_path, config()) as running, attached(running, initialize=False) as learner:
            client = client_of(running, learner.link)
            await learner.apply_all()
            fragment, before, after = await committed_of(learner, ask.fragment)
            assert (fragment, before) == (ask.fragment, ask.base)
            assert vector_digest(await downloads.fetch(fragment, after, held)) == after.digest
            assert client.downloads == 1
        downloads.close()


async def committed_of(learner, fragment):
    """Runs a round of this fragment, which every fourth is."""
    for number in range(8):
        ask = await learner.event(lev.Asked, number)
        before = [event for event in learner.events if isinstance(event, lev.Published)]
        await learner.link.upload(learner.link.header(ask, "float32"), delta_of(ask.fragment, 0.2))
        news = await learner.event(lev.Published, len(before))
        if ask.fragment == fragment:
            return fragment, ask.base, news.version
    raise AssertionError(f"no round of fragment {fragment}")


# --- with real learners ---


def downloads_of(monkeypatch):
    """What learners ask for: versions that are there, and versions that come."""
    asked, came = [], []
    download, download_next = BulkClient.download, BulkClient.download_next

    async def asking(client, fragment, version, *args, **options):
        asked.append(version)
        await download(client, fragment, version, *args, **options)

    async def waiting_for(client, *args, begun, **options):
        def begins(version):
            came.append(version)
            begun(version)

        await download_next(client, *args, begun=begins, **options)

    monkeypatch.setattr(BulkClient, "download", asking)
    monkeypatch.setattr(BulkClient, "download_next", waiting_for)
    return asked, came


async def test_a_learner_asks_in_advance_for_all_but_the_first_versions(tmp_path, monkeypatch):
    asked, came = downloads_of(monkeypatch)
    run = config_of(run={"total_steps": 96})
    trainee = Trainee("a", start_values(1), step_seconds=0.01)
    async with syncer(tmp_path, run) as running:
        await train(running, run, trainee)
        assert machine_of(running).global_step == 96
    assert figure(trainee.session, "digest_mismatches_total") == 0
    assert {version.number for version in asked} == {1}
    assert len(came) > 30
    assert figure(trainee.session, "verified_versions_total") > 30


async def test_learners_go_on_with_a_syncer_that_was_killed_while_their_calls_waited(tmp_path, monkeypatch):
    _, came = downloads_of(monkeypatch)
    run = config_of()
    process = SyncerProcess(
        tmp_path,
        **{
            "run.id": run.run.id,
            "fragments.overlap_steps": str(run.fragments.overlap_steps),
            "encoding.upload": run.encoding.upload,
            "encoding.download": run.encoding.download,
        },
    )
    trainees = [Trainee(name, start_values(seed), step_seconds=0.01) for seed, name in enumerate("ab")]
    process.start()
    training = asyncio.create_task(train(process.address, run, *trainees, seconds=90))
    try:
        for _ in range(3):
            count = len(came) + 16
            await until_done(lambda count=count: len(came) >= count, tasks=[training])
            process.kill()
            process.start()
        count = len(came) + 16
        await until_done(lambda count=count: len(came) >= count, tasks=[training])
        for trainee in trainees:
            assert figure(trainee.session, "digest_mismatches_total") == 0
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        process.kill()
