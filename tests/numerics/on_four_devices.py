"""Sharded parameters; test_sharded.py runs this file in a process that has four devices on the CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments
from tests.numerics.example_params import Example, Params, assert_same, example_params, pointers

# Split by rows whose edges are not those of the pieces, split along a stacked axis, in two ways, and replicated.
SPECS = {
    "embed": Spec(("data", "model"), None),
    "stacked": Spec(None, "model", None),
    "kernel": Spec("data", "model"),
    "bias": Spec("data"),
    "scale": Spec(),
}


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))


def on_mesh(params: Params, mesh: Mesh) -> Params:
    placed = {name: jax.device_put(leaf, NamedSharding(mesh, SPECS[name])) for name, leaf in params.items()}
    # What is put there may share memory between replicas; what a program made does not.
    return {name: jax.jit(jnp.negative, out_shardings=leaf.sharding)(-leaf) for name, leaf in placed.items()}


def shard_pointers(params: Params) -> dict[str, list[int]]:
    return {
        name: [shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards] for name, leaf in params.items()
    }


def test_there_are_four_devices() -> None:
    assert len(jax.devices()) == 4


def test_copies_are_those_of_one_device(mesh: Mesh) -> None:
    params = example_params()
    split = on_mesh(params, mesh)
    assert_same(Example(split).copied(split), Example(params).on_host(params))


def test_applied_fragments_have_the_digests_of_one_device(mesh: Mesh) -> None:
    one, split = example_params(), on_mesh(example_params(), mesh)
    on_one, on_four = Example(one), Example(split)
    published = on_one.on_host(example_params(seed=1))
    for index in on_one.indexes():
        one = on_one.fragments.overwrite(one, on_one.fragments.stage(index, published[index]))
        split = on_four.fragments.overwrite(split, on_four.fragments.stage(index, published[index]))
        digests = [vector_digest(flat) for flat in on_four.copied(split)]
        assert digests == [vector_digest(flat) for flat in on_one.copied(one)]
    assert digests == [vector_digest(flat) for flat in published]


def test_every_replica_is_written(mesh: Mesh) -> None:
    split = on_mesh(example_params(), mesh)
    example = Example(split)
    wanted = example_params(seed=1)
    published = example.on_host(wanted)
    for index in example.indexes():
        split = example.fragments.overwrite(split, example.fragments.stage(index, published[index]))
    for name, leaf in split.items():
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(wanted[name])[shard.index])


def test_overwrite_works_in_place_and_keeps_the_sharding(mesh: Mesh) -> None:
    split = on_mesh(example_params(), mesh)
    example = Example(split)
    addresses = shard_pointers(split)
    published = example.on_host(example_params(seed=1))
    after = example.fragments.overwrite(split, example.fragments.stage(1, published[1]))
    assert shard_pointers(after) == addresses
    touched = {piece.tensor for piece in example.fragmentation.fragments[1].pieces}
    for name, leaf in split.items():
        assert after[name].sharding == NamedSharding(mesh, SPECS[name])
        assert (after[name] is leaf) == (name not in touched)


def test_carry_and_blend_agree_with_one_device(mesh: Mesh) -> None:
    def carried(example: Example, params: Params) -> Params:
        fragments: DeviceFragments = example.fragments
        copies = fragments.copy(params, example.indexes())
        published = example.on_host(example_params(seed=1))
        params = jax.tree.map(lambda leaf: leaf + 0.25, params)
        params = fragments.carry(params, fragments.stage(0, published[0]), copies[0])
        params = fragments.carry(params, fragments.stage(1, published[1]), copies[1])
        return fragments.blend(params, fragments.stage(2, published[2]), 0.25)  # type: ignore[no-any-return]

    one, split = example_params(), on_mesh(example_params(), mesh)
    on_one, on_four = Example(one), Example(split)
    assert_same(on_four.copied(carried(on_four, split)), on_one.copied(carried(on_one, one)))


def test_a_mesh_that_the_caller_has_set_does_not_matter(mesh: Mesh) -> None:
    split = on_mesh(example_params(), mesh)
    example = Example(split)
    published = example.on_host(example_params(seed=1))
    with jax.set_mesh(mesh):
        copies = example.fragments.copy(split, [0, 1])
        split = example.fragments.overwrite(split, example.fragments.stage(0, published[0]))
        split = example.fragments.carry(split, example.fragments.stage(1, published[1]), copies[1])
    assert_same(example.copied(split)[:2], published[:2])


def test_leaves_may_be_placed_otherwise_when_a_fragment_arrives(mesh: Mesh) -> None:
    """The first step of a sharded program moves parameters that were made on one device."""
    params = example_params()
    example = Example(params)
    published = example.on_host(example_params(seed=1))
    copies = example.fragments.copy(params, example.indexes())
    staged = [example.fragments.stage(index, published[index]) for index in example.indexes()]
    split = on_mesh(params, mesh)
    split = example.fragments.overwrite(split, staged[0])
    split = example.fragments.carry(split, staged[1], copies[1])
    assert_same(example.copied(split)[:2], published[:2])
    assert all(leaf.sharding == NamedSharding(mesh, SPECS[name]) for name, leaf in split.items())
    assert_same(example.copied(params)[2:], example.copied(split)[2:])


def test_a_compiled_step_takes_applied_parameters_without_compiling_again(mesh: Mesh) -> None:
    split = on_mesh(example_params(), mesh)
    example = Example(split)
    published = example.on_host(example_params(seed=1))
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree), donate_argnums=0)
    split = step(step(split))  # jit writes shardings its own way, so the second call compiles again
    compiled = step._cache_size()
    for index in example.indexes():
        example.fragments.copy(split, [index])
        addresses = shard_pointers(split)
        split = step(split)
        assert shard_pointers(split) == addresses
        split = example.fragments.overwrite(split, example.fragments.stage(index, published[index]))
    step(split)
    assert step._cache_size() == compiled


def test_uncommitted_parameters_stay_where_they_are_and_uncommitted() -> None:
    with jax.default_device(jax.devices()[2]):
        params = example_params()
    example = Example(params)
    published = example.on_host(example_params(seed=1))
    params = example.fragments.overwrite(params, example.fragments.stage(0, published[0]))
    assert all(leaf.devices() == {jax.devices()[2]} and not leaf.committed for leaf in params.values())


def test_training_with_exchanges_agrees_with_one_device() -> None:
    """Fully sharded data-parallel: rows of every tensor and of the batch are split over all devices."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, Spec("data"))
    rng = np.random.default_rng(0)
    initial = {
        name: jnp.array(rng.standard_normal(shape), jnp.float32)
        for name, shape in {"embed": (40, 8), "hidden": (8, 8), "bias": (8,)}.items()
    }
    tokens, targets = rng.integers(0, 40, (20, 16)), rng.standard_normal((20, 16, 8)).astype(np.float32)

    def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(params["embed"][x] @ params["hidden"] + params["bias"]) - y) ** 2)

    @jax.jit
    def step(params: Params, x: jax.Array, y: jax.Array) -> Params:
        slopes = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda leaf, slope: leaf - 0.5 * slope, params, slopes)  # type: ignore[no-any-return]

    def trained(params: Params, place: Callable[[Any], jax.Array]) -> list[FloatVector]:
        """After every step one fragment is published as half of what it was before, and the step carried over."""
        example = Example(params)
        for number, (x, y) in enumerate(zip(tokens, targets, strict=True)):
            copy = example.fragments.copy(params, [number % 3])[number % 3]
            params = step(params, place(x), place(y))
            staged = example.fragments.stage(number % 3, copy.to_host() * np.float32(0.5))
            params = example.fragments.carry(params, staged, copy)
        return example.copied(params)

    on_one = trained(initial, jnp.asarray)
    on_four = trained(jax.device_put(initial, rows), lambda batch: jax.device_put(batch, rows))
    for four, one in zip(on_four, on_one, strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-5, atol=1e-7)


def test_pointers_tell_copies_from_views() -> None:
    """The ground the tests of "in place" stand on."""
    params = example_params()
    assert pointers(params) == pointers(dict(params))
    assert pointers(params) != pointers({name: jnp.copy(leaf) for name, leaf in params.items()})


def test_moments_of_one_device_go_to_four_and_back(mesh: Mesh) -> None:
    one, split = example_params(), on_mesh(example_params(), mesh)
    optimizer = optax.adamw(1.0)
    donor, state = optimizer.init(one), optimizer.init(one)
    _, donor = optimizer.update(example_params(1), donor, one)
    everywhere = NamedSharding(mesh, Spec())
    state = optax.tree_map_params(
        optimizer,
        lambda leaf, parameter: jax.device_put(leaf, parameter.sharding),
        state,
        split,
        transform_non_params=lambda leaf: jax.device_put(leaf, everywhere),
    )
    placed = [leaf.sharding for leaf in jax.tree.leaves(state)]
    on_one = OptimizerFragments(one, Example(one).fragmentation, donor)
    on_four = OptimizerFragments(split, Example(split).fragmentation, state)
    for part in range(on_one.part_count):
        state = on_four.write(state, on_four.stage(state, part, on_one.copy(donor, part).to_host()))
        assert on_four.copy(state, part).to_host().tobytes() == on_one.copy(donor, part).to_host().tobytes()
    for leaf, wanted, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(donor), placed, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))
        assert leaf.sharding == sharding
