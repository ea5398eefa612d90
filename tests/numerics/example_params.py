"""A small set of parameters of every kind, its fragments, and how to look at them."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragmentation, fragment_schema, gather
from decoupled_diloco.arrays.tree import ParameterTree, TensorRule

FRAGMENT_COUNT = 3
Params = dict[str, jax.Array]


def rule_of(name: str, shape: tuple[int, ...]) -> TensorRule:
    rule: Any = SimpleNamespace(rule="avg" if "embed" in name else "rda", stack_axis=1 if "stacked" in name else None)
    return rule  # type: ignore[no-any-return]


def example_params(seed: int = 0) -> Params:
    """An embedding that is cut by rows, a tensor stacked along its middle axis, plain ones and a scalar."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (40, 4), "stacked": (3, 6, 5), "kernel": (8, 8), "bias": (8,), "scale": ()}
    return {name: jnp.array(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


class Example:
    def __init__(self, params: Any, fragment_count: int = FRAGMENT_COUNT) -> None:
        self.tree = ParameterTree(params, rule_of)
        self.fragmentation: Fragmentation = fragment_schema(self.tree.schema, fragment_count)
        self.fragments = DeviceFragments(self.tree, self.fragmentation, params)

    def indexes(self) -> range:
        return range(len(self.fragmentation.fragments))

    def on_host(self, params: Any) -> list[FloatVector]:
        leaves = {name: np.asarray(leaf) for name, leaf in self.tree.leaves(params).items()}
        return [gather(fragment, leaves) for fragment in self.fragmentation.fragments]

    def copied(self, params: Any) -> list[FloatVector]:
        copies = self.fragments.copy(params, self.indexes())
        return [copies[index].to_host() for index in self.indexes()]


def assert_same(actual: list[FloatVector], wanted: list[FloatVector]) -> None:
    assert [vector.tobytes() for vector in actual] == [vector.tobytes() for vector in wanted]


def pointers(params: Params) -> dict[str, int]:
    return {name: leaf.unsafe_buffer_pointer() for name, leaf in params.items()}
