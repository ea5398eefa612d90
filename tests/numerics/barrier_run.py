"""A run in barrier mode on arrays alone: every learner contributes to every round and waits for its result.

A tiny language model (embedding, stacked layers, read-out) is trained by the modules that the services use; only the
network and the core are left out. After global step t, fragment p is synchronised iff t mod H = floor(p*H/P).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import Encoded, FloatVector, encoding_named
from decoupled_diloco.arrays.fragments import Fragmentation, fragment_schema
from decoupled_diloco.arrays.merge import merge
from decoupled_diloco.arrays.outer import FragmentState, apply_delta, outer_step
from decoupled_diloco.arrays.tree import ParameterTree, TensorRule

VOCABULARY, WIDTH, LAYERS, BATCH, LENGTH = 16, 8, 2, 4, 6
Params = dict[str, jax.Array]
OPTIMIZER = optax.adam(1.0)


def learning_rate(step: int) -> float:
    """Warm-up and cosine over 64 steps."""
    return float(0.02 * min(1.0, (step + 1) / 8) * (0.55 + 0.45 * np.cos(np.pi * step / 64)))


def initial_params() -> Params:
    rng = np.random.default_rng(7)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "layers": (LAYERS, WIDTH, WIDTH),
        "out": (WIDTH, VOCABULARY),
        "bias": (VOCABULARY,),
    }
    return {name: jnp.array(rng.standard_normal(shape) * 0.3, jnp.float32) for name, shape in shapes.items()}


def batch(seed: int, step: int) -> jax.Array:
    """A function of (seed, step), as a slot's data are of (slot, cursor)."""
    start = np.random.default_rng([seed, step]).integers(0, VOCABULARY, (BATCH, 1))
    return jnp.asarray((start + 3 * np.arange(LENGTH + 1)) % VOCABULARY)


def loss(params: Params, tokens: jax.Array) -> jax.Array:
    hidden = params["embed"][tokens[:, :-1]]
    for layer in range(LAYERS):
        hidden = hidden + jnp.tanh(hidden @ params["layers"][layer])
    logits = hidden @ params["out"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()  # type: ignore[no-any-return]


@jax.jit
def inner_step(params: Params, moments: Any, tokens: jax.Array, rate: jax.Array) -> tuple[Params, Any]:
    updates, moments = OPTIMIZER.update(jax.grad(loss)(params, tokens), moments, params)
    return optax.apply_updates(params, jax.tree.map(lambda update: rate * update, updates)), moments  # type: ignore[return-value]


def rda_but_embeddings(name: str, shape: tuple[int, ...]) -> TensorRule:
    rule: Any = SimpleNamespace(rule="avg" if "embed" in name else "rda", stack_axis=0 if name == "layers" else None)
    return rule  # type: ignore[no-any-return]


def avg_everywhere(name: str, shape: tuple[int, ...]) -> TensorRule:
    rule: Any = SimpleNamespace(rule="avg", stack_axis=None)
    return rule  # type: ignore[no-any-return]


@dataclass
class Learner:
    """Trains, hands out copies and takes published fragments; holds each fragment's base as the syncer does."""

    seed: int
    fragmentation: Fragmentation
    fragments: DeviceFragments
    params: Params
    base: dict[int, FloatVector]
    moments: Any = None
    steps_since: dict[int, int] = field(default_factory=dict)

    def step(self, global_step: int) -> None:
        if self.moments is None:
            self.moments = OPTIMIZER.init(self.params)
        rate = jnp.float32(learning_rate(global_step))
        self.params, self.moments = inner_step(self.params, self.moments, batch(self.seed, global_step), rate)
        for index in self.base:
            self.steps_since[index] = self.steps_since.get(index, 0) + 1

    def upload(self, index: int, encoding: str) -> tuple[bytes, float]:
        """Payload and merge weight of a contribution to this fragment."""
        value = self.fragments.copy(self.params, [index])[index].to_host()
        steps = self.steps_since[index]
        tokens = float(steps * BATCH * LENGTH)
        return bytes(encoding_named(encoding).encode(value - self.base[index])), tokens * (tokens / steps)

    def receive(self, index: int, state: FragmentState, delta_payload: memoryview | None, encoding: str) -> None:
        if delta_payload is None:
            self.base[index] = state.theta.copy()
        else:
            self.base[index] = apply_delta(self.base[index], bytes(delta_payload), encoding)
        self.params = self.fragments.overwrite(self.params, self.fragments.stage(index, self.base[index]))
        self.steps_since[index] = 0


@dataclass
class Settings:
    seeds: tuple[int, ...]
    fragment_count: int = 1
    interval: int = 8
    lr: float = 0.7
    mu: float = 0.9
    upload: str = "float32"
    download: str = "float32"
    rule: Callable[[str, tuple[int, ...]], TensorRule] = rda_but_embeddings
    steps: int = 64


@dataclass
class Run:
    """A run after its last step; `theta` is the syncer's value of each fragment."""

    fragmentation: Fragmentation
    states: dict[int, FragmentState]
    learners: list[Learner]

    @property
    def theta(self) -> list[FloatVector]:
        return [self.states[index].theta for index in sorted(self.states)]

    def digests_of_syncer(self) -> list[str]:
        return [vector_digest(theta) for theta in self.theta]

    def digests_of(self, learner: Learner) -> list[str]:
        return [vector_digest(learner.base[index]) for index in sorted(learner.base)]


def due_fragments(step: int, settings: Settings) -> Iterator[int]:
    """The fragments synchronised after this global step."""
    for index in range(settings.fragment_count):
        if step % settings.interval == index * settings.interval // settings.fragment_count:
            yield index


def barrier_run(settings: Settings) -> Run:
    tree = ParameterTree(initial_params(), settings.rule)
    fragmentation = fragment_schema(tree.schema, settings.fragment_count)
    learners = []
    for seed in settings.seeds:
        params = initial_params()
        fragments = DeviceFragments(tree, fragmentation, params)
        copies = fragments.copy(params, range(settings.fragment_count))
        base = {index: copy.to_host() for index, copy in copies.items()}
        learners.append(Learner(seed, fragmentation, fragments, params, base))
    run = Run(fragmentation, {i: FragmentState.initial(flat) for i, flat in learners[0].base.items()}, learners)
    for step in range(settings.steps):
        for learner in learners:
            learner.step(step)
        for index in due_fragments(step, settings):
            synchronise(run, index, settings)
    return run


def synchronise(run: Run, index: int, settings: Settings) -> None:
    size = run.states[index].theta.size
    contributions = [learner.upload(index, settings.upload) for learner in run.learners]
    uploads = [Encoded(payload, settings.upload, size) for payload, _ in contributions]
    weights = [weight for _, weight in contributions]
    delta, _ = merge(uploads, weights, run.fragmentation.fragments[index].segments)
    step = outer_step(
        run.states[index], delta, learning_rate=settings.lr, mu=settings.mu, download_encoding=settings.download
    )
    run.states[index] = step.state
    for learner in run.learners:
        learner.receive(index, step.state, step.delta_payload, settings.download)
