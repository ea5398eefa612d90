"""The parts of the benchmark of the learner's overlap."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.overlap import CASES, Case, figures_of, measured
from benchmarks.overlap_run import Block, Stopwatch

BARE = Block(period=0.1, compute=0.05, late=0.0, boundary=0.0002)
OWN = Block(
    period=0.101,
    compute=0.052,
    late=0.0,
    boundary=0.0012,
    items={"plan": 0.0003},
    counts={"copied fragments": 2.0, "uploads": 0.5},
    upload=0.02,
    device_bytes=30,
    parameter_bytes=100,
)
DEVICES = {
    "copy_call": 0.0001,
    "copy_device": 0.0002,
    "apply_call": 0.0001,
    "apply_device": 0.0,
    "host_bytes_per_second": 2e9,
}


def test_the_lost_share_is_what_lies_between_steps_less_what_that_takes_without_synchronisation() -> None:
    blocks = {"session": [dataclasses.asdict(OWN)] * 3, "baseline": [dataclasses.asdict(BARE)] * 3}
    result = {"device": "cpu", "devices": DEVICES, "blocks": blocks}
    case = Case("case", {}, 0.1, 1.0, 3, 3)
    figures = {figure.name.removeprefix("case: "): figure for figure in figures_of(case, result)}
    lost = figures["share lost between steps"]
    assert lost.value == pytest.approx(1.0)
    assert lost.target is not None
    assert figures["step rate beside steps without it"].value == pytest.approx(0.1 / 0.101)
    assert figures["plan"].value == pytest.approx(0.3)
    assert figures["one copy, from the call to its end on the device"].value == pytest.approx(0.3)
    assert figures["copies and staged versions on the devices"].value == pytest.approx(0.3)
    assert figures["the device thread waited for the network"].is_met


def test_a_stopwatch_counts_only_while_it_runs() -> None:
    class Owner:
        def work(self, number: int) -> int:
            return number + 1

    owner, watch = Owner(), Stopwatch()
    watch.watch(owner, "work", "work")
    assert owner.work(1) == 2
    assert not watch.counts
    watch.is_on = True
    assert owner.work(2) == 3
    assert watch.counts == {"work": 1}


@pytest.mark.slow
def test_a_block_of_a_real_learner_is_measured_from_its_uploads_to_its_memory(tmp_path: Path) -> None:
    demo = dataclasses.replace(CASES[1], options={"sequence_length": 16}, steps=24, repetitions=1)
    result = measured(demo, tmp_path / "run", tmp_path / "cache")
    (own,), (bare,) = result["blocks"]["session"], result["blocks"]["baseline"]
    assert own["counts"]["uploads"] > 0
    assert own["counts"]["apply"] > 0
    assert own["network_wait"] == 0.0
    assert 0 < own["device_bytes"] <= own["parameter_bytes"], "less than one copy of everything"
    assert not bare["items"]
    assert json.dumps(result)
