"""What a learner itself serves: metrics in plain HTTP, and the peer service that is not there yet."""

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
from decoupled_diloco.v1.peer_pb2_grpc import PeerServiceStub
from decoupled_diloco.wire.status import from_rpc_error
from learner_service.metrics import LearnerMetrics, served
from learner_service.peer import start_peer_server
from tests.integration.learner_threads import Trainee, eventually, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return f"127.0.0.1:{opened.getsockname()[1]}"


async def test_a_peer_is_told_to_go_on_without_the_optimizer_state(tmp_path):
    address = free_address()
    config = config_of(run={"total_steps": 0})
    async with syncer(tmp_path, config) as running:
        a = Trainee("a", start_values(1), step_seconds=0.01)
        training = asyncio.create_task(train(running, config, a, peer_listen=address))
        await eventually(lambda: a.step_count > 2)
        assert machine_of(running).membership.learners["a"].peer_address == address
        async with grpc.aio.insecure_channel(address) as channel:
            call = PeerServiceStub(channel).DownloadOptimizerState(peer_pb2.DownloadOptimizerStateRequest(fragment=1))
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call.read()
        error = from_rpc_error(failed.value)
        assert isinstance(error, PeerError)
        assert error.reason is Reason.UNIMPLEMENTED
        a.session.drain("enough")
        await training


async def test_a_port_in_use_is_named_with_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"learner\.peer_listen = .*another process already listens"):
            await start_peer_server(parse_address(address), None, "learner.peer_listen")
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
