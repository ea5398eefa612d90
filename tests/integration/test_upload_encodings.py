"""Contributions in every encoding over real sockets: rounds commit, both sides hold equal bits, the sums are right."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import ENCODINGS
from decoupled_diloco.arrays.fragments import fragment_schema, gather
from decoupled_diloco.core.ids import Fate, RunPhase
from learner_service.error_feedback import ErrorFeedback
from learner_service.workload import MergeRule
from tests.integration.learner_threads import Trainee, pull, start_values, train
from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.protocol_link import TINY_SCHEMA
from tests.integration.syncers import config_of, machine_of, syncer

# ---- whole runs ------------------------------------------------------------------------------------------------------


class Writing(ProtocolLearner):
    """A learner with an encoding of its own, whatever the run says; and what it has sent."""

    encoding = ""

    async def _join(self) -> None:
        await super()._join()
        if self.encoding:
            self.policy = self.policy.changed(upload_encoding=self.encoding)


async def whole_run(tmp_path: Any, upload: str, *own: str) -> tuple[list[Writing], Any]:
    """A run to its end; returns its learners and the syncer's machine.

    Args:
        tmp_path: for the syncer.
        upload: what the run says.
        own: what each learner writes; "": what the run says.
    """
    config = config_of(run={"total_steps": 32}, quorum={"minimum": 2}, encoding={"upload": upload, "download": "bf16"})
    async with syncer(tmp_path, config) as running:
        address = str(running.addresses.data)
        team = []
        for seed, (name, encoding) in enumerate(zip("abc", own, strict=True)):
            team.append(Writing(address, name, config.to_policy(), Script(seed=seed)))
            team[-1].encoding = encoding
        async with asyncio.timeout(30):
            await asyncio.gather(*(learner.run() for learner in team))
            tensors = load_file(await running.ending.exported)
        machine = machine_of(running)
        fragments = fragment_schema(TINY_SCHEMA, 4).fragments
        assert [vector_digest(gather(fragment, tensors)) for fragment in fragments] == [
            version.digest for _, version, _ in machine.published()
        ]
        return team, machine


def check_run(team: list[Writing], machine: Any) -> None:
    """The run finished, everybody's contributions were taken, and everybody held the syncer's bits all the time."""
    assert machine.phase is RunPhase.FINISHED
    assert machine.rounds.committed_count >= 16
    for learner in team:
        fates = list(learner.fates.values())
        assert set(fates) <= {Fate.ACCEPTED, Fate.LATE, Fate.ABORTED}
        assert fates.count(Fate.ACCEPTED) >= 8
        assert len(learner.applied) > 8
        assert [digest for _, _, digest in learner.applied] == [version.digest for _, version, _ in learner.applied]


@pytest.mark.parametrize("upload", list(ENCODINGS))
async def test_a_run_in_each_encoding_commits_and_both_sides_hold_equal_bits(tmp_path, upload):
    check_run(*await whole_run(tmp_path, upload, "", "", ""))


async def test_contributions_to_one_round_may_differ_in_their_encoding(tmp_path):
    team, machine = await whole_run(tmp_path, "bf16", "float32", "int8", "int4")
    check_run(team, machine)
    together = set.intersection(*({r for r, fate in each.fates.items() if fate is Fate.ACCEPTED} for each in team))
    assert together, "no round had all three"


# ---- the arithmetic, by hand -----------------------------------------------------------------------------------------

LENGTHS = [1, 4, 4, 4, 4]
"""Steps to each round: with one fragment and H = 4, the round of global step t is due after t + 1 steps."""
CODE_MAX = {"int8": 127, "int4": 7}


def rate(step: int) -> float:
    return 0.3 / (1.0 + step)


def as_read(values: np.ndarray, encoding: str) -> np.ndarray:
    """What the syncer reads of a delta of one block: multiples of a scale in bf16, rounded up from the largest."""
    largest = np.float32(np.abs(values).max())
    exact = largest / np.float32(CODE_MAX[encoding])
    scale = np.float32(exact.astype(ml_dtypes.bfloat16))
    if scale < exact:
        scale = np.float32(np.nextafter(exact.astype(ml_dtypes.bfloat16), ml_dtypes.bfloat16(np.inf)))
    return np.rint(values / scale) * scale


def theta_by_hand(targets: list[Any], encoding: str, feeds_back: bool) -> tuple[np.ndarray, float]:
    """Theta after the last round, and the largest error that was fed back. Plain means of what was read."""
    names = sorted(start_values())
    shapes = {name: np.shape(value) for name, value in start_values().items()}
    ends = np.cumsum([int(np.prod(shapes[name])) for name in names])

    def unravel(flat: np.ndarray) -> dict[str, np.ndarray]:
        parts = np.split(flat.astype(np.float32), ends[:-1])
        return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}

    def ravel(tree: dict[str, Any]) -> np.ndarray:
        return np.concatenate([np.ravel(np.asarray(tree[name])) for name in names])

    theta = ravel(start_values())
    assert theta.size < 128  # one block
    momentum = np.zeros_like(theta)
    errors = [np.zeros_like(theta) for _ in targets]
    largest, step = 0.0, 0
    for length in LENGTHS:
        read = []
        for number, target in enumerate(targets):
            params = unravel(theta)
            for own in range(step, step + length):
                params, _ = pull(params, target, rate(own))
            whole = ravel(params) - theta + errors[number]
            read.append(as_read(whole, encoding))
            if feeds_back:
                errors[number] = whole - read[-1]
                largest = max(largest, float(np.abs(errors[number]).max()))
        step += length
        merged = -np.mean(read, axis=0)
        momentum = 0.9 * momentum + merged
        theta = theta - 0.7 * (merged + 0.9 * momentum)
    return theta, largest


def everywhere_avg(name: str, shape: tuple[int, ...]) -> MergeRule:
    return MergeRule("avg")


@pytest.mark.parametrize("feeds_back", [False, True])
@pytest.mark.parametrize("encoding", ["int8", "int4"])
async def test_learners_with_and_without_error_feedback_end_where_the_formulas_end(tmp_path, encoding, feeds_back):
    config = config_of(
        run={"total_steps": 20},
        fragments={"count": 1, "interval_steps": 4, "overlap_steps": 0},
        quorum={"minimum": 2, "last_call": "off"},
        outer={"learning_rate": 0.7, "momentum": 0.9},
        inner={"barrier": True},
        encoding={"upload": encoding, "error_feedback": feeds_back},
    )
    targets = [start_values(5), start_values(6)]
    async with syncer(tmp_path, config) as running:
        trainees = [Trainee(name, target, rate=rate) for name, target in zip("ab", targets, strict=True)]
        await train(running, config, *trainees, merge_rule=everywhere_avg)
        model = load_file(await running.ending.exported)
        assert machine_of(running).rounds.committed_count == len(LENGTHS)
    found = np.concatenate([model[name].ravel() for name in sorted(model)])
    wanted, error = theta_by_hand(targets, encoding, feeds_back)
    other, _ = theta_by_hand(targets, encoding, not feeds_back)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=4e-6)
    assert np.abs(wanted - other).max() > (1e-3 if encoding == "int4" else 1e-5)
    assert (error > 0.0) == feeds_back


async def test_a_learner_that_starts_over_forgets_what_was_dropped(tmp_path, monkeypatch):
    told: dict[ErrorFeedback, list[str]] = defaultdict(list)
    forget, carried = ErrorFeedback.forget, ErrorFeedback.carried

    def noted_forget(self: ErrorFeedback) -> None:
        told[self].append("forgotten")
        forget(self)

    def noted_carried(self: ErrorFeedback, round_number: int, fragment: int) -> np.ndarray | None:
        found = carried(self, round_number, fragment)
        told[self].append("nothing" if found is None else "something")
        return found

    monkeypatch.setattr(ErrorFeedback, "forget", noted_forget)
    monkeypatch.setattr(ErrorFeedback, "carried", noted_carried)
    config = config_of(
        run={"total_steps": 48},
        fragments={"count": 1, "interval_steps": 4, "overlap_steps": 1},
        encoding={"upload": "int4", "error_feedback": True},
    )
    async with syncer(tmp_path, config) as running:
        trainees = [Trainee(name, start_values(seed), step_seconds=0.01) for seed, name in enumerate("ab", start=5)]
        trainees[0].loss_of = lambda number, loss: loss * np.nan if number == 20 else loss
        await train(running, config, *trainees)
        assert [len(trainee.restarts) for trainee in trainees] == [1, 0]
    steady, starts_over = sorted(told.values(), key=lambda words: words.count("forgotten"))
    assert set(steady) == {"nothing", "something"}
    moment = starts_over.index("forgotten")
    assert "something" in starts_over[:moment]
    assert starts_over[moment + 1] == "nothing"
    assert "something" in starts_over[moment + 2 :]
