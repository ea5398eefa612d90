import asyncio
import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors import safe_open

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import Encoded
from decoupled_diloco.arrays.fragments import fragment_schema, gather
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.arrays.recycled import RECYCLED_BYTES_MIN, Recycler
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.events import ContributionHeader
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.buffers import BufferPool
from syncer_service.export import export_model, export_summary, write_atomically
from syncer_service.merger import MergeInput, merge_round
from syncer_service.publications import Publications
from syncer_service.store.interface import FragmentCommit, MergedDelta, VersionGoneError
from syncer_service.store.memory import MemoryStore
from syncer_service.uploads import REPLACED, Uploads

STATE = SyncerMachine(Policy(fragment_count=2)).run_state()


def vector(value, size=8):
    return np.full(size, value, np.float32)


def store_with(fragment_count=2):
    store = MemoryStore()
    for fragment in range(fragment_count):
        store.stage_initial("a", 1, fragment, vector(fragment))
    return store, store.commit_initial("a", 1, fragment_count)


def next_commit(commit, value):
    theta = vector(value)
    version = Version(1, commit.version.number + 1, vector_digest(theta))
    return FragmentCommit(
        commit.fragment, version, 1, FragmentState.initial(theta), commit.version, memoryview(b"delta" * 4)
    )


def commit_round(store, commit):
    row = CommitRound(1, commit.fragment, commit.version, 0, (), (), 0, False, "because")
    store.commit_round(commit, MergedDelta(commit.state.theta, 0.7, 0.9, "float32"), row, STATE)


# --- the store ---


def test_initial_parameters_are_committed_all_or_nothing():
    store = MemoryStore()
    digest = store.stage_initial("a", 1, 0, vector(1))
    with pytest.raises(ValueError, match="1 of 2 fragments are staged"):
        store.commit_initial("a", 1, 2)
    assert store.newest() == {}
    store.stage_initial("a", 1, 0, vector(1))
    store.stage_initial("b", 2, 1, vector(2))
    store.discard_initial("b", 2)
    store.stage_initial("a", 1, 1, vector(2))
    commits = store.commit_initial("a", 1, 2)
    assert [commit.version.number for commit in commits] == [1, 1]
    assert commits[0].version.digest == digest
    assert not commits[0].state.momentum.any()


def test_only_the_newest_version_is_kept():
    store, (first, _) = store_with()
    assert store.find(0, first.version) is first
    second = next_commit(first, 5)
    commit_round(store, second)
    assert store.version_count == 2
    with pytest.raises(VersionGoneError) as gone:
        store.find(0, first.version)
    assert gone.value.newest == second.version
    assert store.newest()[0] is second
    assert [entry.reason for entry in store.ledger] == ["because"]


# --- what is served of it ---


async def test_a_payload_is_cut_once_and_let_go_when_it_is_replaced():
    store, (first, _) = store_with()
    second = next_commit(first, 5)
    commit_round(store, second)
    with ThreadPoolExecutor(2) as bulk:
        publications = Publications(store, bulk, "bf16")
        full = frozenset({"float32"})
        both = frozenset({"float32", "bf16"})
        one = await publications.publication(0, second.version, None, both)
        two = await publications.publication(0, second.version, first.version, both)
        three = await publications.publication(0, second.version, first.version, full)
        assert (one.encoding, two.encoding, three.encoding) == ("float32", "bf16", "float32")
        assert two.delta_base == first.version
        assert one.payload is three.payload
        assert publications.held_bytes == one.payload.payload_bytes + two.payload.payload_bytes
        publications.publish(0, Version(1, 3, ""))
        assert publications.held_bytes == 0


async def test_a_delta_is_ready_when_its_version_is_published_and_not_to_be_had_before():
    store, (first, _) = store_with()
    second = next_commit(first, 5)
    with ThreadPoolExecutor(1) as bulk:
        publications = Publications(store, bulk, "bf16")
        publications.prepare(second)
        with pytest.raises(VersionGoneError):
            await publications.publication(0, second.version, first.version, frozenset({"bf16"}))
        commit_round(store, second)
        publications.publish(0, second.version)
        await asyncio.wrap_future(bulk.submit(lambda: None))
        held_bytes = publications.held_bytes
        assert held_bytes > 0
        one = await publications.publication(0, second.version, first.version, frozenset({"bf16"}))
        assert (one.encoding, one.delta_base) == ("bf16", first.version)
        assert publications.held_bytes == held_bytes


async def test_a_delta_whose_version_did_not_become_durable_is_let_go():
    store, (first, _) = store_with()
    with ThreadPoolExecutor(1) as bulk:
        publications = Publications(store, bulk, "bf16")
        publications.prepare(next_commit(first, 5))
        publications.drop_prepared(0)
        assert publications.held_bytes == 0
        publications.publish(0, first.version)
        assert publications.held_bytes == 0


@pytest.mark.parametrize("form", ["full", "delta"])
async def test_a_reader_keeps_the_payload_that_it_reads_and_nothing_else_of_a_version(form):
    store, (first, _) = store_with()
    second = next_commit(first, 5)
    commit_round(store, second)
    held = first.version if form == "delta" else None
    with ThreadPoolExecutor(1) as bulk:
        publications = Publications(store, bulk, "bf16")
        with publications.readings.begin("a", 1, 0, second.version) as reading:
            read = await publications.publication(0, second.version, held, frozenset({"float32", "bf16"}))
            reading.payload = read.payload
            due = bytes(second.delta_payload) if form == "delta" else second.state.theta.tobytes()
            state = second.state
            others = [weakref.ref(vector) for vector in (state.momentum, state.residual)]
            others.append(weakref.ref(state.theta if form == "delta" else second.delta_payload))
            third = next_commit(second, 7)
            commit_round(store, third)
            publications.publish(0, third.version)
            del second, state
            store.ledger.clear()
            await asyncio.wrap_future(bulk.submit(gc.collect))
            assert [other() for other in others] == [None] * 3
            assert publications.held_bytes == read.payload.payload_bytes == len(due)
            assert b"".join(read.payload.messages()).count(due) == 1
        assert publications.held_bytes == 0


async def test_a_reader_that_is_cancelled_counts_no_more():
    store, (first, _) = store_with()
    gate = asyncio.Event()
    with ThreadPoolExecutor(1) as bulk:
        publications = Publications(store, bulk, "bf16")

        async def read():
            with publications.readings.begin("a", 1, 0, first.version):
                await publications.publication(0, first.version, None, frozenset({"float32"}))
                gate.set()
                await asyncio.Event().wait()

        early, late = asyncio.create_task(read()), asyncio.create_task(read())
        await asyncio.sleep(0)
        assert publications.reading_count == 2
        early.cancel()
        await gate.wait()
        late.cancel()
        await asyncio.gather(early, late, return_exceptions=True)
    assert publications.reading_count == 0


# --- buffers and uploads ---


def test_buffers_are_reused_and_bounded():
    size = RECYCLED_BYTES_MIN
    pool = BufferPool(size + 100, Recycler())
    first = pool.acquire(size)
    with pytest.raises(PeerError) as refused:
        pool.acquire(101)
    assert refused.value.reason is Reason.OVERLOADED
    first.hold()
    first.release()
    address = np.frombuffer(first.data, np.uint8).ctypes.data
    assert pool.used_bytes == size
    first.release()
    assert (pool.used_bytes, pool.allocated_bytes) == (0, size)
    for late in (first.release, first.hold, lambda: first.data):
        with pytest.raises(RuntimeError):
            late()
    again = pool.acquire(size)
    assert np.frombuffer(again.data, np.uint8).ctypes.data == address
    assert len(pool.acquire(100).data) == 100
    assert pool.used_bytes == pool.bytes_max


def test_a_buffer_is_not_given_back_while_any_of_its_holders_works_on_it():
    pool = BufferPool(1 << 30, Recycler())
    hold = pool.acquire(RECYCLED_BYTES_MIN)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: hold.hold(), range(400)))
        list(threads.map(lambda _: hold.release(), range(400)))
    assert pool.used_bytes == RECYCLED_BYTES_MIN
    hold.release()
    assert pool.used_bytes == 0


async def test_a_merge_takes_the_buffer_and_the_slot_stays_whole():
    uploads = Uploads(BufferPool(1000))
    slot = uploads.open(header(), "float32")
    slot.complete = True
    hold = uploads.hand_over(slot)
    uploads.close_round(1, "closed")  # the round ends while the merge reads
    assert uploads.pool.used_bytes == 16
    hold.release()
    assert uploads.pool.used_bytes == 0


async def test_a_contribution_that_was_merged_is_not_received_into_its_old_buffer():
    uploads = Uploads(BufferPool(1000))
    slot = uploads.open(header(), "float32")
    uploads.hand_over(slot).release()
    other = uploads.open(header(), "float32")
    assert other is not slot
    assert len(other.buffer.data) == uploads.pool.used_bytes == 16


def header(round_number=1, learner="a", size=16):
    return ContributionHeader(learner, 1, round_number, 0, Version(1, 1, "x"), 5, 50, 5, 50, 5, size)


async def test_a_slot_outlives_its_stream_and_ends_with_its_round():
    uploads = Uploads(BufferPool(1000))
    slot = uploads.open(header(), "float32")
    first = slot.stream
    assert uploads.open(header(), "float32") is slot
    assert first.stop_reason == REPLACED
    assert uploads.owns(slot, slot.stream)
    assert not uploads.owns(slot, first)
    other = uploads.open(header(), "bf16")  # says something else: starts over
    assert other is not slot
    assert len(uploads) == 1
    uploads.open(header(2), "float32")
    uploads.close_round(1, "closed")
    assert [item.header.round for item in uploads] == [2]
    assert uploads.pool.used_bytes == 16


async def test_an_expired_incarnation_keeps_what_is_whole():
    uploads = Uploads(BufferPool(1000))
    whole, part, foreign = (uploads.open(h, "float32") for h in (header(1), header(2), header(1, "b")))
    whole.complete = True
    uploads.expire("a", 1, "gone")
    assert list(uploads) == [whole, foreign]
    assert part.stream.stop_reason == "gone"
    uploads.abort("b", 1, 1, "late")
    assert list(uploads) == [whole]


async def test_a_stream_that_waits_for_bytes_is_stopped_at_once():
    uploads = Uploads(BufferPool(1000))
    slot = uploads.open(header(), "float32")

    async def wait():
        try:
            async with slot.stream.waiting(60):
                await asyncio.Event().wait()
        except TimeoutError:
            return slot.stream.stop_reason

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    uploads.abort("a", 1, 1, "the round has closed")
    assert await asyncio.wait_for(waiting, 5) == "the round has closed"
    with pytest.raises(TimeoutError):  # and stays so
        async with slot.stream.waiting(60):
            await asyncio.sleep(1)


# --- the merge ---


def test_a_merge_gives_the_outer_step_and_leaves_the_base_alone():
    state = FragmentState.initial(vector(1.0))
    segments = fragment_schema(Schema([TensorSpec("w", (8,))]), 1).fragments[0].segments
    inputs = [MergeInput(Encoded(vector(0.5).tobytes(), "float32", 8), weight) for weight in (2.0, 1.0)]
    result = merge_round(state, inputs, segments, learning_rate=0.5, momentum=0.0, download_encoding="float32")
    assert np.array_equal(result.state.theta, vector(1.25))
    assert result.digest == vector_digest(vector(1.25))
    assert result.finite
    assert result.delta_payload is None
    assert result.rda_over_avg == pytest.approx(1.0)
    assert np.array_equal(state.theta, vector(1.0))


# --- the export ---


def test_the_exported_model_has_every_tensor_and_says_where_it_comes_from(tmp_path):
    schema = Schema([TensorSpec("a/kernel", (4, 3)), TensorSpec("embed", (6, 2), rule="avg")])
    fragmentation = fragment_schema(schema, 2)
    tensors = {
        spec.name: np.random.default_rng(1).normal(size=spec.shape).astype(np.float32) for spec in schema.tensors
    }
    thetas = {fragment.index: gather(fragment, tensors) for fragment in fragmentation.fragments}
    path = export_model(tmp_path / "out", fragmentation, thetas, {"run_id": "r", "global_step": "7"})
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"run_id": "r", "global_step": "7"}
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {  # noqa: SIM118
            name: tensor.tolist() for name, tensor in tensors.items()
        }
    assert [item.name for item in path.parent.iterdir()] == ["model.safetensors"]
    (tmp_path / "any").touch()
    assert path.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_file_is_there_whole_or_not_at_all(tmp_path):
    path = export_summary(tmp_path, {"b": 1, "a": {"x": None}})
    assert json.loads(path.read_text()) == {"a": {"x": None}, "b": 1}

    def fails(aside):
        aside.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fails)
    assert json.loads(path.read_text())["b"] == 1
    assert len(list(tmp_path.iterdir())) == 1
