"""One contribution and what can go wrong with it, at the wire."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
import structlog

from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.effects import Admission
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.events import ContributionFailed, FragmentApplied, ProgressReported
from decoupled_diloco.core.ids import Fate, RoundState
from decoupled_diloco.v1 import syncer_pb2
from decoupled_diloco.wire import codec, control
from tests.integration.protocol_link import TINY_SCHEMA, Link, compute
from tests.integration.syncers import DEADLINES, config_of, machine_of, syncer, until

SIZES = fragment_schema(TINY_SCHEMA, 4).sizes
STEP_SECONDS = 0.05


class Attached:
    """A link whose control stream is read for it; the steps are made up."""

    def __init__(self, running, link, stream):
        self.running = running
        self.link = link
        self.stream = stream
        self.events = []
        self.arrived = asyncio.Condition()

    async def read(self):
        while hasattr(message := await self.stream.read(), "WhichOneof"):
            if (event := control.instruction_from_wire(message)) is not None:
                self.events.append(event)
                async with self.arrived:
                    self.arrived.notify_all()

    async def event(self, kind, number=0):
        """The event of a kind with this index, once it is there."""

        def found():
            return [event for event in self.events if isinstance(event, kind)]

        async with asyncio.timeout(10), self.arrived:
            await self.arrived.wait_for(lambda: len(found()) > number)
        return found()[number]

    async def say(self, report):
        await self.stream.write(control.report_to_wire(report))

    async def initialize(self, value=1.0):
        """Brings the initial parameters and applies the first versions."""
        await self.event(lev.InitialAsked)
        for fragment, size in enumerate(SIZES):
            await self.link.upload_initial(fragment, np.full(size, value, np.float32))
        await self.apply_all()

    async def apply_all(self):
        for index in range(4):
            news = await self.event(lev.Published, index)
            applied = FragmentApplied("", 0, news.fragment, news.version, 0, 0)
            await self.say(applied)
        await self.say(ProgressReported("", 0, compute(10, 1000, STEP_SECONDS)))


@asynccontextmanager
async def attached(running, name="a", initialize=True):
    link = Link(str(running.addresses.data), name)
    try:
        await link.join()
        async with link.attached(progress=compute(0, 0, STEP_SECONDS)) as stream:
            learner = Attached(running, link, stream)
            reader = asyncio.create_task(learner.read())
            try:
                if initialize:
                    await learner.initialize()
                yield learner
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
    finally:
        await link.close()


def delta_of(fragment, value=0.25):
    return np.full(SIZES[fragment], value, np.float32).tobytes()


def request(header):
    return syncer_pb2.UploadContributionRequest(header=header)


def keep_open():
    """Nothing closes by itself: two learners are required and only one is there."""
    return config_of(quorum={"minimum": 2}, deadlines={"lease_seconds": 60.0, "stall_seconds": 60.0})


async def test_the_same_contribution_again_is_answered_as_the_first_time(tmp_path):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED
        header.resume = True
        assert await learner.link.upload(header, b"") is Fate.ACCEPTED
        assert len(running.serving.uploads) == 1


async def test_a_broken_upload_goes_on_where_it_stopped(tmp_path):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        payload = np.arange(SIZES[ask.fragment], dtype=np.float32).tobytes()
        header = learner.link.header(ask, "float32")
        cut_off = lambda index, message: message if index < 3 else None  # noqa: E731
        fate = await learner.link.upload(header, payload, chunk_bytes=100, mangle=cut_off)
        assert fate is Fate.ABORTED

        sent = []
        header.resume = True
        record = lambda index, message: sent.append(message) or message  # noqa: E731
        assert await learner.link.upload(header, payload, chunk_bytes=100, mangle=record) is Fate.ACCEPTED
        assert len(sent) == len(payload) // 100 - 3 + 1 + 1  # the chunks that were missing, and the trailer
        slot = running.serving.uploads.find("a", learner.link.incarnation, ask.round)
        assert bytes(slot.buffer.data) == payload


async def test_a_connection_that_dies_leaves_what_it_brought(tmp_path):
    tape = []
    async with syncer(tmp_path, keep_open(), tape=tape) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        call = learner.link.bulk.UploadContribution()
        await call.write(request(header))
        await call.read()
        call.cancel()
        await until(running, lambda: any(isinstance(event, ContributionFailed) for _, event in tape))
        header.resume = True
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED


@pytest.mark.parametrize("where", ["chunk", "trailer", "early"])
async def test_a_corrupt_upload_is_refused_and_may_come_again(tmp_path, where):
    def mangle(index, message):
        if where == "chunk" and index == 1:
            return message[:-1] + bytes([message[-1] ^ 1])
        if where == "trailer" and index == 2:
            return message[:-1] + b"z"
        if where == "early" and index == 1:
            return None
        return message

    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        half = len(delta_of(ask.fragment)) // 2
        fate = await learner.link.upload(header, delta_of(ask.fragment), chunk_bytes=half, mangle=mangle)
        assert fate is (Fate.ABORTED if where == "early" else Fate.CORRUPT)
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED


async def outcome(link, call):
    """Fate of a contribution, or the reason why its stream was ended."""
    try:
        return await link.fate(call)
    except PeerError as error:
        return error.reason


async def test_a_contribution_that_stands_still_is_ended_and_may_come_again(tmp_path):
    config = config_of(quorum={"minimum": 2}, deadlines=DEADLINES | {"upload_idle_seconds": 0.2})
    async with syncer(tmp_path, config) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        call = learner.link.bulk.UploadContribution()
        await call.write(request(header))
        # The handler and the machine keep the same deadline; whoever notices first ends the stream.
        assert await outcome(learner.link, call) in (Reason.TRANSFER_IDLE, Fate.ABORTED)
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED


async def test_a_stream_without_a_header_is_ended(tmp_path):
    config = config_of(deadlines=DEADLINES | {"upload_idle_seconds": 0.2})
    async with syncer(tmp_path, config) as running, attached(running) as learner:
        call = learner.link.bulk.UploadContribution()
        with pytest.raises(PeerError, match="no header came for 0.2 s") as refused:
            await learner.link.fate(call)
        assert refused.value.reason is Reason.TRANSFER_IDLE


async def test_a_newer_stream_takes_over(tmp_path):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        old = learner.link.bulk.UploadContribution()
        await old.write(request(header))
        await old.read()
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED
        with pytest.raises(PeerError, match="newer stream"):
            await learner.link.fate(old)


async def test_values_that_are_not_finite_make_the_learner_recover(tmp_path):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        assert await learner.link.upload(header, delta_of(ask.fragment, np.nan)) is Fate.NONFINITE
        reason = (await learner.event(lev.RecoverAsked)).reason
        assert reason == f"round {ask.round}: the contribution contains NaN or infinite values"
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.NONFINITE
        assert len(running.serving.uploads) == 0
        assert running.serving.uploads.pool.used_bytes == 0


async def test_a_norm_that_no_merge_takes_is_told_as_that_and_not_as_values_that_are_not_finite(tmp_path):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        huge = np.full(SIZES[ask.fragment], 1e19, np.float32)
        payload = encoding_named("int4").encode(huge)
        assert await learner.link.upload(learner.link.header(ask, "int4"), payload) is Fate.NONFINITE
        reason = (await learner.event(lev.RecoverAsked)).reason
        assert reason.startswith(f"round {ask.round}: the contribution's norm ")
        assert reason.endswith(" is above 1e+18")


@pytest.mark.parametrize(
    ("overrides", "fate"),
    [
        ({"step_count_since_base": 0}, Fate.ZERO_STEPS),
        ({"token_count_since_base": 0}, Fate.ZERO_STEPS),
        ({"schema_digest": "other"}, Fate.SCHEMA),
        ({"round": 999}, Fate.LATE),
        ({"incarnation": 999}, Fate.STALE_INCARNATION),
        ({"learner_id": "stranger"}, Fate.STALE_INCARNATION),
    ],
)
async def test_what_cannot_be_merged_is_told_so(tmp_path, overrides, fate):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32", **overrides)
        assert await learner.link.upload(header, delta_of(ask.fragment)) is fate
        assert len(running.serving.uploads) == 0


async def test_another_base_version_is_stale(tmp_path):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        header.base.digest = "0" * 32
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.STALE_BASE


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"fragment": 4}, "fragment = 4: must be 0 to 3"),
        ({"payload_bytes": 1 << 50}, "payload_bytes = 1125899906842624: fragment 0 has"),
        ({"encoding": 9}, "encoding = 9: this release knows"),
        ({"cursor": -1}, "cursor = -1: must be at least 0"),
    ],
)
async def test_a_header_that_is_nonsense_is_refused(tmp_path, overrides, words):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        assert ask.fragment == 0
        with pytest.raises(PeerError, match=words) as refused:
            await learner.link.upload(learner.link.header(ask, "float32", **overrides), b"")
        assert refused.value.reason is Reason.INVALID_FIELD


async def test_a_late_contribution_changes_nothing(tmp_path):
    config = config_of(deadlines={"lease_seconds": 60.0, "stall_seconds": 60.0})
    async with syncer(tmp_path, config) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED
        closed = await learner.event(lev.RoundEnded)
        assert (closed.round, closed.committed, closed.members) == (ask.round, True, ("a",))
        version = machine_of(running).versions[ask.fragment]
        other = learner.link.header(ask, "float32", learner_id="a", local_step=11)
        assert await learner.link.upload(other, delta_of(ask.fragment, 9.0)) is Fate.ACCEPTED  # remembered
        async with attached(running, "b", initialize=False) as late:
            assert await late.link.upload(late.link.header(ask, "float32"), delta_of(ask.fragment)) is Fate.LATE
        assert machine_of(running).versions[ask.fragment] == version


async def test_an_old_incarnation_is_fenced_off(tmp_path):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as old:
        ask = await old.event(lev.Asked)
        async with attached(running, "a", initialize=False):
            fate = await old.link.upload(old.link.header(ask, "float32"), delta_of(ask.fragment))
            assert fate is Fate.STALE_INCARNATION
            with pytest.raises(PeerError) as refused:
                await old.link.download(ask.fragment, ask.base)
            assert refused.value.reason is Reason.STALE_INCARNATION


async def test_an_upload_without_room_is_asked_to_retry(tmp_path):
    async with syncer(tmp_path, keep_open(), upload_buffer_bytes_max=1 << 20) as running, attached(running) as learner:
        pool = running.serving.uploads.pool
        hold = pool.acquire(pool.bytes_max)
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        header.resume = (
            True  # waits for the first answer: gRPC loses the status of a call that is refused during a write
        )
        with pytest.raises(PeerError) as refused:
            await learner.link.upload(header, delta_of(ask.fragment))
        assert refused.value.reason is Reason.OVERLOADED
        assert refused.value.retry_seconds == 2.0
        hold.release()
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED


async def test_buffers_are_reused_and_do_not_grow(tmp_path):
    config = config_of(deadlines={"lease_seconds": 60.0, "stall_seconds": 60.0})
    async with syncer(tmp_path, config) as running, attached(running) as learner:
        pool = running.serving.uploads.pool
        for index in range(12):
            ask = await learner.event(lev.Asked, index)
            header = learner.link.header(ask, "float32", local_step=10 + index)
            assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED
            await learner.event(lev.RoundEnded, index)
            news = await learner.event(lev.Published, 4 + index)
            await learner.say(FragmentApplied("", 0, news.fragment, news.version, 10, 1000))
        assert pool.used_bytes == 0
        assert running.serving.store.version_count == 4


async def test_a_round_that_lost_its_only_upload_opens_again(tmp_path):
    config = config_of(deadlines=DEADLINES | {"upload_idle_seconds": 0.3, "lease_seconds": 60.0})
    async with syncer(tmp_path, config) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        call = learner.link.bulk.UploadContribution()
        await call.write(request(learner.link.header(ask, "float32")))
        assert await outcome(learner.link, call) in (Reason.TRANSFER_IDLE, Fate.ABORTED)
        await until(running, lambda: machine_of(running).rounds.under_way[ask.round].state is RoundState.OPEN)
        header = learner.link.header(ask, "float32")
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED
        assert (await learner.event(lev.RoundEnded)).committed


async def test_the_bits_of_theta_are_those_of_the_outer_step(tmp_path):
    config = config_of(
        outer={"learning_rate": 0.5, "momentum": 0.0}, deadlines={"lease_seconds": 60.0, "stall_seconds": 60.0}
    )
    async with syncer(tmp_path, config) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        await learner.link.upload(header, delta_of(ask.fragment, 0.25))
        news = await learner.event(lev.Published, 4)
        got, payload = await learner.link.download(news.fragment, news.version)
        # theta + lr * (delta sent), by hand
        assert np.array_equal(np.frombuffer(payload, np.float32), np.full(SIZES[0], 1.125, np.float32))
        assert codec.fragment_version_from_wire(got.version) == news
        assert got.version.value_count == SIZES[0]


@pytest.mark.parametrize("taken_over", [False, True])
async def test_a_slot_that_is_lost_while_its_stream_is_let_in_is_answered_and_no_fault(
    tmp_path, monkeypatch, taken_over
):
    async with syncer(tmp_path, keep_open()) as running, attached(running) as learner:
        ask = await learner.event(lev.Asked)
        header = learner.link.header(ask, "float32")
        uploads, driver = running.serving.uploads, running.serving.driver
        decide = driver.request

        async def lost_meanwhile(make_event, *answers):
            answer = await decide(make_event, *answers)
            if isinstance(answer, Admission) and (slot := uploads.find("a", learner.link.incarnation, ask.round)):
                if taken_over:
                    uploads.open(slot.header, slot.encoding)
                else:
                    uploads.close_round(ask.round, "the round has closed")
            return answer

        monkeypatch.setattr(driver, "request", lost_meanwhile)
        with structlog.testing.capture_logs() as logs:
            call = learner.link.bulk.UploadContribution()
            await call.write(request(header))
            assert await outcome(learner.link, call) == (Reason.OVERLOADED if taken_over else Fate.ABORTED)
        assert [entry for entry in logs if entry["log_level"] == "error"] == []
        monkeypatch.undo()
        assert await learner.link.upload(header, delta_of(ask.fragment)) is Fate.ACCEPTED
