"""What a learner itself serves: metrics in plain HTTP, and its optimizer's state for peers."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

import grpc
import grpc.aio
import pytest

from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.v1 import peer_pb2
from decoupled_diloco.v1.peer_pb2_grpc import PeerServiceServicer, PeerServiceStub
from decoupled_diloco.wire.status import from_rpc_error
from learner_service.metrics import LearnerMetrics, served
from learner_service.peer import start_peer_server
from tests.integration.learner_threads import Trainee, eventually, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return f"127.0.0.1:{opened.getsockname()[1]}"


async def test_the_address_that_others_are_told(tmp_path):
    config = config_of(run={"total_steps": 0})
    told = free_address()
    async with syncer(tmp_path, config) as running:
        a, b = (Trainee(name, start_values(1), step_seconds=0.01) for name in "ab")
        training = asyncio.create_task(train(running, config, a, peer_listen="127.0.0.1:0"))
        elsewhere = asyncio.create_task(train(running, config, b, peer_listen=free_address(), peer_advertise=told))
        await eventually(lambda: min(a.step_count, b.step_count) > 2)
        addresses = {name: record.peer_address for name, record in machine_of(running).membership.learners.items()}
        assert parse_address(addresses["a"]).port > 0
        assert addresses["b"] == told
        a.session.drain("enough")
        b.session.drain("enough")
        await asyncio.gather(training, elsewhere)


async def test_a_peer_of_another_run_or_model_is_refused_in_words(tmp_path):
    address = free_address()
    config = config_of(run={"total_steps": 0})
    async with syncer(tmp_path, config) as running:
        a = Trainee("a", start_values(1), step_seconds=0.01)
        training = asyncio.create_task(train(running, config, a, peer_listen=address))
        await eventually(lambda: a.step_count > 2)
        for asked, reason, text in (
            ({"run_id": "other"}, Reason.RUN_MISMATCH, "this learner is in run 'test'"),
            ({"run_id": "test", "schema_digest": "00"}, Reason.SCHEMA_MISMATCH, "this learner's model has"),
            ({"learner_id": "a"}, Reason.WRONG_STATE, "asks itself"),
            ({"offset": -1}, Reason.INVALID_FIELD, "must be at least 0"),
        ):
            async with grpc.aio.insecure_channel(address) as channel:
                request = peer_pb2.DownloadOptimizerStateRequest(**asked)
                call = PeerServiceStub(channel).DownloadOptimizerState(request)
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await call.read()
            error = from_rpc_error(failed.value)
            assert isinstance(error, PeerError)
            assert (error.reason, text in error.text) == (reason, True), error
        a.session.drain("enough")
        await training


async def test_a_port_in_use_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"learner\.peer_listen = .*another process already listens"):
            await start_peer_server(parse_address(address), None, "learner.peer_listen", PeerServiceServicer())
        with (
            pytest.raises(ConfigError, match=r"learner\.http_listen = .*another process already listens"),
            served(LearnerMetrics("1").telemetry, address, "learner.http_listen"),
        ):
            pass


async def test_metrics_are_served_while_the_learner_lives():
    metrics, address = LearnerMetrics("1.2.3"), free_address()

    def fetch() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            text: str = answer.read().decode()
            return text

    with served(metrics.telemetry, address, "learner.http_listen"):
        metrics.detached(10.0)
        metrics.attached(12.5)
        text = await asyncio.to_thread(fetch)
    assert "decoupled_diloco_learner_detached_seconds_total 2.5" in text
    assert "decoupled_diloco_learner_attached 1.0" in text
    assert 'decoupled_diloco_learner_build_info{python="' in text
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(fetch)
