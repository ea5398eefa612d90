"""Learners in library mode, each in a thread of this process, against a syncer in its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decoupled_diloco
from decoupled_diloco.config import RunConfig
from learner_service.session import Session
from syncer_service.app import RunningSyncer

TOKENS = 10
RATE = 0.1


def start_values(seed: int = 0) -> dict[str, Any]:
    """A small tree: an embedding, two stacked layers, a vector and a scalar."""
    generator = np.random.default_rng(seed)
    shapes = {"embed": (6, 4), "layers": (2, 4, 4), "head": (4,), "scale": ()}
    return {name: jnp.asarray(generator.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


@jax.jit
def pull(params: Any, targets: Any, rate: Any) -> tuple[Any, jax.Array]:
    """One step of gradient descent towards `targets`, and the loss before it."""
    loss = sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(targets), strict=True))
    return jax.tree.map(lambda a, b: a - rate * (a - b), params, targets), loss


@dataclass
class Trainee:
    """One learner's loop and what it saw.

    Attributes:
        step_seconds: how long a step lasts at least.
        loss_of: replaces the loss of a step, by its number.
        on_step: called after every boundary.
    """

    name: str
    targets: Any
    params: Any = field(default_factory=start_values)
    step_seconds: float = 0.0
    rate: Callable[[int], float] = lambda _: RATE
    loss_of: Callable[[int, Any], Any] = lambda _, loss: loss
    on_step: Callable[[Session, int], None] = lambda *_: None
    losses: list[float] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    step_count: int = 0
    session: Session | None = None
    stops: bool = False

    def run(self, running: RunningSyncer | str, config: RunConfig, **settings: object) -> Trainee:
        """Trains until the session is finished."""
        address = running if isinstance(running, str) else str(running.addresses.data)
        defaults = {"learner_id": self.name, "syncer": (address,), "verify_applied": True}
        with decoupled_diloco.learner(config, self.params, **(defaults | settings)) as d:
            self.session = d
            params = d.start()
            while not d.finished and not self.stops:
                until = time.monotonic() + self.step_seconds
                params, loss = pull(params, self.targets, self.rate(d.schedule_step))
                time.sleep(max(0.0, until - time.monotonic()))
                self.step_count += 1
                params = d.step_boundary(params, tokens=TOKENS, loss=self.loss_of(self.step_count, loss))
                self.losses.append(float(loss))
                if d.restart_optimizer:
                    self.restarts.append(self.step_count)
                self.on_step(d, self.step_count)
            self.params = params
        return self


async def train(
    running: RunningSyncer | str, config: RunConfig, *trainees: Trainee, seconds: float = 60.0, **settings: object
) -> None:
    """Runs the learners side by side, in threads, to their end; a test that ends before takes them along."""
    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(asyncio.to_thread(t.run, running, config, **settings) for t in trainees))
    finally:
        for trainee in trainees:
            trainee.stops = True
            if trainee.session is not None:
                trainee.session._driver._post(lambda driver=trainee.session._driver: driver._end("the test is over"))


def figure(session: Session, name: str) -> float:
    """One of the learner's metrics."""
    found = session._parts.metrics.telemetry.registry.get_sample_value(f"decoupled_diloco_learner_{name}")
    assert found is not None, name
    return found


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for something that a learner's thread will come to."""

    def poll() -> bool:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.002)
        return condition()

    assert await asyncio.to_thread(poll)
