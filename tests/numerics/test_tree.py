"""Which leaves of which kinds of pytree are exchanged, and what they are called."""

from types import SimpleNamespace
from typing import Any

import equinox as eqx
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoupled_diloco.arrays.schema import SchemaError, TensorSpec
from decoupled_diloco.arrays.tree import ParameterTree, TensorRule


def by_name(name: str, shape: tuple[int, ...]) -> TensorRule:
    rule: Any = SimpleNamespace(rule="avg" if "embed" in name else "rda", stack_axis=None)
    return rule  # type: ignore[no-any-return]


def names(params: Any) -> list[str]:
    return list(ParameterTree(params, by_name).schema.by_name)


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, use_bias=False, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        split = nn.with_partitioning(nn.initializers.ones, ("model", None))
        return nn.Dense(2, kernel_init=split)(nn.Dense(3)(x))


NNX_NAMES = ["layers/0/bias", "layers/0/kernel", "layers/1/kernel"]
LINEN_NAMES = [f"params/Dense_{layer}/{part}" for layer in range(2) for part in ("bias", "kernel")]


def test_a_dict() -> None:
    params = {"b": [jnp.ones(2), jnp.ones((2, 3))], "a": {"embed": jnp.ones(4, jnp.bfloat16)}, 3: jnp.ones(())}
    del params[3]
    tree = ParameterTree(params, by_name)
    assert tree.schema.tensors == (
        TensorSpec("a/embed", (4,), dtype="bfloat16", rule="avg"),
        TensorSpec("b/0", (2,)),
        TensorSpec("b/1", (2, 3)),
    )


def test_flax_nnx_states_pure_dicts_and_modules() -> None:
    """Random keys and counters are not exchanged, and the box of a variable is not part of its name."""
    model = NnxModel()
    assert names(nnx.state(model)) == NNX_NAMES
    assert names(nnx.to_pure_dict(nnx.state(model, nnx.Param))) == NNX_NAMES
    assert names(model) == NNX_NAMES


def test_flax_linen_variables_frozen_or_not_and_partitioned() -> None:
    variables = LinenModel().init(jax.random.key(0), jnp.ones((1, 2)))
    assert names(variables) == LINEN_NAMES
    assert names(flax.core.freeze(variables)) == LINEN_NAMES


def test_an_equinox_module_keeps_its_functions() -> None:
    model = eqx.nn.MLP(2, 2, width_size=4, depth=1, key=jax.random.key(0))
    assert names(model) == ["layers/0/bias", "layers/0/weight", "layers/1/bias", "layers/1/weight"]
    tree = ParameterTree(model, by_name)
    changed = tree.replace(model, {"layers/0/bias": jnp.full(4, 7.0)})
    assert changed.activation is model.activation
    assert changed.layers[1].weight is model.layers[1].weight
    assert changed.layers[0].bias.tolist() == [7] * 4
    assert changed(jnp.ones(2)).shape == (2,)


def test_a_state_can_be_put_back_into_its_module() -> None:
    model = NnxModel()
    state = nnx.state(model, nnx.Param)
    tree = ParameterTree(state, by_name)
    nnx.update(model, tree.replace(state, {"layers/0/bias": jnp.full(3, 7.0)}))
    assert model.layers[0].bias[...].tolist() == [7] * 3


def test_shapes_are_enough_for_a_schema() -> None:
    def init() -> dict[str, jax.Array]:
        return {"w": jnp.ones((1 << 20, 1 << 20))}

    assert ParameterTree(jax.eval_shape(init), by_name).schema.tensors[0].shape == (1 << 20, 1 << 20)


def test_what_is_not_a_float_array_is_left_alone() -> None:
    params = {
        "w": jnp.ones(2),
        "count": jnp.zeros((), jnp.int32),
        "mask": jnp.ones(2, bool),
        "key": jax.random.key(0),
        "empty": jnp.ones((0, 3)),
        "rate": 0.5,
        "name": "x",
        "nothing": None,
        "function": jnp.tanh,
    }
    assert names(params) == ["w"]
    assert names(jnp.ones(3)) == ["params"]


def test_numpy_leaves_are_exchanged_and_moved_to_the_device() -> None:
    params = {"w": np.arange(3, dtype=np.float32)}
    leaf = ParameterTree(params, by_name).leaves(params)["w"]
    assert isinstance(leaf, jax.Array)
    params["w"][0] = 7
    assert leaf.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 1}, "no float tensor"),
        ({"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}}, "Two tensors are named 'a/b'"),
        ({"z": jnp.ones(2, jnp.complex64)}, "complex type complex64"),
        ({"w": np.ones(2)}, "'w' has dtype 'float64'; only float32, bfloat16, float16"),
    ],
)
def test_trees_that_cannot_be_exchanged_are_refused(params: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        ParameterTree(params, by_name)


def test_a_tree_of_another_structure_is_refused() -> None:
    tree = ParameterTree({"a": jnp.ones(2)}, by_name)
    with pytest.raises(SchemaError, match="changed their structure during the run"):
        tree.leaves({"a": jnp.ones(2), "b": jnp.ones(2)})
