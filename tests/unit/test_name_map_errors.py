"""What is wrong with a name map, or with the tensors that it should fit, in words and all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.arrays.layout import LayoutError, parse_layout
from decoupled_diloco.arrays.name_map import NameMapError, parse_name_map, same_names
from decoupled_diloco.arrays.name_pattern import NamePattern, PatternError
from decoupled_diloco.arrays.planner import plan_tensors
from decoupled_diloco.arrays.tensor_plan import TensorInfo
from decoupled_diloco.name_maps import load_name_map, shipped_name_maps


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("layers.{layer}.w", "layers.12.w", {"layer": 12}),
        ("layers.{layer}.w", "layers.012.w", None),
        ("layer_{layer:02}/w", "layer_07/w", {"layer": 7}),
        ("layer_{layer:02}/w", "layer_123/w", {"layer": 123}),
        ("layer_{layer:02}/w", "layer_7/w", None),
        ("params/{rest...}", "params/a/b", {"rest": "a/b"}),
        ("a.b", "axb", None),
        ("norm", "norm", {}),
    ],
)
def test_patterns_match_what_they_write(text: str, name: str, values: dict[str, object] | None) -> None:
    assert NamePattern(text).match(name) == values
    if values is not None:
        assert NamePattern(text).fill(values) == name  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "layers.{}.w", "layers.{Layer}", "{a}{a}", "a}", "{a:2}"])
def test_what_is_no_pattern(text: str) -> None:
    with pytest.raises(PatternError):
        NamePattern(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("out in", "must have one ->"),
        ("a b -> a", "b on one side only"),
        ("a a -> a a", "a twice on one side"),
        ("a (b -> a b", "cannot be read from ' (b' on"),
        ("A -> A", "cannot be read"),
    ],
)
def test_what_is_no_layout(text: str, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("format = ", "is not valid TOML"),
        ("format = 2\n[[tensor]]\nfile='a'\nrun='a'", "format = 2; write format = 1"),
        ("format = 1", "has no [[tensor]]"),
        ("format = 1\ntensors = []\n[[tensor]]\nfile='a'\nrun='a'", "there is no tensors; did you mean tensor?"),
        ("format = 1\nignore = 'a'\n[[tensor]]\nfile='a'\nrun='a'", "ignore = 'a' has the wrong type"),
        ("format = 1\nignore = ['{']\n[[tensor]]\nfile='a'\nrun='a'", "ignore: '{' is no pattern"),
        ("format = 1\n[sizes]\nd = 0\n[[tensor]]\nfile='a'\nrun='a'", "sizes.d = 0; an extent is a whole number"),
        ("format = 1\n[alternatives]\nm = 'x'\n[[tensor]]\nfile='a'\nrun='a'", "alternatives.m = 'x'; give a list"),
        ("format = 1\n[[tensor]]\nfile='a'", "(file = 'a'): run must be given"),
        ("format = 1\n[[tensor]]\nfile='a'\nrun='a'\naxis=1", "there is no tensor.axis"),
        ("format = 1\n[[tensor]]\nfile='{n'\nrun='a'", "is no pattern of names"),
        ("format = 1\n[[tensor]]\nfile=[]\nrun='a'", "file = [] must be a name, or a list of names"),
        ("format = 1\n[[tensor]]\nfile='a.{n}'\nrun='a'", "run_axis must say along which axis"),
        ("format = 1\n[[tensor]]\nfile='a'\nrun='a.{n}'", "file_axis must say along which axis"),
        ("format = 1\n[[tensor]]\nfile='a'\nrun='a'\nrun_axis=0", "run_axis = 0 has no meaning"),
        ("format = 1\n[[tensor]]\nfile='a.{n}'\nrun='a'\nrun_axis=-1", "run_axis = -1 must be 0 or more"),
        ("format = 1\n[[tensor]]\nfile='a.{n}.{m}'\nrun='a'\nrun_axis=0", "along one axis only"),
        ("format = 1\n[[tensor]]\nfile=['a','b']\nrun=['a','b']\nrun_axis=0", "along one axis only"),
        ("format = 1\n[[tensor]]\nfile=['a.{n}','b']\nrun='a'\nrun_axis=0", "must have the same fields"),
        ("format = 1\n[[tensor]]\nfile='{n...}'\nrun='a'", "must be the same on both sides"),
        ("format = 1\n[[tensor]]\nfile=['a','b']\nrun='a'\nrun_axis=0\nparts=[1]", "parts = [1] must be whole numbers"),
        ("format = 1\n[[tensor]]\nfile='a'\nrun='a'\nmultiply=0", "multiply not 0"),
        ("format = 1\n[[tensor]]\nfile='a'\nrun='a'\nlayout='x'", "must have one ->"),
    ],
)
def test_what_is_wrong_with_a_map(text: str, words: str) -> None:
    with pytest.raises(NameMapError) as caught:
        parse_name_map(text, "mine.toml")
    assert "name map mine.toml" in str(caught.value)
    assert words in str(caught.value)


def test_all_that_is_wrong_with_a_map_is_said_at_once() -> None:
    with pytest.raises(NameMapError) as caught:
        parse_name_map("format = 1\n[[tensor]]\nfile='{'\nrun='a'\n[[tensor]]\nfile='a'\nrun='{'", "mine.toml")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "name map mine.toml, tensor 1 (file = '{')",
        "name map mine.toml, tensor 2 (file = 'a')",
    ]


LAYERS = """
format = 1
ignore = ["opt/{rest...}"]
[[tensor]]
file = "layers.{layer}.w"
run = "layer_{layer:02}/w"
layout = "out in -> in out"
[[tensor]]
file = "scanned"
run = "scanned_{layer}"
file_axis = 0
[[tensor]]
file = "fused"
run = ["left", "right"]
file_axis = 0
[[tensor]]
file = "one.{n}"
run = "all"
run_axis = 1
"""


def problems_of(have: dict[str, TensorInfo], wanted: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    with pytest.raises(NameMapError) as caught:
        plan_tensors(have, parse_name_map(LAYERS, "mine"), wanted)
    return caught.value.problems


def test_everything_that_does_not_fit_is_said_at_once() -> None:
    have = {
        "layers.0.w": TensorInfo((3, 2)),
        "layers.1.w": TensorInfo((3, 2)),
        "layers.2.w": TensorInfo((4,)),
        "layers.3.w": TensorInfo((3, 2), "int8"),
        "layers.5.w": TensorInfo((3, 2)),
        "extra": TensorInfo((7,)),
        "opt/mu": TensorInfo((7,)),
    }
    wanted = {f"layer_{layer:02}/w": (2, 3) for layer in range(5)} | {"layer_01/w": (5, 3), "other": (1,)}
    assert problems_of(have, wanted) == (
        "tensor 'layers.4.w' is missing in the file, from which 'layer_04/w' should be made",
        (
            "tensor 'layers.1.w' has shape (3, 2), from which 'layer_01/w' of shape (5, 3) cannot be made: "
            "shape (5, 3) does not fit 'in out' with in = 2, out = 3"
        ),
        (
            "tensor 'layers.2.w' has shape (4,), from which 'layer_02/w' of shape (2, 3) cannot be made: "
            "shape (4,) has 1 axes, and 'out in' has 2"
        ),
        "tensor 'layers.3.w' has type int8; parameters must be of float32, bfloat16, float16, float64",
        "tensor 'other' of shape (1,) is wanted, and no rule of the map says from what",
        "tensor 'layers.5.w' of shape (3, 2) in the file is not used by mine; list it under ignore if nobody wants it",
        "tensor 'extra' of shape (7,) in the file is not used by mine; list it under ignore if nobody wants it",
    )


def test_a_scanned_tensor_with_other_layers_than_the_run() -> None:
    scanned = {"scanned": TensorInfo((4, 2))}
    assert problems_of(scanned, {f"scanned_{layer}": (2,) for layer in range(3)}) == (
        "tensor 'scanned' of shape (4, 2) in the file has 4 slices along axis 0, of which only 3 are used",
    )
    (problem,) = problems_of(scanned, {f"scanned_{layer}": (2,) for layer in range(5)})
    assert "its axis 0 has 4 slices, and number 4 is wanted" in problem


def test_parts_that_do_not_add_up() -> None:
    fused = {"fused": TensorInfo((6, 2))}
    problems = problems_of(fused, {"left": (2, 2), "right": (3, 2)})
    assert "its axis 0 has 6, and the parts ['left', 'right'] take [2, 3]" in problems[0]
    with pytest.raises(NameMapError) as caught:
        plan_tensors(fused, parse_name_map(LAYERS, "mine"))
    assert "give parts = [...] in the map" in str(caught.value)


def test_a_stacked_tensor_of_which_layers_are_missing_or_different() -> None:
    have = {"one.0": TensorInfo((2,)), "one.2": TensorInfo((2,))}
    assert problems_of(have, {"all": (2, 3)})[0] == (
        "tensor 'one.1' is missing in the file, from which 'all' should be made"
    )
    with pytest.raises(NameMapError) as caught:
        plan_tensors({"one.0": TensorInfo((2,)), "one.1": TensorInfo((3,))}, parse_name_map(LAYERS, "mine"))
    assert "tensors of different shapes, [(2,), (3,)], cannot be stacked" in str(caught.value)


def test_an_extent_that_nothing_says() -> None:
    text = "format = 1\n[[tensor]]\nfile='a'\nrun='b'\nlayout='(head dim) -> head dim'"
    with pytest.raises(NameMapError) as caught:
        plan_tensors({"a": TensorInfo((6,))}, parse_name_map(text, "mine"))
    assert "the extent of dim, head in '(head dim) -> head dim' is not known; give it in the map's [sizes]" in str(
        caught.value
    )
    assert plan_tensors({"a": TensorInfo((6,))}, parse_name_map(text, "mine"), {"b": (3, 2)})["b"].shape == (3, 2)


def test_a_long_list_is_cut_but_kept() -> None:
    with pytest.raises(NameMapError) as caught:
        plan_tensors({}, same_names(), {f"t{number}": (1,) for number in range(100)})
    assert len(caught.value.problems) == 100
    assert str(caught.value).endswith("and 60 more")


def test_where_a_map_comes_from(tmp_path: Path) -> None:
    assert shipped_name_maps() == ("gemma", "gemma1", "llama")
    with pytest.raises(
        NameMapError, match="there is no name map 'gema'; give the path of a .toml file, or one of gemma"
    ):
        load_name_map("gema")
    with pytest.raises(NameMapError, match="cannot be read: No such file or directory"):
        load_name_map(str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").write_text("format = 1\n[[tensor]]\nfile='a'\nrun='b'\n")
    assert load_name_map(str(tmp_path / "mine.toml")).rules[0].source.match("a") is not None
    assert load_name_map("") == same_names()
