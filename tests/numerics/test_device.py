"""Copies at the step boundary and applies, on one device. Several devices: test_sharded.py."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from decoupled_diloco.arrays import device as device_module
from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import as_held, fragment_schema
from decoupled_diloco.arrays.tree import ParameterTree
from tests.numerics.example_params import Example, assert_same, example_params, pointers, rule_of


def test_the_example_is_cut_everywhere_it_can_be() -> None:
    pieces = [piece for fragment in Example(example_params()).fragmentation.fragments for piece in fragment.pieces]
    assert {piece.tensor for piece in pieces if not piece.is_whole} == {"embed", "stacked"}


def test_a_copy_is_the_flat_vector_of_its_fragment() -> None:
    params = example_params()
    example = Example(params)
    assert_same(example.copied(params), example.on_host(params))


def test_a_copy_fills_a_given_vector() -> None:
    params = example_params()
    example = Example(params)
    out = np.empty(example.fragmentation.sizes[1], np.float32)
    assert example.fragments.copy(params, [1])[1].to_host(out) is out
    assert_same([out], [example.on_host(params)[1]])


def test_a_copy_outlives_the_step_that_the_parameters_are_donated_to() -> None:
    params = example_params()
    example = Example(params)
    wanted = example.on_host(params)
    addresses = pointers(params)
    copies = example.fragments.copy(params, example.indexes())
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    after = step(params)
    assert pointers(after) == addresses  # the step worked in place: the copies hold none of its memory
    assert_same([copies[index].to_host() for index in example.indexes()], wanted)


def test_a_copy_can_be_flattened_on_another_thread() -> None:
    params = example_params()
    example = Example(params)
    wanted = example.on_host(params)
    copies = example.fragments.copy(params, example.indexes())
    found: list[FloatVector] = []
    thread = threading.Thread(target=lambda: found.extend(copies[i].to_host() for i in example.indexes()))
    thread.start()
    thread.join()
    assert_same(found, wanted)


def test_overwrite_replaces_a_fragment_in_place_and_nothing_else() -> None:
    params = example_params()
    example = Example(params)
    before, addresses = example.on_host(params), pointers(params)
    published = example.on_host(example_params(seed=1))
    after = example.fragments.overwrite(params, example.fragments.stage(1, published[1]))
    assert_same(example.on_host(after), [before[0], published[1], before[2]])
    assert pointers(after) == addresses
    touched = {piece.tensor for piece in example.fragmentation.fragments[1].pieces}
    for name, leaf in params.items():
        assert leaf.is_deleted() == (name in touched)
        assert (after[name] is leaf) == (name not in touched)


def test_a_receive_buffer_may_be_used_again_once_it_is_staged() -> None:
    """On the CPU, jax may go on using the memory of an aligned NumPy array."""
    params = example_params()
    example = Example(params)
    published = example.on_host(example_params(seed=1))
    buffer = np.empty(1024 + 16, np.float32)
    aligned = buffer[(-buffer.ctypes.data % 64) // 4 :][: published[1].size]
    aligned[:] = published[1]
    staged = example.fragments.stage(1, aligned)
    aligned[:] = np.nan
    after = example.fragments.overwrite(params, staged)
    assert_same([example.on_host(after)[1]], [published[1]])


def test_carry_keeps_the_steps_since_the_copy() -> None:
    params = example_params()
    example = Example(params)
    at_copy = example.on_host(params)[0].astype(np.float64)
    copy = example.fragments.copy(params, [0])[0]
    params = jax.tree.map(lambda leaf: leaf * 1.25 + 0.1, params)
    now = example.on_host(params)[0].astype(np.float64)
    published = example.on_host(example_params(seed=1))[0]
    carried = example.fragments.carry(params, example.fragments.stage(0, published), copy)
    np.testing.assert_allclose(example.on_host(carried)[0], published + (now - at_copy), rtol=1e-6, atol=1e-6)


def test_carry_without_a_step_in_between_is_overwrite() -> None:
    params = example_params()
    example = Example(params)
    copy = example.fragments.copy(params, [0])[0]
    published = example.on_host(example_params(seed=1))[0]
    carried = example.fragments.carry(params, example.fragments.stage(0, published), copy)
    assert_same([example.on_host(carried)[0]], [published])


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_blend_keeps_a_share_of_the_learners_own_value(alpha: float) -> None:
    params = example_params()
    example = Example(params)
    own = example.on_host(params)[2].astype(np.float64)
    published = example.on_host(example_params(seed=1))[2]
    blended = example.fragments.blend(params, example.fragments.stage(2, published), alpha)
    wanted = alpha * own + (1 - alpha) * published
    np.testing.assert_allclose(example.on_host(blended)[2], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_leaves_are_widened_when_copied_and_rounded_once_when_applied(dtype: Any) -> None:
    params = example_params() | {name: example_params()[name].astype(dtype) for name in ("embed", "kernel")}
    example = Example(params)
    assert_same(example.copied(params), example.on_host(params))
    published = [vector * np.float32(1.001) for vector in example.on_host(example_params(seed=1))]
    for index, fragment in enumerate(example.fragmentation.fragments):
        params = example.fragments.overwrite(params, example.fragments.stage(index, published[index]))
        assert_same([example.on_host(params)[index]], [as_held(fragment, published[index])])
    assert params["embed"].dtype == dtype


def test_carry_into_narrow_leaves_adds_in_float32() -> None:
    """Theta + (theta - copy) is rounded once; rounding Theta first would lose a step that is half a unit."""
    params = {"w": jnp.array([1.0], jnp.bfloat16)}
    example = Example(params, fragment_count=1)
    copy = example.fragments.copy(params, [0])[0]
    params = {"w": params["w"] + jnp.bfloat16(2**-7)}
    published = np.array([1 + 0.75 * 2**-8], np.float32)
    carried = example.fragments.carry(params, example.fragments.stage(0, published), copy)
    assert carried["w"].tolist() == [1 + 2**-7]


@pytest.mark.parametrize("committed", [False, True])
def test_a_compiled_step_takes_applied_parameters_without_compiling_again(committed: bool) -> None:
    params = example_params()
    if committed:
        params = jax.device_put(params, jax.devices()[0])
    example = Example(params)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree))
    published = example.on_host(example_params(seed=1))
    for index in example.indexes():
        params = step(params)
        params = example.fragments.overwrite(params, example.fragments.stage(index, published[index]))
        assert all(leaf.committed == committed for leaf in params.values())
    step(params)
    assert step._cache_size() == 1


def test_warm_compiles_everything_and_changes_nothing() -> None:
    params = example_params()
    example = Example(params)
    before = example.on_host(params)
    params = example.fragments.warm(params)
    assert_same(example.on_host(params), before)
    compiled = [device_module._copied._cache_size(), device_module._overwrite._cache_size()]
    for index, vector in enumerate(example.copied(params)):
        params = example.fragments.overwrite(params, example.fragments.stage(index, vector))
    assert [device_module._copied._cache_size(), device_module._overwrite._cache_size()] == compiled


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Programs that are compiled meanwhile, by jax's own account."""
    found: list[str] = []

    def listen(event: str, _: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_program_is_compiled_for_each_function_and_shape(dtype: Any) -> None:
    """Three pairs of equal leaves, each pair a fragment: one program to copy, one to overwrite."""
    params = {f"w{number}": jnp.full((4, 31 if dtype == jnp.float32 else 37), number, dtype) for number in range(6)}
    example = Example(params, fragment_count=3)
    assert [len(fragment.pieces) for fragment in example.fragmentation.fragments] == [2, 2, 2]
    with compilations() as compiled:
        example.fragments.warm(params)
    assert sorted(compiled) == ["jit(_copied)", "jit(_overwrite)"]


def test_after_the_warm_up_nothing_is_compiled_whatever_a_run_asks_for() -> None:
    params = example_params()
    example = Example(params)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.5, tree), donate_argnums=0)
    params = step(example.fragments.warm(params))
    published = example.on_host(example_params(seed=1))
    everything = list(example.indexes())
    with compilations() as compiled:
        for number in range(60):
            staged = example.fragments.stage(number % 3, published[number % 3])
            opened = example.fragments.open(step(params))
            if number % 20 == 19:  # a recovery: all versions again, from host memory
                for index in everything:
                    opened.overwrite(example.fragments.stage(index, published[index]).in_host_memory())
            opened.overwrite(staged)
            # What is due, what a last call may want, and what is asked for again.
            copies = opened.copy([everything, [number % 3], everything[:2], []][number % 4])
            for copy in copies.values():
                copy.send_to_host()
                assert copy.to_host().shape == published[copy.fragment.index].shape
            params = opened.params
    assert compiled == []


def test_a_copy_outlives_the_version_that_is_written_over_its_source() -> None:
    params = example_params()
    example = Example(params)
    before = example.on_host(params)
    published = example.on_host(example_params(seed=1))
    opened = example.fragments.open(params)
    copy = opened.copy([1])[1]
    opened.overwrite(example.fragments.stage(1, published[1]))
    assert_same([copy.to_host()], [before[1]])
    assert_same([opened.copy([1])[1].to_host()], [published[1]])


def test_a_version_that_lies_in_host_memory_alone_is_applied_like_any_other() -> None:
    params = example_params()
    example = Example(params)
    published = example.on_host(example_params(seed=1))
    staged = example.fragments.stage(1, published[1]).in_host_memory()
    assert staged.flat is published[1]
    assert not staged.values
    after = example.fragments.overwrite(params, staged)
    assert_same([example.on_host(after)[1]], [published[1]])


def test_copies_that_were_made_ahead_are_those_of_the_boundary() -> None:
    params = example_params()
    example = Example(params)
    before, published = example.on_host(params), example.on_host(example_params(seed=1))
    opened = example.fragments.open(params)
    opened.copy_ahead([0, 1, 2])
    ahead = opened.copy([0, 1])
    opened.overwrite(example.fragments.stage(1, published[1]))
    copies = opened.copy([0, 1, 2])
    assert copies[0] is ahead[0], "it was made already"
    assert_same([copies[index].to_host() for index in range(3)], [before[0], published[1], before[2]])


def test_parameters_that_nothing_was_written_to_are_handed_on_as_they_are() -> None:
    params = example_params()
    opened = Example(params).fragments.open(params)
    opened.copy([0, 2])
    assert opened.params is params


def test_an_array_that_stands_at_several_places_of_the_tree_is_copied_first() -> None:
    zeros = jnp.zeros(4)
    params = {"a": zeros, "b": zeros, "c": zeros}
    example = Example(params)
    for index in example.indexes():
        value = np.full(4, index + 1, np.float32)
        params = example.fragments.overwrite(params, example.fragments.stage(index, value))
    assert sorted(leaf.tolist() for leaf in params.values()) == [[1] * 4, [2] * 4, [3] * 4]


def test_numpy_parameters_become_device_arrays_when_they_are_first_applied() -> None:
    params = {"w": np.arange(4, dtype=np.float32)}
    example = Example(params, fragment_count=1)
    assert_same(example.copied(params), [params["w"]])
    after = example.fragments.overwrite(params, example.fragments.stage(0, np.ones(4, np.float32)))
    assert isinstance(after["w"], jax.Array)
    assert params["w"].tolist() == [0, 1, 2, 3]


def test_every_kind_of_pytree_goes_round() -> None:
    linen = nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 4)))
    trees: list[Any] = [
        nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0))),
        nnx.Linear(4, 3, rngs=nnx.Rngs(0)),
        linen,
        eqx.nn.MLP(2, 2, width_size=4, depth=1, key=jax.random.key(0)),
    ]
    for params in trees:
        example = Example(params, fragment_count=1)
        published = [np.arange(size, dtype=np.float32) for size in example.fragmentation.sizes]
        for index in example.indexes():
            params = example.fragments.overwrite(params, example.fragments.stage(index, published[index]))
        assert_same(example.copied(params), published)


def test_vectors_that_do_not_fit_are_refused() -> None:
    params = example_params()
    example = Example(params)
    with pytest.raises(ValueError, match=r"fragment 0 is a float32 vector of .* not float32 \(3,\)"):
        example.fragments.stage(0, np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="another schema"):
        DeviceFragments(example.tree, fragment_schema(ParameterTree({"w": jnp.ones(2)}, rule_of).schema, 1), params)
