"""Checkpoints and a mirror in an object store that speaks S3 over HTTP."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import fsspec
import pytest

from decoupled_diloco.arrays.digest import state_digest
from decoupled_diloco.core.errors import PeerError, Reason
from syncer_service.checkpoint_folder import CheckpointFolder
from syncer_service.checkpoint_storage import PIECE_BYTES, open_folder
from tests.integration.syncers import config_of, machine_of, syncer, until
from tests.integration.test_checkpoints import committed, figure, training
from tests.integration.test_mirror import caught_up, read
from tests.unit.test_checkpoint_files import cut_of

pytestmark = pytest.mark.slow


def answers(address):
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.fixture(scope="module")
def server():
    """Its address; an own process, as a real one would be."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None
            if answers(address):
                break
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        yield address
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.fixture
def bucket(server, monkeypatch, request):
    """A bucket of its own for each test."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = request.node.name.replace("_", "-")[:50].rstrip("-")
    system, _ = fsspec.core.url_to_fs(f"s3://{name}", skip_instance_cache=True)
    system.mkdir(name)
    return f"s3://{name}"


async def test_a_checkpoint_comes_back_and_goes(bucket):
    folder = CheckpointFolder(open_folder(f"{bucket}/run/checkpoints"))
    cut = cut_of(sizes=(3 * PIECE_BYTES // 4, 5))  # more than one part of an upload
    assert folder.listing().found == ()
    written = folder.write(cut, "first", "", False)
    folder.write(cut_of(seed=1), "second", "", True)
    fresh = CheckpointFolder(open_folder(f"{bucket}/run/checkpoints/"))
    assert {manifest.id for manifest in fresh.listing().found} == {"first", "second"}
    states = fresh.states(fresh.manifest("first"))
    assert {f: state_digest(s) for f, s in states.items()} == {
        f: state_digest(c.state) for f, c in cut.fragments.items()
    }
    assert fresh.manifest("first") == written
    fresh.remove("first")
    assert [manifest.id for manifest in folder.listing().found] == ["second"]
    with pytest.raises(FileNotFoundError):
        folder.manifest("first")


async def test_an_upload_that_breaks_off_leaves_the_old_object(bucket):
    folder = open_folder(bucket)
    folder.write("file", [memoryview(b"old")])

    class Broken(list):
        def __iter__(self):
            yield memoryview(os.urandom(2 * PIECE_BYTES))
            raise OSError("the network fails")

    for name in ("file", "new"):
        with pytest.raises(OSError, match="the network fails"):
            folder.write(name, Broken())
    assert folder.names() == ["file"]
    assert folder.read("file") == b"old"


async def test_a_run_rolls_back_to_a_checkpoint_in_the_store(tmp_path, bucket):
    async with training(tmp_path, checkpoint_url=f"{bucket}/checkpoints") as (running, team):
        await committed(running, 4)
        checkpoints = running.safekeeping.checkpoints
        manifest = await checkpoints.create("good")
        await committed(running, machine_of(running).rounds.committed_count + 8)
        await checkpoints.roll_back("good", "")
        assert [v.digest for v in machine_of(running).versions] == [v.digest for v in manifest.state.versions]
        await committed(running, machine_of(running).rounds.committed_count + 8)
        assert [learner.joins for learner in team] == [2, 2]
        data = bytearray(open_folder(f"{bucket}/checkpoints/good").read(manifest.files[0].name))
        data[-1] ^= 1
        open_folder(f"{bucket}/checkpoints/good").write(manifest.files[0].name, [memoryview(data)])
        with pytest.raises(PeerError) as damaged:
            await checkpoints.roll_back("good", "")
        assert damaged.value.reason is Reason.CORRUPT


async def test_a_mirror_in_the_store_brings_the_run_back(tmp_path, bucket):
    url, config = f"{bucket}/mirror", config_of()
    async with training(tmp_path / "one", config=config, mirror_url=url) as (running, _):
        await committed(running, 12)
        await until(running, lambda: figure(running, "mirror_copies_total") >= 3)
    manifest, _ = await asyncio.to_thread(read, url)
    async with syncer(tmp_path / "two", config, restore_from=url, mirror_url=url) as running:
        machine = machine_of(running)
        assert machine.rounds.committed_count == manifest.state.committed_count
        assert [v.digest for v in machine.versions] == [v.digest for v in manifest.state.versions]
        await caught_up(running)
        assert figure(running, "mirror_failures_total") == 0
