"""`syncerctl convert`: safetensors and Orbax trees, there and back, and what it says where it cannot."""

from __future__ import annotations

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from syncerctl.commands import app
from syncerctl.orbax_tree import OrbaxTree, write_orbax

TENSORS = {
    "decoder/layers/kernel": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "decoder/norm": np.linspace(-1, 1, 4, dtype=np.float32),
    "embedding": np.arange(8, dtype=np.float32).reshape(2, 4) + np.float32(0.1),
}
MAP = """
format = 1
ignore = ["step"]
[[tensor]]
file = "decoder/layers/kernel"
run = "layer_{layer}/kernel"
file_axis = 1
layout = "a b -> b a"
[[tensor]]
file = "{name...}"
run = "{name...}"
"""


def convert(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"run_id": "night"})
    return tmp_path / "model.safetensors"


@pytest.fixture
def name_map(tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text(MAP)
    return tmp_path / "mine.toml"


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def arrays_of(tree: OrbaxTree) -> dict[str, np.ndarray]:
    return {name: tree.read(name) for name in tree.tensors}


def test_to_orbax_and_back_to_the_bit(ours: Path, tmp_path: Path) -> None:
    said = convert(ours, tmp_path / "tree")
    assert said == f"3 tensors of {ours} written to {tmp_path / 'tree'} in float32\n"
    assert_same(arrays_of(OrbaxTree(str(tmp_path / "tree"))), TENSORS)
    convert(tmp_path / "tree", tmp_path / "again.safetensors")
    assert_same(load_file(tmp_path / "again.safetensors"), TENSORS)


def test_other_jax_programs_read_the_tree(ours: Path, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    convert(ours, tmp_path / "tree")
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "tree")
    np.testing.assert_array_equal(tree["decoder"]["layers"]["kernel"], TENSORS["decoder/layers/kernel"])


def test_by_a_map_and_back(ours: Path, tmp_path: Path, name_map: Path) -> None:
    write_orbax(str(tmp_path / "tree"), TENSORS | {"step": np.array(7)})
    convert(tmp_path / "tree", tmp_path / "run.safetensors", "--map", name_map)
    run = load_file(tmp_path / "run.safetensors")
    assert sorted(run) == ["decoder/norm", "embedding", "layer_0/kernel", "layer_1/kernel", "layer_2/kernel"]
    np.testing.assert_array_equal(run["layer_1/kernel"], TENSORS["decoder/layers/kernel"][:, 1].T)
    convert(tmp_path / "run.safetensors", tmp_path / "out", "--map", name_map, "--export")
    assert_same(arrays_of(OrbaxTree(str(tmp_path / "out"))), TENSORS)
    convert(tmp_path / "run.safetensors", tmp_path / "out.safetensors", "--map", name_map, "--export", "--like", ours)
    assert_same(load_file(tmp_path / "out.safetensors"), TENSORS)


def test_bfloat16_if_asked(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "tree", "--dtype", "bfloat16")
    halved = {name: array.astype(ml_dtypes.bfloat16) for name, array in TENSORS.items()}
    assert_same(arrays_of(OrbaxTree(str(tmp_path / "tree"))), halved)
    convert(tmp_path / "tree", tmp_path / "half.safetensors", "--dtype", "bfloat16")
    assert_same(load_file(tmp_path / "half.safetensors"), halved)


def test_a_step_of_a_checkpoint_manager(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    for item, folder in ((None, "plain"), ("items", "composite")):
        with ocp.CheckpointManager(tmp_path / folder) as manager:
            saved = ocp.args.PyTreeSave({"a": [np.ones(3, np.float32), {"b": np.zeros(2, np.float32)}]})
            manager.save(20, args=saved if item is None else ocp.args.Composite(items=saved))
        tree = OrbaxTree(str(tmp_path / folder / "20"))
        assert_same(arrays_of(tree), {"a/0": np.ones(3, np.float32), "a/1/b": np.zeros(2, np.float32)})
    said = convert(tmp_path / "plain", tmp_path / "m.safetensors", code=2)
    assert f"it has the steps 20: give one of them, such as {tmp_path / 'plain' / '20'}" in said


def test_what_does_not_fit_is_said_and_nothing_is_written(ours: Path, tmp_path: Path) -> None:
    other = {"embedding": np.zeros((3, 4), np.float32), "head": np.zeros(2, np.float32)}
    save_file(other, tmp_path / "other.safetensors")
    said = convert(ours, tmp_path / "new.safetensors", "--like", tmp_path / "other.safetensors", code=2)
    for words in (
        "tensor 'head' is missing in the file",
        "tensor 'embedding' has shape (2, 4), from which 'embedding' of shape (3, 4) cannot be made",
        "tensor 'decoder/norm' of shape (4,) in the file is not used",
    ):
        assert words in said
    assert not (tmp_path / "new.safetensors").exists()


def test_wrong_places_and_flags(ours: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert f"{absent} is neither a safetensors file or folder nor an Orbax tree" in convert(absent, ours, code=2)
    assert "--dtype int8: must be one of float32, bfloat16" in convert(ours, absent, "--dtype", "int8", code=2)
    assert "there is no name map 'gema'" in convert(ours, absent, "--map", "gema", code=2)
    assert "local disks only" in convert(ours, "gs://bucket/model.safetensors", code=2)
    convert(ours, absent)
    assert f"{absent} cannot be written as an Orbax tree" in convert(ours, absent, code=2)
    save_file({"a": TENSORS["embedding"], "a/b": TENSORS["embedding"]}, ours)
    assert "would lie below another tensor" in convert(ours, tmp_path / "tree", code=2)


def test_without_orbax_it_says_what_to_install(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    said = convert(ours, tmp_path / "tree", code=2)
    assert "Orbax trees need the learner extra, of which orbax.checkpoint is not installed here" in said
    assert "pip install 'decoupled-diloco[learner]'" in said
    convert(ours, tmp_path / "copy.safetensors")  # needs no Orbax
    assert_same(load_file(tmp_path / "copy.safetensors"), TENSORS)
