"""With the barrier on, a run over the wire is one of the algorithms that it descends from."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from tests.integration.learner_threads import Trainee, pull, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer

TOLERANCE = 2e-6
"""Float32 rounding of some dozen steps."""


def synchronous(learner_count: int, total_steps: int, fragments: int, interval: int, **outer: float) -> Any:
    return config_of(
        run={"total_steps": total_steps},
        fragments={"count": fragments, "interval_steps": interval, "overlap_steps": 0},
        quorum={"minimum": learner_count, "last_call": "off"},
        outer={"learning_rate": 0.7, "momentum": 0.9} | outer,
        inner={"barrier": True},
    )


def schedule(step: int) -> float:
    return 0.3 / (1.0 + step)


def plain_training(params: Any, targets: Any, step_count: int) -> Any:
    for step in range(step_count):
        params, _ = pull(params, targets, schedule(step))
    return params


def close(found: dict[str, np.ndarray], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


async def published_model(running: Any) -> dict[str, np.ndarray]:
    return load_file(await running.ending.exported)


async def test_one_learner_with_outer_rate_1_and_no_momentum_is_plain_training_with_its_schedule(tmp_path):
    config = synchronous(1, 24, fragments=2, interval=4, learning_rate=1.0, momentum=0.0)
    targets = start_values(5)
    async with syncer(tmp_path, config) as running:
        trainee = Trainee("a", targets, rate=schedule)
        await train(running, config, trainee)
        # The last round of 24 steps is that of global step 22, due after 23 steps.
        assert trainee.step_count == 23
        close(await published_model(running), plain_training(start_values(), targets, 23))


async def test_one_fragment_with_everybody_in_the_quorum_is_diloco(tmp_path):
    # The round of global step t is due after t + 1 steps: 1, 5, 9, 13, 17.
    lengths = [1, 4, 4, 4, 4]
    config = synchronous(2, 20, fragments=1, interval=4)
    targets = [start_values(5), start_values(6)]
    async with syncer(tmp_path, config) as running:
        trainees = [Trainee(name, target, rate=schedule) for name, target in zip("ab", targets, strict=True)]
        await train(running, config, *trainees)
        assert [trainee.step_count for trainee in trainees] == [sum(lengths)] * 2
        model = await published_model(running)
        assert machine_of(running).rounds.committed_count == len(lengths)
    theta = {name: np.asarray(value, np.float64) for name, value in start_values().items()}
    momentum = {name: np.zeros_like(value) for name, value in theta.items()}
    for number, length in enumerate(lengths):
        begin = sum(lengths[:number])
        ends = []
        for target in targets:
            params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), theta)
            for step in range(begin, begin + length):
                params, _ = pull(params, target, schedule(step))
            ends.append(params)
        for name, value in theta.items():
            deltas = [value - np.asarray(end[name], np.float64) for end in ends]
            merged = merged_delta(name, deltas)
            momentum[name] = 0.9 * momentum[name] + merged
            theta[name] = value - 0.7 * (merged + 0.9 * momentum[name])
    close(model, theta)


def merged_delta(name: str, deltas: list[np.ndarray]) -> np.ndarray:
    """Equal weights: the mean for the embedding, radial-directional averaging for every other tensor."""
    if name == "embed":
        return np.mean(deltas, axis=0)
    norms = [np.linalg.norm(delta) for delta in deltas]
    direction = np.mean([delta / norm for delta, norm in zip(deltas, norms, strict=True)], axis=0)
    return np.mean(norms) * direction / np.linalg.norm(direction)


async def test_learners_with_the_same_data_end_where_one_of_them_ends(tmp_path):
    targets = start_values(5)
    models = []
    for count in (1, 3):
        config = synchronous(count, 16, fragments=4, interval=8)
        async with syncer(tmp_path / str(count), config) as running:
            trainees = [Trainee(name, targets, rate=schedule) for name in "abc"[:count]]
            await train(running, config, *trainees)
            models.append(await published_model(running))
    close(models[1], models[0])
