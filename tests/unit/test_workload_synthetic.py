"""The synthetic workload: deterministic, learnable, of the size and speed that is asked for."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import pytest

from decoupled_diloco.arrays.tree import ParameterTree
from learner_service.workload import Workload, WorkloadContext, WorkloadError, load_workload
from learner_service.workloads.options import parse_options
from learner_service.workloads.synthetic import Synthetic, SyntheticOptions

FACTORY = "learner_service.workloads.synthetic:factory"


def context(**options: object) -> WorkloadContext:
    return WorkloadContext(seed=5, slot_count=2, total_steps=300, cache_dir=Path("unused"), options=options)


def workload(**options: object) -> Workload:
    return load_workload(FACTORY, context(**options))


def test_it_learns_down_to_its_noise() -> None:
    problem = workload(parameter_count=2000, layer_count=2)
    optimizer = problem.optimizer()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, batch: Any, rate: float) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(problem.loss)(params, batch), state, params)
        return jax.tree.map(lambda param, update: param + rate * update, params, updates), state

    params = problem.init(0)
    state, batches, before = optimizer.init(params), problem.data(0, 0), problem.evaluate(params)["loss"]
    for number in range(300):
        params, state = step(params, state, next(batches), problem.learning_rate(number))
    assert 0.1**2 / 2 < problem.evaluate(params)["loss"] < 0.05 * before


@pytest.mark.parametrize("wanted", [1000, 20_000, 1_000_000])
def test_it_has_about_the_parameters_that_are_asked_for(wanted: int) -> None:
    schema = ParameterTree(workload(parameter_count=wanted).init(0), workload().merge_rule).schema
    assert schema.size == pytest.approx(wanted, rel=0.15)
    assert [spec.name for spec in schema.tensors if spec.rule == "avg"] == ["embedding"]


def test_a_batch_follows_from_seed_slot_and_cursor() -> None:
    def targets(slot: int, cursor: int) -> list[float]:
        return next(workload().data(slot, cursor))["targets"].tolist()

    through = workload().data(1, 0)
    assert [next(through)["targets"].tolist() for _ in range(4)][3] == targets(1, 3)
    assert targets(1, 3) != targets(1, 4)
    assert targets(1, 3) != targets(0, 3)


def test_a_padded_step_waits_for_its_time_and_pads_nothing_else() -> None:
    now = 100.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    options = parse_options(SyntheticOptions, {"step_seconds": 2.0}, "the synthetic workload")
    batches = Synthetic(context(), options, clock=lambda: now, wait=wait).data(0, 0)
    starts = []
    for computing in (0.5, 3.0, 0.0):
        next(batches)
        starts.append(now)
        now += computing
    next(batches)
    assert [*starts, now] == [100.0, 102.0, 105.0, 107.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"parameter_count": 5}, "workload.options.parameter_count = 5: input should be greater than or equal to 100."),
        ({"stepseconds": 1}, "did you mean 'step_seconds'? It has parameter_count, "),
        ({"noise": True}, "workload.options.noise = True: "),
        ({"fsdp_device_count": 4096}, None),
    ],
)
def test_wrong_options_are_told(options: dict[str, object], expected: str | None) -> None:
    if expected is None:
        with pytest.raises(WorkloadError, match="fsdp_device_count = 4096, but this process has"):
            workload(**options).mesh()
        return
    with pytest.raises(WorkloadError) as raised:
        workload(**options)
    assert expected in str(raised.value)
