"""A small regression problem: the shortest complete workload, for tests and for measurements of everything around it.

A network of a few square layers learns to imitate another one with fixed random weights. Nothing is downloaded, the
step compiles in a fraction of a second, the number of parameters is whatever is asked for, and every step can be given
a known duration. Name it in a run file as::

    [workload]
    factory = "learner_service.workloads.synthetic:factory"
    options = { parameter_count = 1000000, step_seconds = 0.05 }
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pydantic import Field

from learner_service.workload import MeshLayout, WorkloadContext, WorkloadDefaults
from learner_service.workloads.options import Options, parse_options
from learner_service.workloads.sharding import fsdp_layout

INPUT_WIDTH = 8
EVAL_EXAMPLES = 256
TEACHER_WIDTH = 16

Item = TypeVar("Item")


class SyntheticOptions(Options):
    """Options of the workload, `[workload] options` of the run file."""

    parameter_count: int = Field(20_000, ge=100)
    """Parameters wanted; met as closely as whole layers allow."""

    layer_count: int = Field(4, ge=1, le=99)
    """Square hidden layers; each is two tensors."""

    batch_size: int = Field(32, ge=1)
    """Examples per step, the unit in which the learner gets credit."""

    learning_rate: float = Field(0.01, gt=0)
    """Peak of the inner AdamW."""

    noise: float = Field(0.1, ge=0)
    """Standard deviation of what is added to every target; the loss cannot fall below its square."""

    step_seconds: float = Field(0.0, ge=0)
    """Shortest time between two batches, for a learner of known speed."""

    fsdp_device_count: int = Field(0, ge=0)
    """Shard parameters and batches over so many local devices; 0 uses one device and no mesh."""


def factory(context: WorkloadContext) -> Synthetic:
    """Makes the workload.

    Raises:
        WorkloadError: an unknown option, or a value of the wrong type or out of range.
    """
    return Synthetic(context, parse_options(SyntheticOptions, context.options, "the synthetic workload"))


class Synthetic(WorkloadDefaults):
    """Regression on the outputs of a fixed network, see `learner_service.workload.Workload`.

    Args:
        context: of the run.
        options: its options, checked.
        clock: monotonic seconds, for `step_seconds`.
        wait: waits for that many seconds.
    """

    def __init__(
        self,
        context: WorkloadContext,
        options: SyntheticOptions,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.options = options
        self.width = hidden_width(options)
        self._seed = context.seed
        self._total_steps = context.total_steps
        self._clock = clock
        self._wait = wait
        generator = np.random.default_rng([context.seed, 0])
        self._teacher_in = generator.standard_normal((INPUT_WIDTH, TEACHER_WIDTH)) / math.sqrt(INPUT_WIDTH)
        self._teacher_out = generator.standard_normal(TEACHER_WIDTH) / math.sqrt(TEACHER_WIDTH)
        self._heldout = self._examples(np.random.default_rng([context.seed, 1]), EVAL_EXAMPLES)
        self._loss = jax.jit(self.loss)

    def init(self, seed: int) -> dict[str, Any]:
        """Returns {"embedding": [inputs, w], "layer_00": {"kernel": [w, w], "bias": [w]}, ..., "head": [w]}."""
        generator = np.random.default_rng(seed)
        width = self.width

        def matrix(fan_in: int, *shape: int) -> jax.Array:
            return jnp.asarray(generator.standard_normal((fan_in, *shape), np.float32) / np.float32(math.sqrt(fan_in)))

        params: dict[str, Any] = {"embedding": matrix(INPUT_WIDTH, width)}
        for layer in range(self.options.layer_count):
            bias = jnp.asarray(np.zeros(width, np.float32))
            params[f"layer_{layer:02d}"] = {"kernel": matrix(width, width), "bias": bias}
        return {**params, "head": matrix(width)}

    def loss(self, params: dict[str, Any], batch: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the mean squared error on {"inputs": [n, inputs], "targets": [n]}."""
        x = batch["inputs"] @ params["embedding"]
        for layer in range(self.options.layer_count):
            tensors = params[f"layer_{layer:02d}"]
            x = x + jnp.tanh(x @ tensors["kernel"] + tensors["bias"])
        return jnp.mean((x @ params["head"] - batch["targets"]) ** 2)

    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW at learning rate 1 behind a clip of the global norm."""
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1.0, weight_decay=1e-3))

    def learning_rate(self, schedule_step: int) -> float:
        """Returns a rate that falls linearly from its peak to a tenth of it at the run's last step."""
        progress = min(1.0, schedule_step / self._total_steps)
        return self.options.learning_rate * (1.0 - 0.9 * progress)

    def data(self, slot: int, cursor: int) -> Iterator[dict[str, np.ndarray]]:
        """Yields {"inputs": float32 [n, inputs], "targets": float32 [n]}, no faster than `step_seconds` allows."""
        batches = (
            self._examples(np.random.default_rng([self._seed, 2, slot, number]), self.options.batch_size)
            for number in count(cursor)
        )
        if not self.options.step_seconds:
            return batches
        return paced(batches, self.options.step_seconds, self._clock, self._wait)

    def batch_tokens(self, batch: Mapping[str, np.ndarray]) -> int:
        """Returns the number of examples."""
        return len(batch["targets"])

    def evaluate(self, params: dict[str, Any]) -> dict[str, float]:
        """Returns "loss" on examples that no slot has."""
        return {"loss": float(self._loss(params, self._heldout))}

    def mesh(self) -> MeshLayout | None:
        """Returns a mesh of `fsdp_device_count` devices, or None where it is 0."""
        return fsdp_layout(self.options.fsdp_device_count)

    def _examples(self, generator: np.random.Generator, number: int) -> dict[str, np.ndarray]:
        """Random inputs and what the fixed network makes of them, with noise."""
        inputs = generator.standard_normal((number, INPUT_WIDTH))
        targets = np.tanh(inputs @ self._teacher_in) @ self._teacher_out
        targets = targets + self.options.noise * generator.standard_normal(number)
        return {"inputs": inputs.astype(np.float32), "targets": targets.astype(np.float32)}


def paced(
    batches: Iterator[Item],
    step_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Iterator[Item]:
    """Yields the batches no faster than one per `step_seconds`, to give a learner a known speed.

    A step that takes longer by itself is not made longer, and the time lost is not caught up.

    Args:
        batches: what to yield.
        step_seconds: shortest time between two batches, >= 0.
        clock: monotonic seconds.
        wait: waits for that many seconds.
    """
    earliest = clock()
    for batch in batches:
        while (left := earliest - clock()) > 0:
            wait(left)
        earliest = clock() + step_seconds
        yield batch


def hidden_width(options: SyntheticOptions) -> int:
    """Returns the width with which the parameters come closest to the number wanted.

    layers * (w^2 + w) + (inputs + 1) * w parameters, solved for w.
    """
    square, linear = options.layer_count, options.layer_count + INPUT_WIDTH + 1
    width = (math.sqrt(linear**2 + 4 * square * options.parameter_count) - linear) / (2 * square)
    return max(1, round(width))
