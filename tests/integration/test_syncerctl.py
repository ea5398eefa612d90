"""What operators see and do: syncerctl, the status page, probes, reflection."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.v1 import admin_pb2, admin_pb2_grpc
from syncerctl.program import app
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.protocol_link import Link
from tests.integration.syncers import config_of, fetch, machine_of, syncer, until

TLS = Path(__file__).resolve().parents[1] / "data" / "tls"


@pytest.fixture(autouse=True)
def quiet_logs():
    """The syncer logs in this process, and syncerctl's output is caught in it too."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


async def ctl(running, *arguments, code=0):
    """Runs syncerctl in a thread; returns what it printed."""
    arguments = [*arguments, "--address", str(running.addresses.admin)]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@asynccontextmanager
async def training(tmp_path, names="ab", rounds=4):
    config = config_of()
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        team = [ProtocolLearner(address, name, config.to_policy(), Script(seed=n)) for n, name in enumerate(names)]
        tasks = [asyncio.create_task(learner.run()) for learner in team]
        await until(running, lambda: machine_of(running).rounds.committed_count >= rounds)
        try:
            yield running
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_status_says_in_words_what_the_run_waits_for(tmp_path):
    async with syncer(tmp_path) as running:
        text = await ctl(running, "status")
        assert "test · initializing" in text
        assert "waiting for learners to join" in text
        assert "no learner has joined yet" in text


async def test_status_learners_and_rounds_of_a_run(tmp_path):
    async with training(tmp_path) as running:
        text = await ctl(running, "status")
        assert "test · running" in text
        for words in ("goodput", "token goodput", "participation", "uptime", "2 live of 2 registered"):
            assert words in text
        assert len(text.splitlines()) < 24

        status = json.loads(await ctl(running, "status", "--json"))
        assert status["run"]["phase"] == "running"
        assert status["run"]["config_values"]["fragments.count"] == "4"
        assert [learner["learner_id"] for learner in status["learners"]] == ["a", "b"]

        learners = json.loads(await ctl(running, "learners", "--json"))["learners"]
        assert learners[0]["state"] == "live"
        assert learners[0]["step_seconds"] == pytest.approx(0.02)
        assert "tokens/s" in await ctl(running, "learners")

        rounds = json.loads(await ctl(running, "rounds", "--json", "--limit", "3"))["rounds"]
        assert len(rounds) == 3
        assert rounds[0]["round"] > rounds[1]["round"]
        everything = json.loads(await ctl(running, "rounds", "--json", "--limit", "1000"))["rounds"]
        assert [item["round"] for item in everything] == list(range(everything[0]["round"], 0, -1))
        committed = next(item for item in everything if item["state"] == "committed")
        assert committed["members"]
        assert committed["version"]["number"] > 1
        assert "global step" in await ctl(running, "rounds")


async def test_pause_resume_finish(tmp_path):
    async with training(tmp_path, "a") as running:
        assert "test is paused: for a look" in await ctl(running, "pause", "--reason", "for a look")
        assert json.loads(await ctl(running, "pause", "--json"))["run"]["phase"] == "paused"
        assert "test is running" in await ctl(running, "resume")
        assert "test is finish" in await ctl(running, "finish", "--reason", "enough")
        await until(running, lambda: machine_of(running).phase is RunPhase.FINISHED)
        assert "WRONG_STATE" in await ctl(running, "pause", code=4)
        assert json.loads(await ctl(running, "finish", "--json"))["run"]["phase"] == "finished"


@pytest.mark.parametrize("below_quorum", ["wait", "degrade"])
async def test_finishing_with_too_few_learners_says_what_is_lost(tmp_path, below_quorum):
    config = config_of(
        quorum={"minimum": 3, "below_quorum": below_quorum},
        deadlines={"drain_seconds_max": 0.5},
    )
    async with syncer(tmp_path, config) as running:
        one = ProtocolLearner(str(running.addresses.data), "a", config.to_policy(), Script())
        task = asyncio.create_task(one.run())
        await until(running, lambda: machine_of(running).phase is RunPhase.RUNNING)
        text = await ctl(running, "finish")
        expected = "only 1 of 3 learners that a round needs (quorum.minimum) are live, 2 too few"
        assert (expected in text) is (below_quorum == "wait")
        again = await ctl(running, "finish")
        assert expected not in again
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_two_losses_have_names_and_an_evaluation_has_its_step(tmp_path):
    async with syncer(tmp_path) as running:
        machine = machine_of(running)
        machine.evaluation = {"loss": 2.0, "bits_per_byte": 1.5}
        machine.evaluation_global_step = 1024
        text = await ctl(running, "status")
        assert "evaluated at step 1,024:   held-out loss 2   bits per byte 1.5" in text
        _, page = await fetch(running, "")
        assert "held-out loss" in page
        assert json.loads((await fetch(running, "status.json"))[1])["run"]["evaluation_global_step"] == 1024


async def test_pages_of_learners_hold_together(tmp_path):
    async with syncer(tmp_path) as running:
        links = [Link(str(running.addresses.data), f"l{index}") for index in range(5)]
        for link in links:
            await link.join()
        async with grpc.aio.insecure_channel(str(running.addresses.admin)) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            names, token = [], ""
            while True:
                answer = await stub.ListLearners(admin_pb2.ListLearnersRequest(page_size=2, page_token=token))
                names += [learner.learner_id for learner in answer.learners]
                if not (token := answer.next_page_token):
                    break
            assert names == [f"l{index}" for index in range(5)]
            for wrong in ({"page_size": 1001}, {"page_size": -1}, {"page_token": "x"}):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.ListLearners(admin_pb2.ListLearnersRequest(**wrong))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for link in links:
            await link.close()


def test_without_a_syncer_it_says_so_and_exits_with_3():
    result = CliRunner().invoke(app, ["status", "--address", "127.0.0.1:1"])
    assert result.exit_code == 3
    assert "no answer from the syncer" in result.stderr
    assert "DECOUPLED_DILOCO_ADMIN_ADDRESS" in result.stderr


@pytest.mark.parametrize(
    ("served", "called", "words"),
    [
        (["tls_certificate", "tls_key"], [], "speaks TLS and this call was plaintext: give --tls-ca"),
        ([], ["--tls-ca", str(TLS / "authority.pem")], "speaks plaintext and this call was TLS: leave out --tls-ca"),
        (["tls_certificate", "tls_key"], ["--tls-system-roots"], "is not signed by the authorities given here"),
        (
            ["tls_certificate", "tls_key", "tls_client_ca"],
            ["--tls-ca", str(TLS / "authority.pem"), "--tls-server-name", "syncer.test"],
            "give --tls-certificate FILE and --tls-key FILE",
        ),
    ],
)
async def test_ends_that_do_not_agree_on_tls_are_told_so(tmp_path, served, called, words):
    files = {
        "tls_certificate": TLS / "server.pem",
        "tls_key": TLS / "server.key",
        "tls_client_ca": TLS / "authority.pem",
    }
    async with syncer(tmp_path, **{name: files[name] for name in served}) as running:
        text = await ctl(running, "status", *called, code=3)
    assert words in text
    assert "is this its admin port" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "--address", "nowhere"], "host:port"),
        (["status", "--address", "10.0.0.1:50052"], "--insecure"),
        (["status", "--tls-ca", "/nowhere/ca.pem"], "there is no such file"),
        (["status", "--tls-certificate", "/nowhere/c.pem"], "are needed together"),
        (["status", "--no-such-flag"], "No such option"),
        (["rounds", "--limit", "0"], "limit"),
    ],
)
def test_a_command_line_that_cannot_be_used_exits_with_2(arguments, words):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_the_address_comes_from_the_environment_too():
    result = CliRunner().invoke(app, ["status"], env={"DECOUPLED_DILOCO_ADMIN_ADDRESS": "127.0.0.1:2"})
    assert result.exit_code == 3
    assert "127.0.0.1:2" in result.stderr


async def test_the_page_its_figures_and_the_metrics(tmp_path):
    async with training(tmp_path) as running:
        code, page = await fetch(running, "")
        assert code == 200
        assert "http://" not in page
        assert "https://" not in page

        code, text = await fetch(running, "status.json")
        status = json.loads(text)
        assert status["run"]["learners_live_count"] == 2
        assert set(status["run"]["goodput"]) >= {"goodput", "token_goodput", "participation", "uptime"}
        assert status["rounds"][0]["reason"]

        code, metrics = await fetch(running, "metrics")
        assert code == 200
        assert 'decoupled_diloco_syncer_rounds_total{outcome="committed"}' in metrics
        assert 'decoupled_diloco_syncer_learner_live{learner="a"} 1.0' in metrics

        assert await fetch(running, "healthz") == (200, "ok\n")
        assert await fetch(running, "readyz") == (200, "ok\n")
        assert (await fetch(running, "nothing"))[0] == 404


async def test_a_driver_that_hangs_is_not_alive(tmp_path):
    async with syncer(tmp_path) as running:
        running.serving.driver.turned_at -= 100
        code, text = await fetch(running, "healthz")
        assert code == 503
        assert "the driver has not come round for 100 s" in text


async def test_both_ports_answer_health_and_reflection(tmp_path):
    async with syncer(tmp_path) as running:
        for address, service in (
            (running.addresses.data, "decoupled_diloco.v1.SyncerService"),
            (running.addresses.admin, "decoupled_diloco.v1.AdminService"),
        ):
            async with grpc.aio.insecure_channel(str(address)) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                for asked in ("", service, "liveness"):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=asked))
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
                listing = reflection_pb2.ServerReflectionRequest(list_services="")
                call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([listing]))
                names = {entry.name for entry in (await call.read()).list_services_response.service}
                assert service in names
                call.cancel()
