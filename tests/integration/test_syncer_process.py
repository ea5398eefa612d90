"""The syncer as a process: signals, exit codes, and what it says about settings that cannot be used."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.config import ConfigError
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.syncers import syncer

ROOT = Path(__file__).resolve().parents[2]
TLS = ROOT / "tests" / "data" / "tls"
FREE_PORTS = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]


def start(folder, *arguments):
    command = [sys.executable, "-m", "syncer_service", "--log-format", "json", "--output-dir", str(folder)]
    command += ["--state-dir", f"{folder}-state", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def read_until(process, event):
    """The log line of an event."""
    for line in process.stderr:
        entry = json.loads(line)
        if entry["event"] == event:
            return entry
    raise AssertionError(f"{event} never came")


@pytest.fixture
def processes():
    started = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def test_sigterm_ends_it_cleanly_and_tells_where_the_page_is(tmp_path, processes):
    process = start(tmp_path, *FREE_PORTS)
    processes.append(process)
    hint = read_until(process, "no_run_file")
    assert 'preset "small"' in hint["reason"]
    ready = read_until(process, "syncer_ready")
    assert ready["page"].startswith("http://127.0.0.1:")
    assert ready["waits_for"] == "learners"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    rest = process.stderr.read()
    assert '"event": "syncer_stops"' in rest
    assert "Traceback" not in rest


def test_a_run_ends_with_exit_code_0_although_nobody_says_so(tmp_path, processes):
    arguments = ["--set", "run.total_steps=8", "--set", "fragments.interval_steps=8", "--set", "fragments.count=4"]
    process = start(tmp_path, *FREE_PORTS, *arguments)
    processes.append(process)
    address = read_until(process, "syncer_ready")["learners"]

    async def train():
        await asyncio.wait_for(ProtocolLearner(address, "a", Policy(), Script()).run(), 30)

    asyncio.run(train())
    assert process.wait(20) == 0
    rest = process.stderr.read()
    assert '"event": "run_complete"' in rest
    assert "Traceback" not in rest
    assert {path.name for path in tmp_path.iterdir()} == {"model.safetensors", "run_summary.json"}


def test_a_port_in_use_is_one_paragraph_and_exit_code_2(tmp_path, processes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(tmp_path, *FREE_PORTS, "--admin-listen", f"127.0.0.1:{port}")
        processes.append(process)
        assert process.wait(20) == 2
    paragraph = process.stderr.read().splitlines()[-1]
    assert "syncer.admin_listen" in paragraph
    assert f"another process already listens on port {port}" in paragraph


@pytest.mark.parametrize("setting", ["listen", "admin_listen", "http_listen"])
async def test_every_port_says_which_setting_to_change(tmp_path, setting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"syncer.{setting} = .*another process already listens on port {port}"):
            async with syncer(tmp_path, **{setting: f"127.0.0.1:{port}"}):
                pass


@pytest.mark.parametrize("path", ["/proc/x", "/dev/full", "pyproject.toml/output"])
def test_an_output_directory_that_cannot_be_used_is_one_paragraph_and_exit_code_2(processes, path):
    process = start(path, *FREE_PORTS)
    processes.append(process)
    assert process.wait(20) == 2
    *before, paragraph = process.stderr.read().splitlines()
    assert all('"no_run_file"' in line for line in before)
    assert f'syncer.output_dir = "{path}" (flag --output-dir): the model could not be written there' in paragraph


def test_files_that_cannot_be_used_are_named_with_where_they_were_written(tmp_path, processes):
    process = start(tmp_path, *FREE_PORTS, "--tls-certificate", "/nowhere.pem", "--tls-key", str(TLS / "server.key"))
    processes.append(process)
    assert process.wait(20) == 2
    paragraph = process.stderr.read().splitlines()[-1]
    assert 'syncer.tls_certificate = "/nowhere.pem" (flag --tls-certificate): there is no such file' in paragraph


async def test_files_that_do_not_belong_together_are_named(tmp_path):
    with pytest.raises(ConfigError, match="is not the key of that certificate"):
        async with syncer(tmp_path, tls_certificate=TLS / "server.pem", tls_key=TLS / "caller.key"):
            pass


async def test_with_tls_both_grpc_ports_are_encrypted(tmp_path):
    files = {"tls_certificate": TLS / "server.pem", "tls_key": TLS / "server.key"}
    credentials = grpc.ssl_channel_credentials((TLS / "authority.pem").read_bytes())
    options = (("grpc.ssl_target_name_override", "syncer.test"),)
    health = health_pb2.HealthCheckRequest()
    async with syncer(tmp_path, **files) as running:
        for address in (str(running.addresses.data), str(running.addresses.admin)):
            async with grpc.aio.secure_channel(address, credentials, options) as channel:
                answer = await health_pb2_grpc.HealthStub(channel).Check(health, timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            async with grpc.aio.insecure_channel(address) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await health_pb2_grpc.HealthStub(channel).Check(health, timeout=5)
