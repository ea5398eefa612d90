"""Learners in library mode that hand their optimizer's state over, each in a thread of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import decoupled_diloco
from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments, Payload
from decoupled_diloco.config import RunConfig
from learner_service.session import Session
from tests.integration.learner_threads import TOKENS, eventually, start_values

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def step_of(optimizer: optax.GradientTransformation) -> Callable[[Any, Any, Any], tuple[Any, Any, Any]]:
    """A jitted step towards some targets; donates parameters and state."""

    def loss_of(params: Any, targets: Any) -> jax.Array:
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(targets), strict=True)
        return jnp.sum(jnp.stack([jnp.sum((a - b) ** 2) for a, b in pairs]))

    def step(params: Any, state: Any, targets: Any) -> tuple[Any, Any, Any]:
        loss, slopes = jax.value_and_grad(loss_of)(params, targets)
        updates, state = optimizer.update(slopes, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


@dataclass
class Adept:
    """One learner's loop and what its optimizer's state was.

    Attributes:
        states: after each step, before its boundary; on the host.
        begun: the state that `start` returned.
        recovered: whether that was somebody else's.
        renewed: by step, whether the state of a restart was somebody else's.
    """

    name: str
    seed: int = 1
    optimizer: optax.GradientTransformation = OPTIMIZER
    step_seconds: float = 0.01
    loss_of: Callable[[int, Any], Any] = lambda _, loss: loss
    params: Any = field(default_factory=start_values)
    states: list[Any] = field(default_factory=list)
    begun: Any = None
    recovered: bool | None = None
    renewed: dict[int, bool] = field(default_factory=dict)
    session: Session | None = None
    stops: bool = False

    def run(self, address: str, config: RunConfig, **settings: object) -> None:
        """Trains until it is told to stop."""
        step, targets = step_of(self.optimizer), start_values(self.seed)
        state = self.optimizer.init(self.params)
        with decoupled_diloco.learner(
            config, self.params, **({"learner_id": self.name, "syncer": (address,)} | settings)
        ) as d:
            self.session = d
            params, state = d.start(optimizer_state=state)
            self.begun, self.recovered = jax.device_get(state), d.optimizer_recovered
            while not d.finished and not self.stops:
                until = time.monotonic() + self.step_seconds
                params, state, loss = step(params, state, targets)
                time.sleep(max(0.0, until - time.monotonic()))
                self.states.append(jax.tree.map(np.array, jax.device_get(state)))
                number = len(self.states)
                params, state = d.step_boundary(
                    params, tokens=TOKENS, loss=self.loss_of(number, loss), optimizer_state=state
                )
                if d.optimizer_recovered or d.restart_optimizer:
                    self.renewed[number] = d.optimizer_recovered
                    if d.restart_optimizer:
                        state = self.optimizer.init(params)

    async def has_steps(self, count: int) -> None:
        """Waits until so many more steps are made."""
        wanted = len(self.states) + count
        await eventually(lambda: len(self.states) >= wanted)

    def payloads(self, state: Any) -> list[Payload]:
        """The parts of a state, as bytes."""
        parts = self.parts
        return [parts.copy(state, part).to_host() for part in range(parts.part_count)]

    @property
    def parts(self) -> OptimizerFragments:
        """How its state is cut."""
        assert self.session is not None
        found = self.session._optimizer._copies.fragments
        assert found is not None
        return found


@asynccontextmanager
async def training(address: str, config: RunConfig, *adepts: Adept, **settings: object) -> Any:
    """The learners train in threads while the context lasts; what one of them raises fails the test."""
    tasks = [asyncio.create_task(asyncio.to_thread(adept.run, address, config, **settings)) for adept in adepts]
    try:
        yield tasks
    finally:
        for adept in adepts:
            adept.stops = True
            if adept.session is not None:
                adept.session._driver._post(lambda driver=adept.session._driver: driver._end("the test is over"))
        async with asyncio.timeout(30):
            await asyncio.gather(*tasks)
