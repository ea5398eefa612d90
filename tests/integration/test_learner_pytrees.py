"""Any pytree of parameters takes part in a run: its float arrays are exchanged, everything else stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import decoupled_diloco
from tests.integration.learner_threads import figure
from tests.integration.syncers import config_of, machine_of, syncer


def linen_params() -> Any:
    model = flax.linen.Sequential([flax.linen.Dense(8), jnp.tanh, flax.linen.Dense(1)])
    return model.init(jax.random.key(0), jnp.zeros((1, 4)))


def nnx_params() -> Any:
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 1, rngs=nnx.Rngs(1)))
    return nnx.state(model, nnx.Param)


def equinox_params() -> Any:
    # Its activation functions are leaves that are no arrays.
    return equinox.nn.MLP(4, 1, 8, 1, key=jax.random.key(0))


def mixed_params() -> Any:
    return {
        "a": (np.ones(3, np.float32), [jnp.ones((2, 2), jnp.bfloat16)]),
        "count": jnp.array(7),
        "name": None,
        "b": jnp.ones((5, 2)),
        "c": jnp.zeros(()),
    }


TREES = {"linen": linen_params, "nnx": nnx_params, "equinox": equinox_params, "mixed": mixed_params}


def halved(leaf: Any) -> Any:
    is_float = isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf * jnp.asarray(0.5, leaf.dtype) if is_float else leaf


@pytest.mark.parametrize("tree", TREES)
async def test_a_run_with_every_kind_of_tree(tmp_path, tree):
    make: Callable[[], Any] = TREES[tree]
    config = config_of(run={"total_steps": 12}, fragments={"count": 2, "interval_steps": 4, "overlap_steps": 1})

    def train(address: str) -> Any:
        params = make()
        with decoupled_diloco.learner(config, params, learner_id="a", syncer=(address,), verify_applied=True) as d:
            params = d.start(params)
            while not d.finished:
                params = d.step_boundary(jax.tree.map(halved, params), tokens=1)
        assert figure(d, "digest_mismatches_total") == 0
        assert figure(d, "verified_versions_total") >= 4
        return params

    async with syncer(tmp_path, config) as running:
        params = await asyncio.to_thread(train, str(running.addresses.data))
        assert machine_of(running).rounds.committed_count >= 5
        specs = running.serving.agreement.fragmentation.schema.tensors
    before, after = jax.tree_util.tree_leaves(make()), jax.tree_util.tree_leaves(params)
    assert jax.tree_util.tree_structure(make()) == jax.tree_util.tree_structure(params)
    exchanged = [leaf for leaf in before if halved(leaf) is not leaf]
    assert len(specs) == len(exchanged)
    for old, new in zip(before, after, strict=True):
        if halved(old) is old:
            assert old is new or np.array_equal(old, new)
        else:
            assert new.dtype == old.dtype
            assert np.abs(np.asarray(new, np.float32)).max() <= np.abs(np.asarray(old, np.float32)).max()
