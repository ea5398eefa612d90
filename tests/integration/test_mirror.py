"""The mirror of a run, and a run that goes on from it after its disk was lost: over real sockets."""

import asyncio
import shutil
import socket
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.runtime.config import ConfigError
from syncer_service import mirror
from syncer_service.checkpoint_files import read_manifest, read_states
from syncer_service.checkpoint_restore import read_restore_point
from syncer_service.checkpoint_storage import open_folder
from tests.integration.lasting_learner import LastingLearner
from tests.integration.protocol_learner import Script
from tests.integration.syncers import config_of, machine_of, syncer, until
from tests.integration.test_checkpoints import committed, figure, training


class Gate:
    """Stands in front of everything that the mirror writes."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        self.open.set()
        self.failure = None
        write = mirror.MirrorFiles.copy

        def copy(files, cut):
            assert self.open.wait(30)
            if self.failure is not None:
                raise self.failure
            return write(files, cut)

        monkeypatch.setattr(mirror.MirrorFiles, "copy", copy)
        monkeypatch.setattr(mirror, "RETRY_SECONDS_MIN", 0.02)


async def caught_up(running):
    await until(running, lambda: figure(running, "mirror_lag_rounds") == 0)


def read(url):
    """A mirror as somebody who has nothing else would find it."""
    folder = open_folder(str(url))
    manifest = read_manifest(folder, "")
    return manifest, read_states(folder, "", manifest)


async def test_the_mirror_follows_and_holds_no_more_than_it_needs(tmp_path):
    url = tmp_path / "mirror"
    config = config_of(run={"total_steps": 48})
    async with training(tmp_path, config=config, mirror_url=str(url)) as (running, _):
        await committed(running, 4)
        await until(running, lambda: figure(running, "mirror_copies_total") >= 2)
        read(url)
        await until(running, lambda: machine_of(running).phase is RunPhase.FINISHED)
        await caught_up(running)
        machine = machine_of(running)
        assert figure(running, "mirror_lag_seconds") == 0
        assert figure(running, "mirror_failures_total") == 0
    manifest, states = read(url)
    assert manifest.state.phase is RunPhase.FINISHED
    assert list(manifest.state.versions) == machine.versions
    assert sorted(states) == [0, 1, 2, 3]
    payloads = [name for name in open_folder(str(url)).names() if name.endswith(".payload")]
    assert set(payloads) >= {file.name for file in manifest.files}
    assert len(payloads) <= 2 * len(manifest.files), "what two manifests name"


async def test_a_slow_mirror_leaves_positions_out_and_delays_nobody(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    async with training(tmp_path, mirror_url=str(tmp_path / "mirror")) as (running, _):
        await committed(running, 2)
        await until(running, lambda: figure(running, "mirror_copies_total") >= 1)
        gate.open.clear()
        before, copies = machine_of(running).rounds.committed_count, figure(running, "mirror_copies_total")
        await committed(running, before + 24)
        assert 20 <= figure(running, "mirror_lag_rounds") <= 26
        assert figure(running, "mirror_lag_seconds") > 0
        gate.open.set()
        await until(running, lambda: figure(running, "mirror_lag_rounds") <= 2)
        assert figure(running, "mirror_copies_total") - copies < 20
        assert figure(running, "mirror_failures_total") == 0


async def test_what_is_lost_with_the_disk_is_the_lag_that_was_shown(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    url, config = str(tmp_path / "mirror"), config_of()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
    team = [LastingLearner(listen, name, config.to_policy(), Script(seed=n)) for n, name in enumerate("ab")]
    tasks = [asyncio.create_task(learner.run()) for learner in team]
    try:
        async with syncer(tmp_path / "first", config, listen=listen, mirror_url=url) as running:
            await committed(running, 4)
            await until(running, lambda: figure(running, "mirror_copies_total") >= 1)
            gate.open.clear()
            await committed(running, machine_of(running).rounds.committed_count + 8)
            await until(running, lambda: not running.ending._shell._merged)
            lag, count = figure(running, "mirror_lag_rounds"), machine_of(running).rounds.committed_count
            gate.failure = OSError("the whole place is gone")
            gate.open.set()
            used = machine_of(running).membership.newest_incarnation
        shutil.rmtree(tmp_path / "first")
        gate.failure = None
        mirrored, _ = read(url)
        assert lag >= 8

        async with syncer(tmp_path / "second", config, listen=listen, mirror_url=url, restore_from=url) as running:
            machine = machine_of(running)
            assert machine.rounds.committed_count == count - lag, "the loss is the lag"
            assert machine.timeline > 1
            assert machine.global_step == mirrored.state.global_step
            assert [v.digest for v in machine.versions] == [v.digest for v in mirrored.state.versions]
            assert machine.membership.newest_incarnation > used
            started = [v.number for v in machine.versions]
            await until(running, lambda: all(v.number > n + 3 for v, n in zip(machine.versions, started, strict=True)))
            assert [learner.joins for learner in team] == [2, 2], "they join again by themselves"
            await caught_up(running)
            assert figure(running, "mirror_failures_total") == 0
        assert read(url)[0].state.timeline == machine.timeline
        for learner in team:
            timelines = [version.timeline for _, version, _ in learner.applied]
            assert timelines == sorted(timelines)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_mirror_that_does_not_work_hurts_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "RETRY_SECONDS_MIN", 0.02)
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    async with training(tmp_path, mirror_url=str(blocked)) as (running, _):
        await committed(running, 8)
        await until(running, lambda: figure(running, "mirror_failures_total") >= 2)
        assert figure(running, "mirror_lag_rounds") >= 8
        (warning,) = [text for text in running.overview.run().warnings if "mirror" in text]
        assert "rounds behind: NotADirectoryError" in warning
        blocked.unlink()
        await until(running, lambda: figure(running, "mirror_copies_total") >= 1)
        await until(running, lambda: figure(running, "mirror_lag_rounds") <= 1)
        assert not [text for text in running.overview.run().warnings if "mirror" in text]


async def test_a_copy_that_is_cut_short_leaves_the_position_before(tmp_path, monkeypatch):
    url = tmp_path / "mirror"
    async with training(tmp_path, mirror_url=str(url)) as (running, _):
        await committed(running, 4)
        await until(running, lambda: figure(running, "mirror_copies_total") >= 2)

        def fails(*_):
            raise OSError("cut short")

        monkeypatch.setattr(mirror, "write_manifest", fails)
        await until(running, lambda: figure(running, "mirror_failures_total") >= 1)
        before, _ = read(url)
        await committed(running, machine_of(running).rounds.committed_count + 4)
        after, _ = read(url)
        assert before.state == after.state
        assert figure(running, "mirror_lag_rounds") >= 4


async def test_a_run_begun_anew_does_not_overwrite_the_mirror_of_the_one_before(tmp_path):
    url = tmp_path / "mirror"
    async with training(tmp_path / "one", mirror_url=str(url)) as (running, _):
        await committed(running, 8)
        await caught_up(running)
    before, _ = read(url)
    async with training(tmp_path / "two", mirror_url=str(url)) as (running, _):
        await until(running, lambda: figure(running, "mirror_failures_total") >= 1)
        assert figure(running, "mirror_copies_total") == 0
        words = running.safekeeping.mirror._failure
        assert "is not overwritten" in words
        assert "--restore-from" in words
    assert read(url)[0].state == before.state


async def test_the_same_run_started_again_goes_on_with_its_mirror(tmp_path):
    url = tmp_path / "mirror"
    for _ in range(2):
        async with training(tmp_path, mirror_url=str(url)) as (running, _):
            await until(running, lambda: figure(running, "mirror_copies_total") >= 2)
            assert figure(running, "mirror_failures_total") == 0


async def started_from(folder, url, **settings):
    """Starts a syncer that is to go on from something; raises what it has against that."""
    async with syncer(folder, settings.pop("config", None), restore_from=str(url), **settings) as running:
        return machine_of(running).global_step


async def test_what_cannot_be_restored_from_is_said_before_anything_is_written(tmp_path):
    checkpoints = tmp_path / "one" / "state" / "checkpoints"
    async with training(tmp_path / "one") as (running, _):
        await committed(running, 4)
        good = await running.safekeeping.checkpoints.create("good")
        manifest = await running.safekeeping.checkpoints.create("bad")
    (checkpoints / "bad" / manifest.files[1].name).write_bytes(b"not a record")
    for url, words in (
        (tmp_path / "nothing", "there is no manifest.json in it"),
        (checkpoints, "give the folder of one checkpoint"),
        (checkpoints / "bad", manifest.files[1].name),
    ):
        with pytest.raises(ConfigError, match=words):
            await started_from(tmp_path / "two", url)
    other = config_of(run={"id": "another"})
    with pytest.raises(ConfigError, match="run.id"):
        await started_from(tmp_path / "two", checkpoints / "good", config=other)
    with pytest.raises(ConfigError, match="is for an empty state directory"):
        await started_from(tmp_path / "one", checkpoints / "good")
    assert await started_from(tmp_path / "two", checkpoints / "good") == good.state.global_step
    step = await started_from(tmp_path / "two", checkpoints / "good")
    assert step == good.state.global_step, "the same command line goes on with what is there"
    with pytest.raises(ConfigError, match="leave restore_from out"):
        await started_from(tmp_path / "two", checkpoints / "bad")


async def test_a_checkpoint_of_the_end_gives_the_finished_model_again(tmp_path):
    config = config_of(run={"total_steps": 16})
    async with training(tmp_path / "one", config=config) as (running, _):
        first = await asyncio.wait_for(running.ending.exported, 20)
        await until(running, lambda: figure(running, "checkpoint_bytes") > 0)
        model = load_file(first)
    (end,) = (tmp_path / "one" / "state" / "checkpoints").iterdir()
    assert read_restore_point(str(end)).manifest.reason == "the end of the run"
    async with syncer(tmp_path / "two", config, restore_from=str(end)) as running:
        again = await asyncio.wait_for(running.ending.exported, 20)
        found = load_file(again)
        assert found.keys() == model.keys()
        assert all(np.array_equal(found[name], model[name]) for name in model)
