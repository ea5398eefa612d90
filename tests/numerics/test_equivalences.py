"""In barrier mode the arithmetic is that of algorithms that are known: DiLoCo, Streaming DiLoCo, plain training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import gather
from decoupled_diloco.arrays.outer import FragmentState, outer_step
from tests.numerics.barrier_run import (
    OPTIMIZER,
    Learner,
    Params,
    Run,
    Settings,
    avg_everywhere,
    barrier_run,
    batch,
    due_fragments,
    initial_params,
    inner_step,
    learning_rate,
    loss,
    rda_but_embeddings,
)

FLOAT32_ROUNDING = {"rtol": 0.0, "atol": 4e-6}


def plain_training(seed: int, steps: int = 64) -> Params:
    params = initial_params()
    moments = OPTIMIZER.init(params)
    for step in range(steps):
        params, moments = inner_step(params, moments, batch(seed, step), jnp.float32(learning_rate(step)))
    return params


def flats(params: Params, run: Run) -> list[FloatVector]:
    host = {name: np.asarray(leaf) for name, leaf in params.items()}
    return [gather(fragment, host) for fragment in run.fragmentation.fragments]


def diloco(settings: Settings, run: Run) -> list[FloatVector]:
    """Textbook DiLoCo, per fragment as in Streaming DiLoCo: a plain mean of deltas, and optax for the outer step."""
    outer = optax.sgd(settings.lr, momentum=settings.mu, nesterov=True)
    update = jax.jit(outer.update)
    shapes = {name: leaf.shape for name, leaf in initial_params().items()}
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    numbers = {
        name: np.arange(end - np.prod(shape), end).reshape(shape)
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }
    members = [gather(fragment, numbers).astype(int) for fragment in run.fragmentation.fragments]

    def ravel(params: Params) -> FloatVector:
        return np.concatenate([np.asarray(params[name]).ravel() for name in shapes])

    theta = ravel(initial_params())
    outer_states = [outer.init(jnp.asarray(theta[member])) for member in members]
    models = [initial_params() for _ in settings.seeds]
    moments = [OPTIMIZER.init(model) for model in models]
    for step in range(settings.steps):
        for m, seed in enumerate(settings.seeds):
            rate = jnp.float32(learning_rate(step))
            models[m], moments[m] = inner_step(models[m], moments[m], batch(seed, step), rate)
        for index in due_fragments(step, settings):
            member = members[index]
            vectors = [ravel(model) for model in models]
            mean = np.mean([theta[member] - vector[member] for vector in vectors], axis=0, dtype=np.float32)
            updates, outer_states[index] = update(mean, outer_states[index])
            theta[member] += np.asarray(updates)
            for m, vector in enumerate(vectors):
                vector[member] = theta[member]
                models[m] = {name: jnp.array(vector[number]) for name, number in numbers.items()}
    return [theta[member] for member in members]


@pytest.mark.parametrize(("fragment_count", "lr", "mu"), [(1, 0.7, 0.9), (1, 0.6, 0.5), (4, 0.7, 0.9)])
def test_all_learners_in_every_round_is_diloco_and_streaming_diloco(fragment_count: int, lr: float, mu: float) -> None:
    settings = Settings(seeds=(1, 2, 3), fragment_count=fragment_count, lr=lr, mu=mu, rule=avg_everywhere, steps=40)
    run = barrier_run(settings)
    for ours, theirs in zip(run.theta, diloco(settings, run), strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32_ROUNDING)


@pytest.mark.parametrize("fragment_count", [1, 4])
@pytest.mark.parametrize("rule", [rda_but_embeddings, avg_everywhere])
def test_one_learner_with_an_outer_step_of_one_is_plain_training(fragment_count: int, rule: Any) -> None:
    """With a learning-rate schedule, and with the optimizer's moments left alone."""
    run = barrier_run(Settings(seeds=(1,), fragment_count=fragment_count, lr=1.0, mu=0.0, rule=rule))
    plain = plain_training(1)
    (learner,) = run.learners
    for ours, theirs in zip(flats(learner.params, run), flats(plain, run), strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32_ROUNDING)
    assert float(loss(plain, batch(99, 0))) < 0.5 * float(loss(initial_params(), batch(99, 0)))


def test_a_step_of_one_without_momentum_takes_the_learners_value() -> None:
    rng = np.random.default_rng(0)
    theta = rng.standard_normal(1000).astype(np.float32)
    learner = (theta + rng.standard_normal(1000) * 1e-3).astype(np.float32)
    state = FragmentState.initial(theta)
    after = outer_step(state, theta - learner, learning_rate=1.0, mu=0.0, download_encoding="float32").state
    np.testing.assert_allclose(after.theta, learner, rtol=2**-23)


@pytest.mark.parametrize("fragment_count", [1, 4])
def test_learners_that_are_all_alike_are_one_learner(fragment_count: int) -> None:
    alike = Settings(seeds=(5, 5, 5), fragment_count=fragment_count)
    one = Settings(seeds=(5,), fragment_count=fragment_count)
    for ours, alone in zip(barrier_run(alike).theta, barrier_run(one).theta, strict=True):
        np.testing.assert_allclose(ours, alone, **FLOAT32_ROUNDING)


def test_rda_is_avg_where_learners_are_all_alike() -> None:
    # Without cuts, so that both rules have the same flat vector.
    rda, avg = (barrier_run(Settings(seeds=(5, 5), rule=rule)) for rule in (rda_but_embeddings, avg_everywhere))
    for ours, theirs in zip(rda.theta, avg.theta, strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32_ROUNDING)


def test_the_same_run_twice_gives_the_same_bits() -> None:
    settings = Settings(seeds=(1, 2), fragment_count=4, upload="bf16", download="bf16", steps=24)
    assert barrier_run(settings).digests_of_syncer() == barrier_run(settings).digests_of_syncer()


def test_after_two_hundred_rounds_every_learner_holds_the_bits_of_the_syncer() -> None:
    settings = Settings(seeds=(1, 2, 3), fragment_count=8, lr=0.6, mu=0.5, upload="bf16", download="bf16", steps=200)
    run = barrier_run(settings)
    for learner in run.learners:
        assert run.digests_of(learner) == run.digests_of_syncer()


def test_bf16_on_the_wire_costs_no_loss() -> None:
    def final_loss(encoding: str) -> float:
        run = barrier_run(Settings(seeds=(1, 2), fragment_count=4, lr=0.6, mu=0.5, upload=encoding, download=encoding))
        return float(loss(run.learners[0].params, batch(99, 0)))

    assert final_loss("bf16") == pytest.approx(final_loss("float32"), rel=0.02)


def test_carry_makes_a_late_fragment_of_a_single_learner_invisible() -> None:
    """M = 1, lr 1, mu 0, and every fragment arrives two steps after its copy: still plain training."""
    settings = Settings(seeds=(1,), fragment_count=4, lr=1.0, mu=0.0)
    run = barrier_run(Settings(seeds=(1,), fragment_count=4, steps=0))
    learner: Learner = run.learners[0]
    on_the_way: dict[int, list[tuple[int, Any]]] = {}
    for step in range(settings.steps):
        learner.step(step)
        for index, copy in on_the_way.pop(step, []):
            published = copy.to_host()
            learner.params = learner.fragments.carry(learner.params, learner.fragments.stage(index, published), copy)
        for index in due_fragments(step, settings):
            copy = learner.fragments.copy(learner.params, [index])[index]
            on_the_way.setdefault(step + 2, []).append((index, copy))
    for ours, theirs in zip(flats(learner.params, run), flats(plain_training(1), run), strict=True):
        np.testing.assert_allclose(ours, theirs, **FLOAT32_ROUNDING)


def test_the_reference_trains() -> None:
    """A model that stood still would agree with anything."""
    start, end = initial_params(), plain_training(1)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), start, end)
    assert min(moved.values()) > 0.05
