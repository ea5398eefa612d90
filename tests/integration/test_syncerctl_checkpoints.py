"""An operator keeps a run and takes it back, over real sockets."""

import asyncio
import json
import os

import grpc
import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.fragments import gather
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc
from syncerctl.program import app
from tests.integration.syncers import machine_of, syncer, until
from tests.integration.test_checkpoints import committed, training
from tests.integration.test_syncerctl import ctl, quiet_logs  # noqa: F401 (a fixture)


async def test_create_show_list_and_delete(tmp_path):
    async with training(tmp_path) as (running, _):
        assert "there is no checkpoint yet" in await ctl(running, "checkpoint", "list")
        await committed(running, 4)
        text = await ctl(running, "checkpoint", "create", "before-lunch", "--reason", "a good loss")
        assert "before-lunch of run test" in text
        assert "a good loss" in text
        made = json.loads(await ctl(running, "checkpoint", "create", "--json"))["checkpoint"]
        assert made["checkpoint_id"] == f"t1-step-{made['global_step']}"
        assert made["payload_bytes"] > 0
        assert len(made["versions"]) == 4
        assert not made["automatic"]
        listed = json.loads(await ctl(running, "checkpoint", "list", "--json"))
        assert [item["checkpoint_id"] for item in listed["checkpoints"]] == [made["checkpoint_id"], "before-lunch"]
        assert listed["unreadable"] == []
        shown = json.loads(await ctl(running, "checkpoint", "show", made["checkpoint_id"], "--json"))["checkpoint"]
        assert shown == made
        assert "versions by fragment: 1." in await ctl(running, "checkpoint", "show", "before-lunch")
        assert "already" in await ctl(running, "checkpoint", "create", "before-lunch", code=4)
        assert "before-lunch" in await ctl(running, "checkpoint", "list")

        assert "is deleted" in await ctl(running, "checkpoint", "delete", "before-lunch", "--yes")
        assert "there is no checkpoint 'before-lunch'; there are: t1-" in await ctl(
            running, "checkpoint", "show", "before-lunch", code=4
        )
        manifest = tmp_path / "state" / "checkpoints" / made["checkpoint_id"] / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"global_step"', '"global_stop"', 1))
        running.safekeeping.checkpoints._folder._known.clear()  # as after a restart of the syncer
        assert "unreadable: " in await ctl(running, "checkpoint", "list")
        assert "CORRUPT" in await ctl(running, "rollback", made["checkpoint_id"], "--yes", code=4)


async def test_nothing_is_undone_or_deleted_without_a_yes(tmp_path):
    async with training(tmp_path) as (running, _):
        await committed(running, 2)
        await ctl(running, "checkpoint", "create", "one")
        address = ["--address", str(running.addresses.admin)]
        for command in (["checkpoint", "delete", "one"], ["rollback", "one"]):
            asked = await asyncio.to_thread(CliRunner().invoke, app, [*command, *address], input="n\n")
            assert asked.exit_code == 1
            assert "one" in asked.stderr
        assert machine_of(running).timeline == 1
        assert "one" in await ctl(running, "checkpoint", "list")


async def test_rollback_answers_when_the_run_goes_on_from_there(tmp_path):
    async with training(tmp_path) as (running, team):
        await committed(running, 4)
        await ctl(running, "checkpoint", "create", "one")
        step = machine_of(running).global_step
        await committed(running, machine_of(running).rounds.committed_count + 8)
        text = await ctl(running, "rollback", "one", "--reason", "the loss went up", "--yes")
        assert "test goes on from one: global step" in text
        assert machine_of(running).timeline == 2
        await until(running, lambda: machine_of(running).global_step > step + 8)
        assert [learner.joins for learner in team] == [2, 2]
        run = json.loads(await ctl(running, "status", "--json"))["run"]
        assert run["goodput"]["tokens_discarded"]["rolled_back"] > 0
        assert "there is no checkpoint 'two'" in await ctl(running, "rollback", "two", "--yes", code=4)


async def test_a_caller_that_goes_away_leaves_nothing_in_half(tmp_path):
    async with training(tmp_path) as (running, _):
        await committed(running, 4)
        await ctl(running, "checkpoint", "create", "one")
        async with grpc.aio.insecure_channel(str(running.addresses.admin)) as channel:
            call = admin_pb2_grpc.AdminServiceStub(channel).RollBackRun(
                admin_pb2.RollBackRunRequest(checkpoint_id="one")
            )
            await until(running, lambda: bool(running.safekeeping.checkpoints._roll_backs))
            call.cancel()
        await until(running, lambda: machine_of(running).timeline == 2)
        await committed(running, machine_of(running).rounds.committed_count + 4)


async def test_before_the_first_learner_there_is_nothing_to_keep(tmp_path):
    async with syncer(tmp_path) as running:
        assert "the run has no parameters yet" in await ctl(running, "checkpoint", "create", code=4)


async def test_pages_hold_together(tmp_path):
    async with training(tmp_path) as (running, _):
        await committed(running, 2)
        names = [f"c{index}" for index in range(5)]
        for name in names:
            await ctl(running, "checkpoint", "create", name)
        async with grpc.aio.insecure_channel(str(running.addresses.admin)) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            found, token = [], ""
            while True:
                answer = await stub.ListCheckpoints(admin_pb2.ListCheckpointsRequest(page_size=2, page_token=token))
                found += [item.checkpoint_id for item in answer.checkpoints]
                if not (token := answer.next_page_token):
                    break
            assert sorted(found) == names
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListCheckpoints(admin_pb2.ListCheckpointsRequest(page_size=1001))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_model_of_now_and_that_of_a_checkpoint_are_exported(tmp_path):
    async with syncer(tmp_path) as running:
        assert "the run has no parameters yet" in await ctl(running, "export", code=4)
    async with training(tmp_path) as (running, _):
        await committed(running, 4)
        await ctl(running, "checkpoint", "create", "kept")
        await committed(running, 8)
        now = json.loads(await ctl(running, "export", "--json"))
        assert now["path"] == str(tmp_path / "output" / f"model-step-{now['global_step']}.safetensors")
        assert now["size_bytes"] == os.stat(now["path"]).st_size
        kept = json.loads(await ctl(running, "export", "kept", "--json"))
        assert kept["global_step"] < now["global_step"]
        fragments = running.serving.agreement.known()
        with safe_open(kept["path"], "numpy") as file:
            assert file.metadata()["global_step"] == str(kept["global_step"])
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        manifest = await running.safekeeping.checkpoints.get("kept")
        for fragment in fragments.fragments:
            flat = gather(fragment, found)
            assert vector_digest(flat) == manifest.state.versions[fragment.index].digest
        assert "there is no checkpoint 'none'" in await ctl(running, "export", "none", code=4)
        assert "bytes, step" in await ctl(running, "export")
