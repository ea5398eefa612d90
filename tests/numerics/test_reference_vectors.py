"""Merge and outer step against figures of an independent float64 implementation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoupled_diloco.arrays.encoding import Encoded, encoding_named
from decoupled_diloco.arrays.fragments import fragment_schema, gather
from decoupled_diloco.arrays.merge import merge
from decoupled_diloco.arrays.outer import FragmentState, outer_step
from decoupled_diloco.arrays.schema import Schema, TensorSpec
from tests.numerics import reference

CASES = json.loads((Path(__file__).parent / "reference_vectors.json").read_text())["merge"]


def label(case: dict[str, Any]) -> str:
    return f"{case['rule']}-{len(case['contributions'])}-{case['kind'].replace(' ', '-')}"


@pytest.mark.parametrize("case", CASES, ids=label)
def test_merge_and_outer_step_agree_with_the_reference(case: dict[str, Any]) -> None:
    fragment = fragment_schema(Schema([TensorSpec("w", tuple(case["shape"]), rule=case["rule"])]), 1).fragments[0]

    def flat(values: list[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
        return gather(fragment, {"w": np.array(values, np.float32).reshape(case["shape"])})

    theta = flat(case["theta"])
    weights = [reference.weight(entry["tokens"], entry["steps"]) for entry in case["contributions"]]
    assert weights == pytest.approx([entry["weight"] for entry in case["contributions"]], rel=1e-12)

    uploads = [flat(entry["theta"]) - theta for entry in case["contributions"]]
    sent = [Encoded(encoding_named("float32").encode(upload), "float32", upload.size) for upload in uploads]
    delta, _ = merge(sent, weights, fragment.segments)
    # A difference of two float32 numbers is off by at most half a unit in the last place of the larger one.
    unit = 2**-24 * max(abs(value) for entry in (case, *case["contributions"]) for value in entry["theta"])
    np.testing.assert_allclose(delta, case["delta"], rtol=2**-22, atol=unit)

    state = FragmentState(theta, flat(case["momentum"]), np.zeros_like(theta))
    after = outer_step(state, delta, learning_rate=case["lr"], mu=case["mu"], download_encoding="float32").state
    np.testing.assert_allclose(after.momentum, case["momentum_after"], rtol=2**-22, atol=2 * unit)
    np.testing.assert_allclose(after.theta, case["theta_after"], rtol=0, atol=3 * unit)


def test_the_vectors_cover_both_rules_and_the_edge_cases() -> None:
    kinds = {(case["rule"], case["kind"]) for case in CASES}
    assert len(kinds) == 8
    assert {len(case["contributions"]) for case in CASES} >= {1, 2, 8}
