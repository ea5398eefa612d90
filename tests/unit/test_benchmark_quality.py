import json
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import betainc

from benchmarks import quality
from benchmarks.quality import (
    T_95,
    VARIANTS,
    Kept,
    Outcome,
    Size,
    differences,
    interval,
    outcomes,
    section_of,
)
from benchmarks.virtual_run import Model, VirtualRun
from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.core.policy import Policy
from learner_service.step import InnerStep
from learner_service.workload import WorkloadContext, load_workload

SYNTHETIC = "learner_service.workloads.synthetic:factory"
OPTIONS = {"parameter_count": 1000, "layer_count": 2, "batch_size": 8}


def workload(steps):
    return load_workload(SYNTHETIC, WorkloadContext(0, 4, steps, Path("not needed"), OPTIONS))


@cache
def model_of(fragment_count, steps):
    return Model.of(workload(steps), fragment_count)


def digests(run):
    return [vector_digest(np.asarray(leaf).ravel()) for leaf in jax.tree.leaves(run.theta())]


def a_run(learner_count=3, error_feedback=False, **policy):
    chosen = Policy(fragment_count=4, interval_steps=8, total_steps=24, last_call=False).changed(**policy)
    model = model_of(chosen.fragment_count, chosen.total_steps)
    return VirtualRun(model, model.workload, 0, chosen, learner_count, error_feedback).run()


# ---- the run ---------------------------------------------------------------------------------------------------------


def test_one_learner_with_an_outer_step_of_one_loses_the_overlap_and_nothing_else():
    """By hand: after the copy come `overlap` steps, and then the parameters are what was copied; moments stay."""
    total, interval_steps, overlap = 18, 4, 2
    run = a_run(
        learner_count=1, fragment_count=1, interval_steps=interval_steps, overlap_steps=overlap,
        total_steps=total, upload_encoding="float32", download_encoding="float32", outer_learning_rate=1.0,
        outer_momentum=0.0,
    )  # fmt: skip
    made = workload(total)
    step, params = InnerStep(made), made.init(0)
    state, data, copied = step.fresh_state(params), made.data(0, 0), None
    for number in range(total):
        params, state, _ = step(params, state, next(data), made.learning_rate(number))
        if number % interval_steps == overlap and copied is not None:
            params = jax.tree.map(jnp.copy, copied)
        if number % interval_steps == 0:
            copied = jax.tree.map(jnp.copy, params)
    # Global step 16 was copied after 17 steps, its result came when there were no more steps to make.
    assert total - 1 == 17
    for found, wanted in zip(jax.tree.leaves(run.theta()), jax.tree.leaves(copied), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_steps_that_no_round_has_asked_for_are_merged_in_the_end():
    """As above, but the run ends between a result and the next copy."""
    run = a_run(
        learner_count=1, fragment_count=1, interval_steps=8, overlap_steps=1, total_steps=5,
        upload_encoding="float32", download_encoding="float32", outer_learning_rate=1.0, outer_momentum=0.0,
    )  # fmt: skip
    made = workload(5)
    step, params = InnerStep(made), made.init(0)
    state, data = step.fresh_state(params), made.data(0, 0)
    for number in range(5):
        before = jax.tree.map(jnp.copy, params)
        params, state, _ = step(before, state, next(data), made.learning_rate(number))
        if number == 0:
            copied = jax.tree.map(jnp.copy, params)
        if number == 1:
            params = copied
    for found, wanted in zip(jax.tree.leaves(run.theta()), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)


def test_the_same_settings_give_the_same_bits_in_any_thread():
    settings = {"upload_encoding": "int4", "error_feedback": True}
    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(lambda _: a_run(**settings), range(3)))
    assert digests(runs[0]) == digests(runs[1]) == digests(runs[2])
    assert digests(runs[0]) != digests(a_run(**settings | {"error_feedback": False}))


@pytest.mark.parametrize("encoding", ["float32", "bf16", "int4"])
def test_everybody_sends_every_fragment_in_the_runs_encoding(encoding):
    run = a_run(upload_encoding=encoding)
    # Three intervals, and the steps since; the last fragment was copied at global step 22 and has none.
    rounds = [4, 4, 4, 3]
    sizes = [encoding_named(encoding).payload_bytes(size) for size in run.model.fragmentation.sizes]
    assert run.upload_bytes == 3 * np.dot(rounds, sizes)
    assert len(run.errors) == 3 * sum(rounds)
    assert (max(run.errors) == 0.0) == (encoding == "float32")


def test_settings_that_virtual_time_does_not_follow_are_refused():
    for changes in ({"last_call": True}, {"barrier": True}, {"apply_rule": "carry"}, {"overlap_steps": 0}):
        with pytest.raises(ValueError, match="virtual run"):
            a_run(**changes)


# ---- the figures -----------------------------------------------------------------------------------------------------


def test_the_quantiles_are_those_of_students_t():
    for degrees, quantile in enumerate(T_95, start=1):
        outside = float(betainc(degrees / 2, 0.5, degrees / (degrees + quantile**2)))
        assert outside == pytest.approx(0.05, abs=5e-5)


def test_the_interval_is_that_of_the_mean():
    # Standard deviation 1.5811, of the mean 0.7071, times 2.776.
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx((3.0, 1.0371, 4.9629), abs=1e-4)


def outcome(variant, seed, loss):
    return Outcome(variant, seed, 8, loss, 0.0, 0.0)


def test_losses_are_compared_within_their_seed():
    found = [
        outcome("float32", 0, 2.0), outcome("float32", 1, 4.0), outcome("int4", 1, 4.04), outcome("int4", 0, 2.01)
    ]  # fmt: skip
    assert differences(found, "int4") == pytest.approx([0.5, 1.0])


def test_a_small_benchmark_from_training_to_figures(tmp_path, monkeypatch):
    size = Size(seeds=2, steps=26, factory=SYNTHETIC, options={**OPTIONS, "layer_count": 4})
    path = tmp_path / "deeper" / "kept.jsonl"
    found = outcomes(size, tmp_path, Kept(path))
    assert [(each.seed, each.variant) for each in found] == [(s, v.name) for s in range(2) for v in VARIANTS]
    assert len({each.loss for each in found}) == len(found), "every encoding trains another model"
    section = section_of(size, found)
    assert json.loads(json.dumps(section.to_json()))["name"] == "quality"
    named = {figure.name: figure for figure in section.figures}
    upper = named["int4: loss above float32's, upper end of the interval"]
    assert upper.value == named["int4: loss above float32's"].high
    assert upper.target == named["int4: loss above float32's"].target
    assert upper.target.value == 0.5
    assert [figure.name for figure in section.figures if figure.target] == [
        "int4: loss above float32's", "int4: loss above float32's, upper end of the interval"
    ]  # fmt: skip

    monkeypatch.setattr(quality, "Runs", None)  # what was kept is not trained again
    assert outcomes(size, tmp_path, Kept(path)) == found


def test_the_command_refuses_what_has_no_interval(tmp_path, capsys):
    with pytest.raises(SystemExit):
        quality.main(["--seeds", "1", "--cache-dir", str(tmp_path)])
    assert "--seeds 1 --steps 192: 2 to 16 seeds" in capsys.readouterr().err
