"""The jitted inner step of a workload: loss, optimizer, one update at the rate of the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from decoupled_diloco.arrays.tree import Params, leaf_name
from learner_service.checked_workload import calling
from learner_service.workload import Batch, MeshLayout, Workload

OptimizerState: TypeAlias = Any
StepResult: TypeAlias = tuple[Params, OptimizerState, jax.Array]


class InnerStep:
    """params, state <- one step on a batch. Parameters and state are donated.

    The learning rate is an argument, because it follows the run's global step and not the optimizer's own count.
    Programs are compiled ahead, one for each shape of batch.

    Args:
        workload: what is trained.

    Attributes:
        layout: how the workload spreads over this learner's devices; None: one device.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._loss = workload.loss
        self._optimizer = workload.optimizer()
        self._programs: dict[object, Callable[..., StepResult]] = {}
        self.layout: MeshLayout | None = workload.mesh()

    def place(self, params: Params) -> Params:
        """The parameters where the workload's layout wants them."""
        if self.layout is None:
            return params
        with calling(self._workload, "mesh(), applied to what init returned,"):
            return jax.device_put(params, self._shardings(params))

    def fresh_state(self, params: Params) -> OptimizerState:
        """A new optimizer state for these parameters, its moments placed like them."""
        with calling(self._workload, "the init of optimizer()"):
            state = jax.jit(self._optimizer.init)(params)
        if self.layout is None:
            return state
        everywhere = jax.sharding.NamedSharding(self.layout.mesh, jax.sharding.PartitionSpec())
        return optax.tree_map_params(
            self._optimizer,
            jax.device_put,
            state,
            self._shardings(params),
            transform_non_params=lambda leaf: jax.device_put(leaf, everywhere),
        )

    def is_compiled_for(self, batch: Batch) -> bool:
        """Whether a step on such a batch needs no compilation."""
        return _shape_of(batch) in self._programs

    def compile(self, params: Params, state: OptimizerState, batch: Batch) -> None:
        """Compiles the step for batches of this shape; nothing is computed or donated."""
        with calling(self._workload, "a batch of data(slot, cursor), placed on the devices,"):
            placed = self._placed(batch)
        results = None
        if self.layout is not None:
            # Without this the compiler may place the results otherwise than the arguments.
            results = (*jax.tree.map(lambda leaf: leaf.sharding, (params, state)), None)
        jitted = jax.jit(self._step, donate_argnums=(0, 1), out_shardings=results)
        with calling(self._workload, "the step of loss(params, batch) and optimizer()"):
            lowered = jitted.lower(params, state, placed, np.float32(0.0))
        self._programs[_shape_of(batch)] = lowered.compile()

    def __call__(self, params: Params, state: OptimizerState, batch: Batch, learning_rate: float) -> StepResult:
        """One step; returns new parameters, new state and the loss as a scalar on the device."""
        if not self.is_compiled_for(batch):
            self.compile(params, state, batch)
        return self._programs[_shape_of(batch)](params, state, self._placed(batch), np.float32(learning_rate))

    def _step(self, params: Params, state: OptimizerState, batch: Batch, learning_rate: jax.Array) -> StepResult:
        loss, slopes = jax.value_and_grad(self._loss)(params, batch)
        updates, state = self._optimizer.update(slopes, state, params)
        updates = jax.tree.map(lambda update: learning_rate * update, updates)
        return optax.apply_updates(params, updates), state, loss

    def _placed(self, batch: Batch) -> Batch:
        if self.layout is None or self.layout.batch_sharding is None:
            return batch
        return jax.device_put(batch, self.layout.batch_sharding)

    def _shardings(self, params: Params) -> Params:
        layout = self.layout
        assert layout is not None
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: layout.sharding(leaf_name(path), tuple(leaf.shape)), params
        )


def _shape_of(batch: Batch) -> object:
    leaves, structure = jax.tree_util.tree_flatten(batch)
    return structure, tuple((np.shape(leaf), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)
