"""The safetensors format as the format's own library writes and reads it, whole, sharded, remote and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decoupled_diloco.safetensors_file import (
    INDEX_FILE,
    SafetensorsError,
    SafetensorsFile,
    SafetensorsFolder,
    write_safetensors,
)

TENSORS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "brain": np.arange(6).reshape(3, 2).astype(ml_dtypes.bfloat16),
    "counts": np.arange(5, dtype=np.int32),
    "scalar": np.array(2.5, np.float32),
    "nothing": np.zeros((0, 3), np.float32),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"made_by": "a test"})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("name", TENSORS)
def test_what_the_library_writes_is_read(file: Path, name: str) -> None:
    opened = SafetensorsFolder(str(file))
    assert opened.metadata == {"made_by": "a test"}
    assert opened.tensors[name].shape == TENSORS[name].shape
    assert opened.tensors[name].dtype == TENSORS[name].dtype.name
    read = opened.read(name)
    assert read.dtype == TENSORS[name].dtype
    np.testing.assert_array_equal(read, TENSORS[name])
    assert not read.flags.writeable


@pytest.mark.parametrize("index", [(1,), (slice(1, 3),), (slice(None), 2), (slice(0, 2), slice(1, 3)), (2, 1)])
def test_a_part_of_a_tensor(file: Path, index: tuple[int | slice, ...]) -> None:
    np.testing.assert_array_equal(SafetensorsFile(str(file)).read("matrix", index), TENSORS["matrix"][index])


def test_what_is_written_is_what_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.safetensors"
    kinds = {name: (array.dtype, array.shape) for name, array in TENSORS.items()}
    write_safetensors(path, kinds, reversed(TENSORS.items()), {"made_by": "us"})
    read = load_file(path)
    assert read.keys() == TENSORS.keys()
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(read[name], array)
    assert SafetensorsFile(str(path)).metadata == {"made_by": "us"}
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_file_gets_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    kinds = {name: (np.dtype(np.float32), (2,)) for name in "ab"}
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="tensor 'b' is missing"):
        write_safetensors(path, kinds, [("a", np.ones(2))], {})
    with pytest.raises(ValueError, match=r"tensor 'a' of shape \(3,\) comes twice, or should have shape \(2,\)"):
        write_safetensors(path, kinds, [("a", np.ones(3))], {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = {"model-1-of-2.safetensors": ["matrix", "half"], "model-2-of-2.safetensors": ["brain", "scalar"]}
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tmp_path


def test_a_folder_with_shards(folder: Path) -> None:
    opened = SafetensorsFolder(str(folder))
    assert sorted(opened.tensors) == ["brain", "half", "matrix", "scalar"]
    for name in opened.tensors:
        np.testing.assert_array_equal(opened.read(name), TENSORS[name])


def test_a_folder_without_an_index_has_one_file(file: Path) -> None:
    np.testing.assert_array_equal(SafetensorsFolder(str(file.parent)).read("matrix"), TENSORS["matrix"])


def test_any_url(folder: Path, file: Path) -> None:
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.pipe_file(f"/bucket/model/{path.name}", path.read_bytes())
    opened = SafetensorsFolder("memory://bucket/model")
    np.testing.assert_array_equal(opened.read("matrix", (slice(1, 2),)), TENSORS["matrix"][1:2])
    np.testing.assert_array_equal(opened.read("brain"), TENSORS["brain"])
    store.rm("/bucket/model/model-2-of-2.safetensors")
    with pytest.raises(SafetensorsError, match="memory://bucket/model/model-2-of-2.safetensors cannot be read"):
        opened.read("brain")
    with pytest.raises(SafetensorsError, match="no-such-scheme://x.safetensors cannot be read"):
        SafetensorsFolder("no-such-scheme://x.safetensors")


def header_of(tensors: dict[str, object]) -> bytes:
    header = json.dumps(tensors).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it has 0 bytes"),
        (b"\1", "it has 1 bytes"),
        (b"\xff" * 20, "and its header would take"),
        (header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), "would end at byte"),
        (header_of({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}) + b"1234", "cannot take 4 bytes"),
        (header_of({"a": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
        (header_of({"a": 3}), "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ((2).to_bytes(8, "little") + b"{ ", "not a safetensors file"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorsError) as caught:
        SafetensorsFile(str(path))
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_what_is_not_there(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(SafetensorsError, match="cannot be read: No such file or directory"):
        SafetensorsFolder(str(tmp_path / "absent.safetensors"))
    with pytest.raises(SafetensorsError, match=f"has neither {INDEX_FILE} nor model.safetensors"):
        SafetensorsFolder(str(tmp_path / "absent"))
    (folder / "model-1-of-2.safetensors").unlink()
    with pytest.raises(SafetensorsError, match="model-1-of-2.safetensors cannot be read"):
        SafetensorsFolder(str(folder))
    save_file({"matrix": TENSORS["matrix"]}, folder / "model-1-of-2.safetensors")
    with pytest.raises(SafetensorsError, match="'half' .and 0 more tensors. is not in the file that"):
        SafetensorsFolder(str(folder))
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(SafetensorsError, match="is no index of a model"):
        SafetensorsFolder(str(folder))


def test_a_type_that_numpy_does_not_have_is_listed_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_of({"a": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}) + b"12")
    opened = SafetensorsFolder(str(path))
    assert opened.tensors["a"].dtype == "F8_E4M3"
    with pytest.raises(SafetensorsError, match="tensor 'a' is of type F8_E4M3"):
        opened.read("a")
