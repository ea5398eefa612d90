"""What a name map does to tensors: there and back to the bit, whole or in parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.arrays.layout import Layout, LayoutError, parse_layout
from decoupled_diloco.arrays.name_map import parse_name_map
from decoupled_diloco.arrays.planner import plan_tensors
from tests.numerics.array_source import ArraySource, converted, shapes_of


def numbered(*shape: int, start: int = 0) -> np.ndarray:
    """An array in which every element is another number."""
    return (start + np.arange(np.prod(shape, dtype=int))).astype(np.float32).reshape(shape)


def rule(text: str) -> str:
    return f"format = 1\n[[tensor]]\n{text}"


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, dict[str, int]]:
    """A layout of up to five axes, grouped at random on both sides, and the extents of its names."""
    names = list("abcde")[: draw(st.integers(1, 5))]

    def side() -> str:
        order = draw(st.permutations(names))
        groups: list[list[str]] = []
        for name in order:
            if groups and draw(st.booleans()):
                groups[-1].append(name)
            else:
                groups.append([name])
        return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)

    return parse_layout(f"{side()} -> {side()}"), {name: draw(st.integers(1, 4)) for name in names}


@given(layouts())
def test_a_layout_there_and_back_changes_nothing(drawn: tuple[Layout, dict[str, int]]) -> None:
    layout, sizes = drawn
    array = numbered(*layout.reversed().shape_after(sizes))
    there = layout.apply(array, sizes)
    assert there.shape == layout.shape_after(sizes)
    back = layout.reversed().apply(there, sizes)
    np.testing.assert_array_equal(back, array)
    assert parse_layout(layout.text) == layout


def sizes_or_reason(layout: Layout, before: tuple[int, ...], after: tuple[int, ...]) -> dict[str, int] | str:
    try:
        return layout.sizes({}, before, after)
    except LayoutError as error:
        return str(error)


@given(layouts())
def test_shapes_on_both_sides_never_contradict_the_extents(drawn: tuple[Layout, dict[str, int]]) -> None:
    layout, sizes = drawn
    before, after = layout.reversed().shape_after(sizes), layout.shape_after(sizes)
    found = sizes_or_reason(layout, before, after)
    if isinstance(found, str):
        assert "is not known" in found  # several names that no axis has for itself
    else:
        assert layout.reversed().shape_after(found) == before
        assert layout.shape_after(found) == after
    assert layout.sizes(sizes, before) == sizes


def test_a_layout_is_what_einsum_and_reshape_do() -> None:
    array = numbered(6, 5)
    layout = parse_layout("(head dim) width -> width head dim")
    sizes = layout.sizes({"dim": 2}, (6, 5))
    np.testing.assert_array_equal(layout.apply(array, sizes), array.T.reshape(5, 3, 2))


def test_rotary_halves_become_pairs() -> None:
    """What MaxText's Llama wants in place of the halves that Hugging Face's files have."""
    heads, half, width = 2, 3, 4
    array = numbered(heads * 2 * half, width)
    layout = parse_layout("(head two half) width -> width head (half two)")
    made = layout.apply(array, layout.sizes({"two": 2, "half": half}, array.shape))
    kernel = array.T.reshape(width, heads, 2 * half)
    first, second = kernel[..., :half], kernel[..., half:]
    np.testing.assert_array_equal(made, np.stack([first, second], -1).reshape(kernel.shape))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_layers_are_stacked_and_taken_apart_along_any_axis(axis: int) -> None:
    text = f'file = "layers.{{layer}}.w"\nrun = "layers/w"\nlayout = "out in -> in out"\nrun_axis = {axis}'
    name_map = parse_name_map(rule(text), "m")
    file = {f"layers.{layer}.w": numbered(2, 3, start=100 * layer) for layer in range(11)}
    run = converted(file, name_map)
    np.testing.assert_array_equal(run["layers/w"], np.stack([file[f"layers.{n}.w"].T for n in range(11)], axis))
    back = converted(run, name_map, exports=True)
    assert back.keys() == file.keys()
    assert all((back[name] == file[name]).all() for name in file)


def test_a_scanned_tensor_of_the_file_becomes_one_of_each_layer() -> None:
    text = 'file = "layers/q"\nrun = "layer_{layer:02}/q"\nlayout = "width head dim -> width (head dim)"\nfile_axis = 1'
    name_map = parse_name_map(f"format = 1\n[sizes]\ndim = 4\n[[tensor]]\n{text}", "m")
    file = {"layers/q": numbered(5, 3, 2, 4)}
    run = converted(file, name_map)
    assert list(run) == ["layer_00/q", "layer_01/q", "layer_02/q"]
    np.testing.assert_array_equal(run["layer_01/q"], file["layers/q"][:, 1].reshape(5, 8))
    np.testing.assert_array_equal(converted(run, name_map, exports=True)["layers/q"], file["layers/q"])


def test_a_list_of_the_file_is_joined_and_split_again() -> None:
    text = 'file = ["gate", "up"]\nrun = "both"\nlayout = "out in -> in out"\nrun_axis = 1\nparts = [1, 1]'
    name_map = parse_name_map(rule(text), "m")
    file = {"gate": numbered(4, 3), "up": numbered(4, 3, start=50)}
    run = converted(file, name_map)
    np.testing.assert_array_equal(run["both"], np.concatenate([file["gate"].T, file["up"].T], 1))
    back = converted(run, name_map, exports=True)
    assert all((back[name] == file[name]).all() for name in file)


def test_parts_of_other_sizes_follow_from_what_is_wanted() -> None:
    text = 'file = "layers.{n}.qkv"\nrun = ["q_{n}", "k_{n}", "v_{n}"]\nlayout = "out in -> in out"\nfile_axis = 0'
    name_map = parse_name_map(rule(text), "m")
    file = {"layers.3.qkv": numbered(8, 5)}
    wanted = {"q_3": (5, 4), "k_3": (5, 2), "v_3": (5, 2)}
    run = converted(file, name_map, wanted)
    assert shapes_of(run) == wanted
    np.testing.assert_array_equal(np.concatenate([run["q_3"], run["k_3"], run["v_3"]], 1), file["layers.3.qkv"].T)
    np.testing.assert_array_equal(converted(run, name_map, exports=True)["layers.3.qkv"], file["layers.3.qkv"])


def test_values_are_scaled_forwards_and_back() -> None:
    name_map = parse_name_map(rule('file = "a"\nrun = "b"\nmultiply = 4\nadd = -1.0'), "m")
    run = converted({"a": numbered(3)}, name_map)
    assert run["b"].tolist() == [-1.0, 3.0, 7.0]
    assert converted(run, name_map, exports=True)["a"].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_every_float_type_becomes_float32(dtype: str) -> None:
    import ml_dtypes

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    name_map = parse_name_map(rule('file = "a"\nrun = "b"'), "m")
    (made,) = converted({"a": np.array([1.5, -2.0], kind)}, name_map).values()
    assert made.dtype == np.float32
    assert made.tolist() == [1.5, -2.0]


PARTS = {
    "plain": 'file = "a"\nrun = "r"',
    "turned": 'file = "a"\nrun = "r"\nlayout = "x y z -> z x y"',
    "merged": 'file = "a"\nrun = "r"\nlayout = "x y z -> (x z) y"',
    "stacked": 'file = "s.{n}"\nrun = "r"\nrun_axis = 1',
    "scaled": 'file = "a"\nrun = "r"\nlayout = "x y z -> z y x"\nmultiply = 3.0\nadd = 1.0',
    "joined": 'file = ["a", "b"]\nrun = "r"\nrun_axis = 2',
}


@settings(max_examples=80)
@given(st.sampled_from(sorted(PARTS)), st.data())
def test_a_part_of_a_tensor_is_that_part(kind: str, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(3))
    arrays = {"a": numbered(*shape), "b": numbered(*shape, start=1000)}
    arrays |= {f"s.{number}": numbered(*shape, start=100 * number) for number in range(3)}
    used = {"stacked": {"s.0", "s.1", "s.2"}, "joined": {"a", "b"}}.get(kind, {"a"})
    source = ArraySource({name: array for name, array in arrays.items() if name in used})
    plan = plan_tensors(source.tensors, parse_name_map(rule(PARTS[kind]), "m"))["r"]
    whole = plan.read(source)
    axis = data.draw(st.integers(0, len(whole.shape) - 1))
    start = data.draw(st.integers(0, whole.shape[axis] - 1))
    stop = data.draw(st.integers(start + 1, whole.shape[axis]))
    part = plan.read(source, axis, start, stop)
    np.testing.assert_array_equal(part, whole.take(range(start, stop), axis))


@pytest.mark.parametrize(("kind", "axis"), [("plain", 0), ("turned", 1), ("scaled", 2), ("stacked", 1)])
def test_a_part_is_read_without_the_rest(kind: str, axis: int) -> None:
    arrays = {"a": numbered(4, 5, 6)} if kind != "stacked" else {f"s.{n}": numbered(4, 5) for n in range(6)}
    source = ArraySource(arrays)
    plan = plan_tensors(source.tensors, parse_name_map(rule(PARTS[kind]), "m"))["r"]
    part = plan.read(source, axis, 1, 2)
    assert source.elements_read == part.size
