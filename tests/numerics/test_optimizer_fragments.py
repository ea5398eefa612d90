"""The inner optimizer's state in parts: which leaf belongs to which fragment, and what is copied and written."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments
from decoupled_diloco.arrays.schema import SchemaError
from decoupled_diloco.arrays.state_entry import StateEntry, entries_difference
from decoupled_diloco.arrays.tree import ParameterTree
from tests.numerics.example_params import FRAGMENT_COUNT, Example, example_params, rule_of

MASK = {"embed": True, "stacked": False, "kernel": True, "bias": False, "scale": True}


def filled(optimizer: optax.GradientTransformation, seed: int = 0) -> tuple[Any, Any]:
    """Parameters and a state in which no two elements are equal, after a step so that counts are not 0."""
    params = example_params(seed)
    state = optimizer.init(params)
    for step in range(2):
        _, state = optimizer.update(example_params(seed + step + 1), state, params)
    return params, state


def parts_of(params: Any, state: Any, fragment_count: int = FRAGMENT_COUNT) -> OptimizerFragments:
    tree = ParameterTree(params, rule_of)
    return OptimizerFragments(params, fragment_schema(tree.schema, fragment_count), state)


def same(one: Any, other: Any) -> bool:
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


OPTIMIZERS = {
    "adamw": optax.adamw(1.0),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0, mu_dtype=jnp.bfloat16)),
    "masked": optax.chain(optax.masked(optax.adam(1.0), MASK), optax.masked(optax.sgd(1.0, 0.9), lambda _: MASK)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "no state": optax.sgd(0.1),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_all_parts_together_make_the_donors_state_of_a_fresh_one(optimizer: optax.GradientTransformation) -> None:
    params, donor = filled(optimizer)
    fresh = optimizer.init(params)
    at_donor, at_joiner = parts_of(params, donor), parts_of(params, fresh)
    assert at_donor.entries == at_joiner.entries
    assert same(fresh, donor) == (not jax.tree.leaves(donor))
    for part in range(at_donor.part_count):
        payload = at_donor.copy(donor, part).to_host()
        assert payload.size == at_donor.payload_bytes(part)
        fresh = at_joiner.write(fresh, at_joiner.stage(fresh, part, payload))
    assert same(fresh, donor)
    assert jax.tree.structure(fresh) == jax.tree.structure(donor)


def test_a_fragments_part_is_its_own_vector_once_for_each_slot() -> None:
    params, state = filled(optax.adamw(1.0))
    example, parts = Example(params), parts_of(params, state)
    moments = [example.on_host(state[0].mu), example.on_host(state[0].nu)]
    for index in example.indexes():
        values = parts.copy(state, index).to_host().view(np.float32)
        np.testing.assert_array_equal(values, np.concatenate([mu_or_nu[index] for mu_or_nu in moments]))
        size = example.fragmentation.sizes[index]
        assert parts.entries[index] == (
            StateEntry("0/mu", "float32", (size,)),
            StateEntry("0/nu", "float32", (size,)),
        )
    assert parts.entries[-1] == (StateEntry("0/count", "int32", ()),)


def test_a_slot_with_only_some_parameters_has_only_their_pieces() -> None:
    params, state = filled(optax.masked(optax.sgd(0.1, momentum=0.9), MASK))
    parts = parts_of(params, state)
    size = sum(params[name].size for name, is_in in MASK.items() if is_in)
    assert sum(parts.payload_bytes(part) for part in range(FRAGMENT_COUNT)) == 4 * size
    assert {entry.name for entries in parts.entries for entry in entries} == {"inner_state/0/trace"}


def test_one_part_leaves_all_others_as_they_are() -> None:
    params, state = filled(optax.adamw(1.0))
    example, parts = Example(params), parts_of(params, state)
    fresh = optax.adamw(1.0).init(params)
    fresh = parts.write(fresh, parts.stage(fresh, 1, parts.copy(state, 1).to_host()))
    for index in example.indexes():
        copied = parts.copy(fresh, index).to_host()
        assert np.any(copied) == (index == 1)
    assert fresh[0].count == 0


def test_a_copy_is_of_its_boundary_whatever_the_next_step_does_with_the_state() -> None:
    params, state = filled(optax.adamw(1.0))
    parts = parts_of(params, state)
    wanted = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(state[0].mu)]
    copies = [parts.copy(state, part) for part in range(parts.part_count)]
    advance = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = advance(state)
    again = optax.adamw(1.0).init(params)
    for copy in copies:
        again = parts.write(again, parts.stage(again, copy.part, copy.to_host()))
    for leaf, was in zip(jax.tree.leaves(again[0].mu), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), was)
    assert again[0].count == 2


def test_a_velocity_of_ones_own_is_a_slot_without_a_name() -> None:
    params = example_params()
    parts = parts_of(params, example_params(1))
    assert {entry.name for entry in parts.entries[0]} == {""}
    assert parts.entries[-1] == ()


def test_the_longest_path_decides_and_a_counter_is_no_parameter() -> None:
    params = {"w": jnp.ones((2, 2)), "inner": {"w": jnp.ones((2, 2)), "count": jnp.ones(())}}
    state = optax.adam(1.0).init(params)
    parts = parts_of(params, state, 1)
    assert parts.entries == (
        (StateEntry("0/mu", "float32", (9,)), StateEntry("0/nu", "float32", (9,))),
        (StateEntry("0/count", "int32", ()),),
    )


def test_boxed_variables_and_single_leaves() -> None:
    for params in (nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2))), jnp.ones((4, 4))):
        state = optax.adam(1.0).init(params)
        size = sum(leaf.size for leaf in jax.tree.leaves(params))
        parts = parts_of(params, state, 1)
        assert parts.payload_bytes(0) == 8 * size


def test_what_has_no_bytes_that_mean_the_same_elsewhere_stays() -> None:
    params = example_params()
    state = {"key": jax.random.key(1), "name": "mine", "count": np.int64(3), "seen": np.arange(3)}
    parts = parts_of(params, state)
    assert parts.entries[-1] == (StateEntry("seen", "int64", (3,)),)
    other = {"key": jax.random.key(2), "name": "yours", "count": np.int64(4), "seen": np.zeros(3, np.int64)}
    last = parts.part_count - 1
    other = parts.write(other, parts.stage(other, last, parts.copy(state, last).to_host()))
    assert other["name"] == "yours"
    np.testing.assert_array_equal(other["seen"], np.arange(3))


def test_a_state_of_another_build_is_refused() -> None:
    params, state = filled(optax.adamw(1.0))
    with pytest.raises(SchemaError, match="changed its structure"):
        parts_of(params, state).copy(optax.sgd(0.1).init(params), FRAGMENT_COUNT)


def test_a_difference_is_told_in_words() -> None:
    params, adam = filled(optax.adamw(1.0))
    _, momentum = filled(optax.sgd(0.1, momentum=0.9))
    here, there = parts_of(params, adam).entries[-1], parts_of(params, momentum).entries[-1]
    assert entries_difference(here, here) is None
    assert entries_difference(here, there) == "only here: '0/count' int32[]; only there: nothing"
    many = [StateEntry(f"leaf {n}", "float32", (n,)) for n in range(5)]
    assert (entries_difference((), many) or "").endswith("'leaf 2' float32[2] and 2 more")
