import json

import numpy as np
import optax
import pytest

from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments
from decoupled_diloco.arrays.tree import ParameterTree
from learner_service.optimizer_snapshot import SnapshotError, SnapshotWriter, read_snapshot, snapshot_path
from learner_service.workload import default_merge_rule

PARAMS = {"a": np.ones((6, 5), np.float32), "b": np.ones(4, np.float32)}


def fragments_of(optimizer=None):
    schema = ParameterTree(PARAMS, default_merge_rule).schema
    return OptimizerFragments(PARAMS, fragment_schema(schema, 2), (optimizer or optax.adam(1.0)).init(PARAMS))


def written(path, seed=0):
    fragments, generator = fragments_of(), np.random.default_rng(seed)
    writer = SnapshotWriter(path, "a", "run", "schema", fragments)
    payloads = [generator.bytes(fragments.payload_bytes(part)) for part in range(fragments.part_count)]
    for payload in payloads:
        writer.add(np.frombuffer(payload, np.uint8))
    writer.commit()
    writer.discard()
    return payloads


def read(path, learner="a", run="run", schema="schema", fragments=None):
    return read_snapshot(path, learner, run, schema, fragments or fragments_of())


def test_what_was_written_is_read_and_the_newer_one_replaces_the_older(tmp_path):
    path = snapshot_path(tmp_path / "made", "a")
    for seed in (1, 2):
        payloads = written(path, seed)
        assert [payload.tobytes() for payload in read(path)] == payloads
    assert list(path.parent.iterdir()) == [path]


def test_an_unfinished_one_leaves_the_older_one_and_nothing_else(tmp_path):
    path = snapshot_path(tmp_path, "a")
    payloads = written(path)
    writer = SnapshotWriter(path, "a", "run", "schema", fragments_of())
    writer.add(np.zeros(3, np.uint8))
    writer.discard()
    assert [payload.tobytes() for payload in read(path)] == payloads
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"learner": "b"}, "learner"),
        ({"run": "other"}, "run_id"),
        ({"schema": "other"}, "schema_digest"),
        ({"fragments": fragments_of(optax.sgd(0.1, momentum=0.9))}, "entries"),
    ],
)
def test_a_foreign_one_is_refused(tmp_path, asked, field):
    path = snapshot_path(tmp_path, "a")
    written(path)
    with pytest.raises(SnapshotError, match=f"its {field} is not this learner's"):
        read(path, **asked)


def test_every_torn_and_every_rotten_one_is_refused(tmp_path):
    path = snapshot_path(tmp_path, "a")
    written(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(SnapshotError):
            read(path)
    generator = np.random.default_rng(0)
    for place in generator.integers(0, len(whole), 200):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(SnapshotError):
            read(path)


def test_an_index_that_lies_is_refused(tmp_path):
    path = snapshot_path(tmp_path, "a")
    for index in ([], {"digests": None}, {"learner": "a", "run_id": "run", "schema_digest": "schema"}):
        text = json.dumps(index).encode()
        path.write_bytes(text + len(text).to_bytes(8, "little") + b"DDOPT001")
        with pytest.raises(SnapshotError):
            read(path)


def test_none_and_an_unreadable_one_are_told_apart(tmp_path):
    with pytest.raises(SnapshotError, match="there is no snapshot"):
        read(tmp_path / "a.optimizer")
    with pytest.raises(SnapshotError, match="cannot be read"):
        read(tmp_path)
