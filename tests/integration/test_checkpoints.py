"""Checkpoints of a run that goes on, and back to them: protocol learners over real sockets."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from decoupled_diloco.arrays.digest import state_digest
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import RunPhase
from syncer_service.checkpoint_folder import CheckpointFolder
from syncer_service.checkpoint_storage import open_folder
from syncer_service.store.interface import StorageError
from tests.integration.lasting_learner import LastingLearner
from tests.integration.protocol_learner import Script
from tests.integration.syncers import config_of, machine_of, syncer, until


@asynccontextmanager
async def training(folder, names="ab", config=None, **settings):
    """A syncer with learners that join again by themselves."""
    config = config or config_of()
    async with syncer(folder, config, **settings) as running:
        address = str(running.addresses.data)
        team = [LastingLearner(address, name, config.to_policy(), Script(seed=n)) for n, name in enumerate(names)]
        tasks = [asyncio.create_task(learner.run()) for learner in team]
        try:
            yield running, team
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def committed(running, count):
    await until(running, lambda: machine_of(running).rounds.committed_count >= count)


def figure(running, name):
    return running.telemetry.registry.get_sample_value(f"decoupled_diloco_syncer_{name}")


async def test_a_checkpoint_is_the_run_as_it_was_while_the_run_goes_on(tmp_path):
    async with training(tmp_path) as (running, _):
        await committed(running, 6)
        checkpoints = running.safekeeping.checkpoints
        before = machine_of(running).rounds.committed_count
        manifest = await checkpoints.create("first", "for a look")
        assert (await checkpoints.listing()).found == (manifest,)
        assert manifest.state.committed_count >= before
        newest = running.ending._shell.newest()
        loaded = await asyncio.to_thread(checkpoints._folder.states, manifest)
        for fragment, version in enumerate(manifest.state.versions):
            if newest[fragment].version == version:
                assert state_digest(loaded[fragment]) == state_digest(newest[fragment].state)
        await committed(running, before + 8)
        assert figure(running, "checkpoint_global_steps") == manifest.state.global_step
        assert figure(running, "checkpoint_bytes") == manifest.byte_count > 0


async def test_every_cut_names_durable_versions_whatever_is_being_committed(tmp_path):
    async with training(tmp_path, "abc") as (running, _):
        await committed(running, 4)
        cuts = running.safekeeping.checkpoints._cuts
        for _ in range(200):
            cut = await cuts.take()
            assert [c.version for _, c in sorted(cut.fragments.items())] == list(cut.state.versions)
            assert [c.global_step for _, c in sorted(cut.fragments.items())] == list(cut.state.version_steps)
            await asyncio.sleep(0.001)


async def test_back_to_a_checkpoint_everything_since_is_undone_and_redone(tmp_path):
    async with training(tmp_path) as (running, team):
        machine = machine_of(running)
        await committed(running, 6)
        checkpoints = running.safekeeping.checkpoints
        manifest = await checkpoints.create("good")
        await committed(running, manifest.state.committed_count + 8)
        step, cursors = machine.global_step, dict(machine.membership.slot_cursors)
        used = machine.rounds.newest_opened
        assert step > manifest.state.global_step
        assert sum(machine.ledger.discarded_tokens["rolled_back"]) == 0

        await checkpoints.roll_back("good", "the loss went up")
        assert machine.timeline == 2
        assert machine.global_step == manifest.state.global_step
        assert [v.digest for v in machine.versions] == [v.digest for v in manifest.state.versions]
        assert {v.timeline for v in machine.versions} == {2}
        assert machine.membership.slot_cursors == manifest.state.slot_cursors != cursors
        assert sum(machine.ledger.discarded_tokens["rolled_back"]) > 0
        undone = sum(machine.ledger.merged_tokens)
        assert undone == sum(manifest.state.ledger.merged_tokens)
        assert machine.rounds.newest_opened > used, "round numbers are never used twice"

        # Everybody joins again by itself, and every fragment commits again.
        await until(running, lambda: all(v.number > 20 or v.timeline == 2 for v in machine.versions))
        started = [v.number for v in machine.versions]
        await until(running, lambda: all(v.number > n for v, n in zip(machine.versions, started, strict=True)))
        await until(running, lambda: machine.global_step > step)
        assert [learner.joins for learner in team] == [2, 2]
        for learner in team:
            timelines = [version.timeline for _, version, _ in learner.applied]
            assert timelines == sorted(timelines), "nothing of the old timeline after the new one"
            assert [digest for _, _, digest in learner.applied] == [v.digest for _, v, _ in learner.applied]


async def test_rolled_back_twice_to_the_same_place(tmp_path):
    async with training(tmp_path) as (running, _):
        machine = machine_of(running)
        await committed(running, 4)
        checkpoints = running.safekeeping.checkpoints
        manifest = await checkpoints.create("good")
        for timeline in (2, 3):
            count = machine.rounds.committed_count
            await committed(running, count + 4)
            await checkpoints.roll_back("good", "")
            assert machine.timeline == timeline
            assert [v.digest for v in machine.versions] == [v.digest for v in manifest.state.versions]


async def test_a_paused_run_rolls_back_too_and_goes_on_when_it_is_resumed(tmp_path):
    async with training(tmp_path) as (running, team):
        machine = machine_of(running)
        await committed(running, 4)
        checkpoints = running.safekeeping.checkpoints
        await checkpoints.create("good")
        await committed(running, machine.rounds.committed_count + 4)
        await running.serving.driver.request(_pause, type(None))
        await checkpoints.roll_back("good", "")
        assert machine.timeline == 2
        assert machine.steering.pause_reason == "for a while"
        await until(running, lambda: [learner.joins for learner in team] == [2, 2])
        await running.serving.driver.request(_resume, type(None))
        await committed(running, machine.rounds.committed_count + 4)


def _pause(token):
    from decoupled_diloco.core.events import PauseRequested

    return PauseRequested(token, "for a while")


def _resume(token):
    from decoupled_diloco.core.events import ResumeRequested

    return ResumeRequested(token)


async def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    async with training(tmp_path) as (running, team):
        await committed(running, 4)
        checkpoints = running.safekeeping.checkpoints
        manifest = await checkpoints.create("bad")
        folder = open_folder(str(tmp_path / "state" / "checkpoints" / "bad"))
        data = bytearray(folder.read(manifest.files[2].name))
        data[-3] ^= 1
        folder.write(manifest.files[2].name, [memoryview(data)])
        with pytest.raises(PeerError) as refused:
            await checkpoints.roll_back("bad", "")
        assert refused.value.reason is Reason.CORRUPT
        assert manifest.files[2].name in refused.value.text
        count = machine_of(running).rounds.committed_count
        await committed(running, count + 4)
        assert machine_of(running).timeline == 1
        assert [learner.joins for learner in team] == [1, 1]


async def test_a_store_that_cannot_write_changes_nothing(tmp_path, monkeypatch):
    async with training(tmp_path) as (running, team):
        await committed(running, 4)
        checkpoints = running.safekeeping.checkpoints
        await checkpoints.create("good")
        versions = list(machine_of(running).versions)

        def full(*_):
            raise StorageError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(running.serving.store, "roll_back", full)
            with pytest.raises(PeerError, match="no room; it goes on as it was") as failed:
                await checkpoints.roll_back("good", "")
        assert failed.value.reason is Reason.INTERNAL
        assert machine_of(running).timeline == 1
        assert all(now >= then for now, then in zip(machine_of(running).versions, versions, strict=True))
        await committed(running, machine_of(running).rounds.committed_count + 4)
        assert [learner.joins for learner in team] == [1, 1]
        await checkpoints.roll_back("good", "")
        assert machine_of(running).timeline == 2


async def test_what_cannot_be_asked_for(tmp_path):
    async with training(tmp_path, "") as (running, _):
        checkpoints = running.safekeeping.checkpoints
        for work, reason in (
            (checkpoints.create("x"), Reason.NOT_READY),
            (checkpoints.create("../x"), Reason.INVALID_FIELD),
            (checkpoints.get("../../etc"), Reason.NOT_FOUND),
            (checkpoints.delete("none"), Reason.NOT_FOUND),
            (checkpoints.roll_back("none", ""), Reason.NOT_FOUND),
        ):
            with pytest.raises(PeerError) as refused:
                await work
            assert refused.value.reason is reason


async def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    url = str(tmp_path / "shared")
    async with training(tmp_path / "one", config=config_of(run={"id": "one"}), checkpoint_url=url) as (running, _):
        await committed(running, 2)
        await running.safekeeping.checkpoints.create("ones")
    async with training(tmp_path / "two", config=config_of(run={"id": "two"}), checkpoint_url=url) as (running, _):
        await committed(running, 2)
        with pytest.raises(PeerError) as refused:
            await running.safekeeping.checkpoints.roll_back("ones", "")
        assert refused.value.reason is Reason.RUN_MISMATCH


async def test_automatic_ones_come_at_their_steps_and_the_newest_are_kept(tmp_path):
    config = config_of(run={"total_steps": 64})
    settings = {"checkpoint_interval_steps": 8, "checkpoints_kept": 2}
    async with training(tmp_path, "a", config, **settings) as (running, _):
        checkpoints = running.safekeeping.checkpoints
        await committed(running, 2)
        asked_for = await checkpoints.create("mine")
        await until(running, lambda: machine_of(running).phase is RunPhase.FINISHED)
        async with asyncio.timeout(20):
            while True:
                found = (await checkpoints.listing()).found
                if found[0].state.phase is RunPhase.FINISHED and len(found) == 3:
                    break
                await asyncio.sleep(0.01)
        assert found[0].state.global_step == 64
        assert found[0].reason == "the end of the run"
        assert found[1].state.global_step >= 48
        assert [manifest.automatic for manifest in found] == [True, True, False]
        assert found[2].id == asked_for.id
        assert figure(running, "checkpoints_total") is None  # it has an outcome
    assert len(open_folder(str(tmp_path / "state" / "checkpoints")).names()) == 3


async def test_one_that_is_being_read_is_neither_deleted_nor_removed_by_itself(tmp_path):
    async with training(tmp_path, "a", checkpoints_kept=1) as (running, _):
        checkpoints = running.safekeeping.checkpoints
        await committed(running, 2)
        read = await checkpoints.create(automatic=True)
        async with checkpoints._pinned(read.id):
            with pytest.raises(PeerError, match="is being read"):
                await checkpoints.delete(read.id)
            await committed(running, machine_of(running).rounds.committed_count + 1)
            newer = await checkpoints.create(automatic=True)
            await checkpoints._remove_old()
            assert {m.id for m in (await checkpoints.listing()).found} == {read.id, newer.id}
        await checkpoints._remove_old()
        assert {m.id for m in (await checkpoints.listing()).found} == {newer.id}
        await checkpoints.delete(newer.id)
        assert (await checkpoints.listing()).found == ()


async def test_checkpoints_of_a_lost_future_push_nothing_out(tmp_path):
    """A folder elsewhere still has those of before the disk was lost."""
    url = str(tmp_path / "elsewhere")
    async with training(tmp_path / "one", "a", checkpoint_url=url) as (running, _):
        checkpoints = running.safekeeping.checkpoints
        await committed(running, 2)
        early = await checkpoints.create("early", automatic=True)
        await committed(running, machine_of(running).rounds.committed_count + 12)
        late = await checkpoints.create("late", automatic=True)
    restored = {"restore_from": f"{url}/early", "checkpoint_url": url, "checkpoints_kept": 1}
    async with training(tmp_path / "two", "a", **restored) as (running, _):
        checkpoints = running.safekeeping.checkpoints
        await committed(running, early.state.committed_count + 2)
        assert machine_of(running).rounds.committed_count < late.state.committed_count
        newest = await checkpoints.create(automatic=True)
        await checkpoints._remove_old()
        assert [manifest.id for manifest in (await checkpoints.listing()).found] == [newest.id]


async def test_those_of_a_run_of_the_same_name_that_was_further_are_left_alone(tmp_path):
    url = str(tmp_path / "elsewhere")
    async with training(tmp_path / "one", "a", checkpoint_url=url) as (running, _):
        await committed(running, 16)
        await running.safekeeping.checkpoints.create("old", automatic=True)
    async with training(tmp_path / "two", "a", checkpoint_url=url, checkpoints_kept=1) as (running, _):
        checkpoints = running.safekeeping.checkpoints
        await committed(running, 2)
        for _ in range(2):
            newest = await checkpoints.create(automatic=True)
            await checkpoints._remove_old()
            await committed(running, machine_of(running).rounds.committed_count + 1)
        assert [manifest.id for manifest in (await checkpoints.listing()).found] == ["old", newest.id]


async def test_a_folder_that_cannot_be_written_hurts_nobody_and_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("syncer_service.checkpoints.RETRY_SECONDS_MIN", 0.05)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    settings = {"checkpoint_url": str(blocked), "checkpoint_interval_steps": 8}
    async with training(tmp_path, "a", **settings) as (running, _):
        checkpoints = running.safekeeping.checkpoints
        await committed(running, 6)
        with pytest.raises(PeerError) as failed:
            await checkpoints.create("x")
        assert failed.value.reason is Reason.INTERNAL
        labels = {"outcome": "failed"}
        registry = running.telemetry.registry
        assert registry.get_sample_value("decoupled_diloco_syncer_checkpoints_total", labels) >= 1
        await until(running, lambda: bool(checkpoints.problem))
        assert any("no checkpoint can be written" in text for text in running.overview.run().warnings)
        count = machine_of(running).rounds.committed_count
        await committed(running, count + 4)
        blocked.unlink()
        await until(running, lambda: any(blocked.glob("*/manifest.json")))
        assert (await checkpoints.listing()).found
        await until(running, lambda: not checkpoints.problem)


async def test_a_folder_that_hangs_delays_neither_commits_nor_answers(tmp_path, monkeypatch):
    hangs, reached = threading.Event(), threading.Event()
    write = CheckpointFolder.write

    def slow(folder, *arguments):
        reached.set()
        assert hangs.wait(30)
        return write(folder, *arguments)

    monkeypatch.setattr(CheckpointFolder, "write", slow)
    async with training(tmp_path) as (running, _):
        checkpoints = running.safekeeping.checkpoints
        await committed(running, 2)
        creating = asyncio.create_task(checkpoints.create("slow"))
        await until(running, reached.is_set)
        at = machine_of(running).rounds.committed_count
        await committed(running, at + 16)
        assert (await checkpoints.listing()).found == ()
        assert not creating.done()
        hangs.set()
        manifest = await creating
        assert manifest.state.committed_count <= at, "the run as it was when it was asked for"


async def test_a_roll_back_outlives_the_syncer(tmp_path):
    async with training(tmp_path) as (running, _):
        await committed(running, 4)
        checkpoints = running.safekeeping.checkpoints
        manifest = await checkpoints.create("good")
        await committed(running, machine_of(running).rounds.committed_count + 4)
        await checkpoints.roll_back("good", "")
        versions = list(machine_of(running).versions)
    async with training(tmp_path) as (running, team):
        machine = machine_of(running)
        assert machine.timeline == 2
        assert all(now >= then for now, then in zip(machine.versions, versions, strict=True))
        newest = running.ending._shell.newest()
        for fragment, version in enumerate(manifest.state.versions):
            if newest[fragment].version == versions[fragment]:
                assert newest[fragment].version.digest == version.digest
        await committed(running, machine.rounds.committed_count + 4)
        assert {version.timeline for _, version, _ in team[0].applied} == {2}
