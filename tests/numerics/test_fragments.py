"""Fragmentation: complete, deterministic, as even as the tensors allow; and the flat vectors of fragments."""

import hashlib
import itertools
import json

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.arrays.fragments import (
    Fragmentation,
    as_held,
    assemble,
    cut_axis,
    fragment_schema,
    gather,
    scatter,
)
from decoupled_diloco.arrays.schema import Schema, SchemaError, TensorSpec
from tests.numerics.model_schemas import decoder_schema, demo_schema, schema_19m

Tensors = dict[str, npt.NDArray[np.float32]]


@st.composite
def tensor_specs(draw: st.DrawFn, name: str, extent_max: int) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(1, extent_max), max_size=3)))
    axes = st.none() | st.integers(0, len(shape) - 1) if shape else st.none()
    return TensorSpec(name, shape, rule=draw(st.sampled_from(["rda", "avg"])), stack_axis=draw(axes))


@st.composite
def schemas(draw: st.DrawFn, tensor_count_max: int = 8, extent_max: int = 7) -> Schema:
    names = draw(st.lists(st.text("abc/", min_size=1), unique=True, min_size=1, max_size=tensor_count_max))
    return Schema([draw(tensor_specs(name, extent_max)) for name in names])


@st.composite
def fragmentations(draw: st.DrawFn) -> Fragmentation:
    schema = draw(schemas())
    return fragment_schema(schema, draw(st.integers(1, sum(slice_sizes(schema, count=True)))))


def slice_sizes(schema: Schema, *, count: bool = False) -> list[int]:
    """Size of every indivisible unit (or 1 for each, to count them)."""
    sizes = []
    for spec in schema.tensors:
        axis = cut_axis(spec)
        slice_count = 1 if axis is None else spec.shape[axis]
        sizes += [1 if count else spec.size // slice_count] * slice_count
    return sizes


def numbered(schema: Schema) -> Tensors:
    """Tensors whose elements are all different: 0, 1, 2, ..."""
    tensors, start = {}, 0
    for spec in schema.tensors:
        values = np.arange(start, start + spec.size, dtype=np.float32)
        tensors[spec.name] = values.reshape(spec.shape)
        start += spec.size
    return tensors


def least_possible(schema: Schema, fragment_count: int) -> float:
    """No fragmentation has a largest fragment below this: the mean, and the pigeonhole of the units."""
    units = sorted(slice_sizes(schema), reverse=True)
    crowded = [units[k * fragment_count] * (k + 1) for k in range((len(units) - 1) // fragment_count + 1)]
    return max(schema.size / fragment_count, *crowded)


@given(fragmentation=fragmentations())
def test_every_element_is_in_exactly_one_fragment(fragmentation: Fragmentation) -> None:
    tensors = numbered(fragmentation.schema)
    flats = [gather(fragment, tensors) for fragment in fragmentation.fragments]
    assert [flat.size for flat in flats] == list(fragmentation.sizes)
    assert all(fragmentation.sizes)
    assert np.sort(np.concatenate(flats)).tolist() == list(range(fragmentation.schema.size))


@given(fragmentation=fragmentations())
def test_gather_and_scatter_are_inverse(fragmentation: Fragmentation) -> None:
    tensors = numbered(fragmentation.schema)
    flats = {fragment.index: gather(fragment, tensors) for fragment in fragmentation.fragments}
    for name, tensor in assemble(fragmentation, flats).items():
        np.testing.assert_array_equal(tensor, tensors[name])


@given(fragmentation=fragmentations())
def test_segments_are_the_tensors_and_the_slices_of_stacked_ones(fragmentation: Fragmentation) -> None:
    tensors = numbered(fragmentation.schema)
    found = []
    for fragment in fragmentation.fragments:
        flat = gather(fragment, tensors)
        position = 0
        for start, stop, rule in fragment.segments:
            assert start == position
            position = stop
            if rule == "rda":
                found.append(frozenset(flat[start:stop].tolist()))
        assert position == fragment.size
    expected = []
    for spec in fragmentation.schema.tensors:
        if spec.rule == "rda" and spec.stack_axis is not None:
            expected += [
                frozenset(part.ravel().tolist()) for part in np.moveaxis(tensors[spec.name], spec.stack_axis, 0)
            ]
        elif spec.rule == "rda":
            expected.append(frozenset(tensors[spec.name].ravel().tolist()))
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


@given(schema=schemas(), data=st.data())
def test_the_order_in_which_tensors_are_given_does_not_matter(schema: Schema, data: st.DataObject) -> None:
    shuffled = Schema(data.draw(st.permutations(schema.tensors)))
    count = data.draw(st.integers(1, sum(slice_sizes(schema, count=True))))
    assert fragment_schema(shuffled, count) == fragment_schema(schema, count)


@settings(max_examples=60)
@given(schema=schemas(tensor_count_max=4, extent_max=5), fragment_count=st.integers(1, 3))
def test_the_largest_fragment_is_within_four_thirds_of_the_optimum(schema: Schema, fragment_count: int) -> None:
    units = slice_sizes(schema)
    if not fragment_count <= len(units) <= 8:
        return
    optimum = min(
        max(
            sum(size for size, where in zip(units, places, strict=True) if where == index)
            for index in range(fragment_count)
        )
        for places in itertools.product(range(fragment_count), repeat=len(units))
    )
    assert max(fragment_schema(schema, fragment_count).sizes) <= 4 / 3 * optimum


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("fragment_count", [1, 4, 8, 24])
def test_models_are_within_five_percent_of_the_mean_where_their_tensors_allow(
    fragment_count: int, stacked: bool
) -> None:
    for schema in (demo_schema(stacked=stacked), schema_19m(stacked=stacked)):
        mean = schema.size / fragment_count
        assert max(fragment_schema(schema, fragment_count).sizes) <= max(
            1.05 * mean, least_possible(schema, fragment_count)
        )


def test_the_demo_and_a_12b_model_are_even() -> None:
    assert fragment_schema(demo_schema(), 8).imbalance < 1.05
    assert fragment_schema(schema_19m(), 8).imbalance < 1.05
    large = decoder_schema(vocabulary=262144, width=3840, layers=48, hidden=15360, heads=16, kv_heads=8)
    assert fragment_schema(large, 24).imbalance < 1.05


def test_where_one_tensor_is_larger_than_the_mean_the_others_are_spread_evenly() -> None:
    schema = demo_schema(stacked=True)
    fragmentation = fragment_schema(schema, 24)
    assert max(fragmentation.sizes) == max(slice_sizes(schema))
    assert min(fragmentation.sizes) > 0.7 * schema.size / 24


def test_tensors_are_cut_only_if_that_is_needed() -> None:
    even = Schema([TensorSpec(name, (8, 4), rule="avg") for name in "abcd"])
    assert all(piece.is_whole for fragment in fragment_schema(even, 4).fragments for piece in fragment.pieces)
    assert not all(piece.is_whole for fragment in fragment_schema(even, 3).fragments for piece in fragment.pieces)


def test_a_fragment_has_at_most_one_run_of_a_tensor() -> None:
    fragmentation = fragment_schema(schema_19m(stacked=True), 24)
    for fragment in fragmentation.fragments:
        names = [piece.tensor for piece in fragment.pieces]
        assert names == sorted(set(names))


def test_too_many_fragments_names_the_largest_usable_number() -> None:
    schema = Schema(
        [
            TensorSpec("embed", (5, 100), rule="avg"),
            TensorSpec("layers", (3, 10), stack_axis=0),
            TensorSpec("w", (10, 10)),
        ]
    )
    assert len(fragment_schema(schema, 9).fragments) == 9
    with pytest.raises(SchemaError, match=r"fragments.count = 10 .* cut into 9 pieces .* Use 1 to 9\."):
        fragment_schema(schema, 10)
    with pytest.raises(SchemaError, match="fragments.count = 0"):
        fragment_schema(schema, 0)


def test_the_fragmentation_of_a_schema_never_changes() -> None:
    """Two releases in one run must cut alike: a change here is a change of SCHEMA_FORMAT."""
    layout = [
        [[piece.tensor, piece.axis, piece.start, piece.stop, piece.offset] for piece in fragment.pieces]
        for fragment in fragment_schema(demo_schema(stacked=True), 8).fragments
    ]
    assert (
        hashlib.sha256(json.dumps(layout).encode()).hexdigest()
        == "d397ed70f73b360eef962d5daa0dbcdc78e5935d3789fcd9d6525d624b571b2a"
    )


def test_a_stacked_axis_in_the_middle_is_laid_out_slice_by_slice() -> None:
    schema = Schema([TensorSpec("w", (2, 3, 2), stack_axis=1)])
    tensors = numbered(schema)
    whole = fragment_schema(schema, 1).fragments[0]
    assert gather(whole, tensors).tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
    assert [segment[:2] for segment in whole.segments] == [(0, 4), (4, 8), (8, 12)]
    second = fragment_schema(schema, 3).fragments[1]
    scatter(second, np.full(4, -1, np.float32), tensors)
    assert tensors["w"].ravel().tolist() == [0, 1, -1, -1, 4, 5, 6, 7, -1, -1, 10, 11]


def test_gather_fills_a_given_vector_and_widens_narrow_types() -> None:
    schema = Schema([TensorSpec("w", (4,), dtype="bfloat16")])
    fragment = fragment_schema(schema, 1).fragments[0]
    out = np.zeros(4, np.float32)
    assert gather(fragment, {"w": np.array([1, 2, 3, 4], ml_dtypes.bfloat16)}, out=out) is out
    assert out.tolist() == [1, 2, 3, 4]
    narrow = np.zeros(4, ml_dtypes.bfloat16)
    scatter(fragment, np.full(4, 1 + 2**-9, np.float32), {"w": narrow})
    assert narrow.astype(np.float32).tolist() == [1, 1, 1, 1]


def test_a_learner_holds_what_its_leaf_type_can_express() -> None:
    schema = Schema([TensorSpec("a", (2,)), TensorSpec("b", (2,), dtype="bfloat16")])
    fragment = fragment_schema(schema, 1).fragments[0]
    flat = np.full(4, 1 + 2**-9, np.float32)
    assert as_held(fragment, flat).tolist() == [1 + 2**-9, 1 + 2**-9, 1, 1]
    assert flat.tolist() == [1 + 2**-9] * 4
    narrow_free = fragment_schema(Schema([TensorSpec("a", (4,))]), 1).fragments[0]
    assert as_held(narrow_free, flat) is flat


def test_tensors_that_do_not_fit_the_schema_are_named() -> None:
    fragment = fragment_schema(Schema([TensorSpec("w", (2, 2))]), 1).fragments[0]
    with pytest.raises(SchemaError, match="'w' is missing"):
        gather(fragment, {})
    with pytest.raises(SchemaError, match=r"'w' has shape \(4,\); the schema gives it shape \(2, 2\)"):
        scatter(fragment, np.zeros(4, np.float32), {"w": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"fragment 0 has 4 elements, the vector has shape \(3,\)"):
        scatter(fragment, np.zeros(3, np.float32), {"w": np.zeros((2, 2), np.float32)})
