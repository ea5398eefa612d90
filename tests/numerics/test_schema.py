import json
from typing import Any

import pytest

from decoupled_diloco.arrays.schema import Schema, SchemaError, TensorSpec, describe_difference


def small_schema() -> Schema:
    return Schema(
        [
            TensorSpec("layers/0/mlp/kernel", (4, 8)),
            TensorSpec("embed/embedding", (16, 4), rule="avg"),
            TensorSpec("blocks/attention", (2, 4, 4), stack_axis=0),
            TensorSpec("scale", (), dtype="bfloat16"),
        ]
    )


def test_tensors_are_ordered_by_name_whatever_the_order_given() -> None:
    schema = small_schema()
    assert [spec.name for spec in schema.tensors] == [
        "blocks/attention",
        "embed/embedding",
        "layers/0/mlp/kernel",
        "scale",
    ]
    again = Schema(reversed(schema.tensors))
    assert again == schema
    assert again.digest == schema.digest
    assert schema.size == 32 + 64 + 32 + 1


def test_plain_values_round_trip_through_json() -> None:
    schema = small_schema()
    plain = json.loads(json.dumps(schema.to_dict()))
    assert Schema.from_dict(plain) == schema
    assert Schema.from_dict(plain).digest == schema.digest


def test_canonical_text_and_digest_are_fixed() -> None:
    """Learners of an older release must still be understood: a change here is a change of SCHEMA_FORMAT."""
    schema = Schema([TensorSpec("w", (2, 3), rule="avg"), TensorSpec("é", (1,), "float16", "rda", 0)])
    assert schema.canonical_json == (
        '{"format":1,"tensors":[{"dtype":"float32","name":"w","rule":"avg","shape":[2,3],"stack_axis":null},'
        '{"dtype":"float16","name":"\\u00e9","rule":"rda","shape":[1],"stack_axis":0}]}'
    )
    assert schema.digest == "0f7f8d9af60e83a0fba556dedc07731f174771154e3daec6144064cb299d47da"


@pytest.mark.parametrize(
    "change", [{"shape": (4, 9)}, {"dtype": "bfloat16"}, {"rule": "avg"}, {"stack_axis": 1}, {"name": "other"}]
)
def test_every_field_is_part_of_the_digest(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"name": "w", "shape": (4, 8)}
    assert Schema([TensorSpec(**fields)]).digest != Schema([TensorSpec(**(fields | change))]).digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "empty", "shape": (0, 3)}, r"'empty' has shape \(0, 3\): an extent below 1"),
        ({"name": "step", "shape": (), "dtype": "int32"}, "'step' has dtype 'int32'; only float32, bfloat16"),
        ({"name": "w", "shape": (2, 3), "stack_axis": 2}, "stack_axis 2, but its shape .* 2 axes; use 0 to 1"),
        ({"name": "w", "shape": (2,), "rule": "median"}, "merge rule 'median'; use 'rda' or 'avg'"),
        ({"name": "", "shape": (2,)}, "non-empty printable"),
        ({"name": "a\nb", "shape": (2,)}, "non-empty printable"),
    ],
)
def test_a_tensor_that_cannot_be_exchanged_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        TensorSpec(**fields)


def test_duplicate_names_and_empty_schemas_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"Two tensors are named 'w' \(shapes \(2,\) and \(3,\)\)"):
        Schema([TensorSpec("w", (2,)), TensorSpec("w", (3,))])
    with pytest.raises(SchemaError, match="nothing to exchange"):
        Schema([])


def test_plain_values_that_are_no_schema_are_refused() -> None:
    with pytest.raises(SchemaError, match="format 2"):
        Schema.from_dict({"format": 2, "tensors": []})
    with pytest.raises(SchemaError, match=r"unknown fields \['colour'\], missing fields \['shape'\]"):
        TensorSpec.from_dict({"name": "w", "colour": "red"})


def test_a_difference_names_the_first_tensors_of_each_kind() -> None:
    run = Schema([TensorSpec("a", (2,)), TensorSpec("b", (3, 4)), TensorSpec("c", (5,))])
    learner = Schema(
        [TensorSpec("b", (3, 8)), TensorSpec("c", (5,), rule="avg")]
        + [TensorSpec(f"x{index}", (1,)) for index in range(5)]
    )
    assert describe_difference(run, learner) == (
        "only in the run: a [2]; only in this learner: x0 [1], x1 [1], x2 [1] and 2 more; "
        "different: b (shape [3, 4] in the run, [3, 8] in this learner), "
        "c (rule rda in the run, avg in this learner)"
    )
    assert describe_difference(run, run) == ""
