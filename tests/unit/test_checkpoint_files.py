"""Checkpoints as files: on a local disk and behind an fsspec URL, whole, damaged and half written."""

import json
import os
import uuid

import numpy as np
import pytest

from decoupled_diloco.arrays.digest import state_digest, vector_digest
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.checkpoint_files import Cut, read_manifest
from syncer_service.checkpoint_folder import CheckpointFolder
from syncer_service.checkpoint_storage import PIECE_BYTES, check_url, open_folder
from syncer_service.store.interface import FragmentCommit, RunModel
from syncer_service.store.records import DamageError, DamageKind

MODEL = RunModel({"tensors": [{"name": "a", "shape": [3]}]}, {"tokenizer": "bytes"}, "alpha")


def cut_of(seed=0, run_id="test", step=5, sizes=(8, 5)):
    generator = np.random.default_rng(seed)
    machine = SyncerMachine(Policy(fragment_count=len(sizes)))
    commits = {}
    for fragment, size in enumerate(sizes):
        theta, momentum, residual = (generator.normal(size=size).astype(np.float32) for _ in range(3))
        version = Version(1, seed + 2, vector_digest(theta))
        commits[fragment] = FragmentCommit(fragment, version, step, FragmentState(theta, momentum, residual))
    machine.versions = [commit.version for commit in commits.values()]
    machine.global_step = step
    machine.rounds.committed_count = step
    return Cut(run_id, machine.run_state(), commits, MODEL, {"run.id": json.dumps(run_id)})


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "a" / "b") if request.param == "local" else f"memory://checkpoints-{uuid.uuid4().hex}/deep"


def test_a_checkpoint_comes_back_bit_for_bit(url):
    cut = cut_of()
    written = CheckpointFolder(open_folder(url)).write(cut, "before-noon", "a reason", False)
    folder = CheckpointFolder(open_folder(url))
    assert folder.listing().found == (written,)
    manifest = folder.manifest("before-noon")
    assert manifest.state == cut.state
    assert manifest.model == MODEL
    assert (manifest.run_id, manifest.reason, manifest.automatic) == ("test", "a reason", False)
    states = folder.states(manifest)
    assert {f: state_digest(s) for f, s in states.items()} == {
        f: state_digest(c.state) for f, c in cut.fragments.items()
    }


def test_pieces_larger_than_one_are_whole(url):
    folder = open_folder(url)
    data = np.random.default_rng(1).bytes(2 * PIECE_BYTES + 7)
    folder.write("x/large", [memoryview(b"head"), memoryview(data)])
    assert folder.read("x/large") == b"head" + data
    with folder.opened("x/large") as descriptor:
        assert os.pread(descriptor, 9, PIECE_BYTES) == (b"head" + data)[PIECE_BYTES : PIECE_BYTES + 9]
    assert folder.names("x") == ["large"]
    assert folder.names("no") == []
    folder.remove("x/large")
    folder.remove("x/large")
    folder.remove_folder("x")
    assert folder.names("x") == []
    with pytest.raises(FileNotFoundError):
        folder.read("x/large")


def test_ids_of_its_own_say_where_the_run_stood_and_are_never_taken_twice(url):
    folder = CheckpointFolder(open_folder(url))
    ids = [folder.write(cut_of(step=step), "", "", True).id for step in (5, 5, 7, 5)]
    assert ids == ["t1-step-5", "t1-step-5-2", "t1-step-7", "t1-step-5-3"]
    assert folder.listing().found[0].id == "t1-step-7"
    with pytest.raises(PeerError) as refused:
        folder.write(cut_of(), "t1-step-7", "", False)
    assert refused.value.reason is Reason.WRONG_STATE


def test_without_its_manifest_it_is_none_and_is_tidied_away(url):
    storage = open_folder(url)
    folder = CheckpointFolder(storage)
    folder.write(cut_of(), "whole", "", True)
    folder.write(cut_of(), "partial", "", True)
    storage.remove("partial/manifest.json")
    storage.write("somebodys/notes.txt", [memoryview(b"not ours")])
    fresh = CheckpointFolder(storage)
    assert [manifest.id for manifest in fresh.listing().found] == ["whole"]
    assert fresh.remove_partial() == ["partial"]
    assert storage.names() == ["somebodys", "whole"]
    storage.write("again/fragment-0000.1.2.payload", [memoryview(b"left over")])
    assert fresh.write(cut_of(), "again", "", False).id == "again"


def test_an_attempt_that_fails_leaves_nothing(url, monkeypatch):
    storage = open_folder(url)
    write = storage.write

    def full(path, pieces):
        if path.endswith("manifest.json"):
            raise OSError("no room")
        write(path, pieces)

    monkeypatch.setattr(storage, "write", full)
    folder = CheckpointFolder(storage)
    with pytest.raises(OSError, match="no room"):
        folder.write(cut_of(), "one", "", False)
    assert storage.names() == []


def test_a_local_file_that_could_not_be_written_leaves_the_old_one(tmp_path):
    folder = open_folder(str(tmp_path))
    folder.write("file", [memoryview(b"old")])

    class Broken(list):
        def __iter__(self):
            yield memoryview(b"new")
            raise OSError("the disk fails")

    with pytest.raises(OSError, match="the disk fails"):
        folder.write("file", Broken())
    assert folder.names() == ["file"]
    assert folder.read("file") == b"old"


def damaged(url, name, change):
    storage = open_folder(url)
    CheckpointFolder(storage).write(cut_of(), "one", "", False)
    data = bytearray(storage.read(f"one/{name}"))
    storage.write(f"one/{name}", [memoryview(change(data))])
    folder = CheckpointFolder(storage)
    with pytest.raises(DamageError) as damage:
        folder.states(folder.manifest("one"))
    assert name in str(damage.value)
    return damage.value.kind


def flipped(data, place):
    data[place] ^= 1
    return bytes(data)


@pytest.mark.parametrize("place", [0, 40, 200, -1])
def test_one_bit_of_a_payload_is_noticed(url, place):
    assert damaged(url, "fragment-0001.1.2.payload", lambda data: flipped(data, place)) is DamageKind.CORRUPT


def test_a_payload_that_is_cut_or_missing_is_noticed(url):
    assert damaged(url, "fragment-0000.1.2.payload", lambda data: bytes(data[:-4])) is DamageKind.TORN
    storage = open_folder(url)
    storage.remove("one/fragment-0000.1.2.payload")
    folder = CheckpointFolder(storage)
    with pytest.raises(DamageError, match="is not there"):
        folder.states(folder.manifest("one"))


def test_another_fragments_payload_is_noticed(url):
    """Whole by its own digest, and named by a manifest with a digest of its own."""
    storage = open_folder(url)
    CheckpointFolder(storage).write(cut_of(), "one", "", False)
    other = CheckpointFolder(storage).write(cut_of(run_id="another"), "two", "", False)
    folder = CheckpointFolder(storage)
    name = "fragment-0000.1.2.payload"
    storage.write(f"one/{name}", [memoryview(storage.read(f"two/{name}"))])
    manifest = folder.manifest("one")
    mixed = type(manifest)(**{f: getattr(manifest, f) for f in manifest.__slots__} | {"files": other.files})
    with pytest.raises(DamageError, match="of run another") as damage:
        folder.states(mixed)
    assert damage.value.kind is DamageKind.FOREIGN


def test_a_copy_under_another_name_is_a_checkpoint_of_its_own(url):
    storage = open_folder(url)
    CheckpointFolder(storage).write(cut_of(), "one", "", True)
    for name in storage.names("one"):
        storage.write(f"kept/{name}", [memoryview(storage.read(f"one/{name}"))])
    payload = next(name for name in storage.names("one") if name.endswith(".payload"))
    storage.write(f"one/{payload}", [memoryview(b"damaged")])
    folder = CheckpointFolder(storage)
    assert {(m.id, m.automatic) for m in folder.listing().found} == {("one", True), ("kept", False)}
    assert len(folder.states(folder.manifest("kept"))) == 2
    with pytest.raises(DamageError, match=f"one/{payload}"):
        folder.states(folder.manifest("one"))
    folder.remove("one")
    assert [m.id for m in folder.listing().found] == ["kept"]


def test_a_manifest_that_was_changed_is_listed_as_unreadable(url):
    kind = damaged(url, "manifest.json", lambda data: bytes(data).replace(b'"global_step": 5', b'"global_step": 6'))
    assert kind is DamageKind.CORRUPT
    listing = CheckpointFolder(open_folder(url)).listing()
    assert listing.found == ()
    assert "another digest" in listing.unreadable[0]


def test_a_manifest_of_a_newer_release_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("syncer_service.checkpoint_files.FORMAT_VERSION", 2)
    storage = open_folder(str(tmp_path))
    CheckpointFolder(storage).write(cut_of(), "one", "", False)
    monkeypatch.undo()
    with pytest.raises(DamageError, match="format 2; this release reads up to 1"):
        read_manifest(storage, "one/")


def test_urls_are_checked_by_their_kind():
    assert check_url("memory://x") == "memory://x"
    assert check_url("runs/checkpoints") == "runs/checkpoints"
    with pytest.raises(ValueError, match="a path, or a URL of a kind that is installed here .*nowhere"):
        check_url("nowhere://x")
