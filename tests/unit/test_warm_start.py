"""A run that starts from a model in safetensors: every fragment to the bit, or everything that is wrong with it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from decoupled_diloco.arrays.fragments import fragment_schema, gather
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from decoupled_diloco.safetensors_file import INDEX_FILE
from syncer_service.export import MODEL_FILE, export_model
from syncer_service.first_parameters import check_first_parameters
from syncer_service.warm_start import SafetensorsSource, WarmStartError, check_start, open_safetensors

SCHEMA = Schema(
    [
        TensorSpec("embedding", (40, 6), "bfloat16", "avg"),
        TensorSpec("layers/kernel", (5, 4, 6), "float32", "rda", 1),
        TensorSpec("norm", (6,)),
        TensorSpec("scale", ()),
    ]
)
MAP = """
format = 1
[[tensor]]
file = "embed.weight"
run = "embedding"
[[tensor]]
file = "layers.{layer}.weight"
run = "layers/kernel"
layout = "out in -> in out"
run_axis = 1
[[tensor]]
file = "{name...}.weight"
run = "{name...}"
"""


def random_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {spec.name: generator.standard_normal(spec.shape, np.float32).reshape(spec.shape) for spec in SCHEMA.tensors}


def foreign(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same under the names and in the layout of MAP's file."""
    layers = {f"layers.{layer}.weight": tensors["layers/kernel"][:, layer].T.copy() for layer in range(4)}
    others = {f"{name}.weight": tensors[name] for name in ("norm", "scale")}
    return layers | others | {"embed.weight": tensors["embedding"]}


def started(location: Path, name_map: str, fragment_count: int) -> None:
    """Checks that every fragment starts with the bits of `random_tensors`."""
    source = open_safetensors(str(location), name_map, SCHEMA)
    for fragment in fragment_schema(SCHEMA, fragment_count).fragments:
        theta = source.theta(fragment)
        assert theta.dtype == np.float32
        assert theta.tobytes() == gather(fragment, random_tensors()).tobytes()
        assert theta.flags.writeable


@pytest.fixture
def name_map(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(MAP)
    return str(path)


@pytest.mark.parametrize("fragment_count", [1, 3, 9])
def test_from_what_a_run_exported(tmp_path: Path, fragment_count: int) -> None:
    fragmentation = fragment_schema(SCHEMA, 4)
    thetas = {each.index: gather(each, random_tensors()) for each in fragmentation.fragments}
    export_model(tmp_path, fragmentation, thetas, {})
    started(tmp_path / MODEL_FILE, "", fragment_count)
    started(tmp_path, "", fragment_count)


@pytest.mark.parametrize("fragment_count", [1, 3, 9])
def test_from_a_foreign_file_by_a_map(tmp_path: Path, name_map: str, fragment_count: int) -> None:
    save_file(foreign(random_tensors()), tmp_path / "model.safetensors")
    started(tmp_path / "model.safetensors", name_map, fragment_count)


def test_from_a_folder_with_shards(tmp_path: Path, name_map: str) -> None:
    tensors = foreign(random_tensors())
    weight_map = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    started(tmp_path, name_map, 5)


@settings(max_examples=30, deadline=None)
@given(fragment_count=st.integers(1, 46))
def test_any_number_of_fragments(tmp_path_factory: pytest.TempPathFactory, fragment_count: int) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-number"
    if not folder.exists():
        folder.mkdir()
        save_file(random_tensors(), folder / "model.safetensors")
    started(folder, "", fragment_count)


def test_no_more_than_a_fragment_and_a_part_of_a_tensor_is_in_memory(tmp_path: Path) -> None:
    """16 MiB of bfloat16 rows in eight fragments: a fragment is 4 MiB of float32."""
    schema = Schema([TensorSpec("embedding", (8192, 1024), "float32", "avg")])
    save_file({"embedding": np.ones((8192, 1024), ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(str(tmp_path), "", schema)
    fragments = fragment_schema(schema, 8).fragments
    tracemalloc.start()
    for fragment in fragments:
        assert source.theta(fragment).sum() == fragment.size
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.5 * 4 * fragments[0].size


def test_it_says_what_it_is(tmp_path: Path, name_map: str) -> None:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    ours = open_safetensors(str(tmp_path / "model.safetensors"), "", SCHEMA)
    assert ours.describe() == f"4 tensors of {tmp_path / 'model.safetensors'}, by the run's own names"
    save_file(foreign(random_tensors()), tmp_path / "model.safetensors")
    theirs = open_safetensors(str(tmp_path), name_map, SCHEMA)
    assert theirs.describe() == f"4 tensors of {tmp_path}, by name map {name_map}"


def test_everything_that_does_not_fit_at_once(tmp_path: Path, name_map: str) -> None:
    tensors = foreign(random_tensors()) | {"extra": np.zeros(2, np.float32), "norm.weight": np.zeros(7, np.float32)}
    del tensors["layers.2.weight"], tensors["scale.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WarmStartError) as caught:
        SafetensorsSource(str(tmp_path), name_map, SCHEMA)
    assert caught.value.problems == (
        "tensor 'layers.2.weight' is missing in the file, from which 'layers/kernel' should be made",
        "tensor 'scale.weight' is missing in the file, from which 'scale' should be made",
        "tensor 'norm.weight' has shape (7,), from which 'norm' of shape (6,) cannot be made: it would have shape (7,)",
        f"tensor 'extra' of shape (2,) in the file is not used by {name_map}; list it under ignore if nobody wants it",
    )
    assert str(caught.value).startswith(f'run.start_from = "{tmp_path}" cannot be used: tensor ')


def test_all_tensors_with_values_that_are_not_finite(tmp_path: Path, name_map: str) -> None:
    tensors = foreign(random_tensors())
    tensors["layers.1.weight"][0, 0] = np.nan
    tensors["scale.weight"] = np.array(1e300)
    tensors["norm.weight"][2:] = -np.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WarmStartError) as caught:
        open_safetensors(str(tmp_path), name_map, SCHEMA)
    layers, norm, scale = caught.value.problems
    assert layers.startswith("tensor 'layers/kernel' (made from 'layers.0.weight', 'layers.1.weight', ")
    assert layers.endswith("has 1 of 120 values that are not finite in float32")
    assert norm == "tensor 'norm' (made from 'norm.weight') has 4 of 6 values that are not finite in float32"
    assert scale == "tensor 'scale' (made from 'scale.weight') has 1 of 1 values that are not finite in float32"


def test_a_file_or_a_map_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WarmStartError, match="absent.safetensors cannot be read: No such file"):
        open_safetensors(str(tmp_path / "absent.safetensors"), "", SCHEMA)
    save_file(random_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(WarmStartError, match="there is no name map 'gema'"):
        open_safetensors(str(tmp_path), "gema", SCHEMA)


@pytest.mark.parametrize("location", ["xyz://bucket/run", "http://127.0.0.1:1/run"])
def test_a_place_that_cannot_be_reached(location: str) -> None:
    with pytest.raises(WarmStartError, match=f'run.start_from = "{location}" cannot be used: it cannot be read: '):
        check_first_parameters(location, "")


def test_what_is_known_before_there_is_a_schema(tmp_path: Path, name_map: str) -> None:
    save_file(random_tensors(), tmp_path / "model.safetensors")
    check_start(str(tmp_path), name_map)
    with pytest.raises(WarmStartError) as caught:
        check_start(str(tmp_path / "absent.safetensors"), "gema")
    file, chosen = caught.value.problems
    assert "absent.safetensors cannot be read" in file
    assert "there is no name map 'gema'" in chosen
