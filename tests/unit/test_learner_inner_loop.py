"""The learner service's own loop: which batch, which rate, how long a step lasts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import jax.numpy as jnp
import pytest

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.runtime.clock import ManualClock
from learner_service.checked_workload import CheckedWorkload
from learner_service.inner_loop import InnerLoop, WarmUp
from learner_service.session import Session
from learner_service.step import InnerStep
from learner_service.workload import Workload, WorkloadError


class ScriptedSession:
    """A session of some steps; `jumps` moves the cursor and `restarts` renews the optimizer after a step."""

    def __init__(self, step_count: int, schedule_from: int = 0, **script: Any) -> None:
        self.slot, self.cursor = 3, 0
        self.schedule_step = schedule_from
        self.restart_optimizer = False
        self.optimizer_recovered = bool(script.get("recovered", False))
        self._left = step_count
        self._made = 0
        self._jumps: dict[int, int] = script.get("jumps", {})
        self._restarts: set[int] = script.get("restarts", set())

    @property
    def finished(self) -> bool:
        return self._left == 0

    @contextmanager
    def activity(self, _: object) -> Iterator[None]:
        yield

    def start(self, params: Any, *, optimizer_state: Any) -> Any:
        return params, optimizer_state

    def step_under_way(self) -> None:
        pass

    def step_boundary(self, params: Any, *, tokens: int, loss: Any, optimizer_state: Any) -> Any:
        assert tokens == 7
        self._left -= 1
        self._made += 1
        self.schedule_step += 1
        self.cursor = self._jumps.get(self._made, self.cursor + 1)
        self.restart_optimizer = self._made in self._restarts
        return params, optimizer_state


class Record:
    """A workload and its step in one; notes what it is called with."""

    def __init__(self, step_seconds: float = 0.0, length: int | None = None) -> None:
        self.clock = ManualClock()
        self.opened: list[tuple[int, int]] = []
        self.batches: list[tuple[int, int]] = []
        self.rates: list[float] = []
        self.fresh_count = 0
        self._step_seconds = step_seconds
        self._length = length

    def data(self, slot: int, cursor: int) -> Iterator[tuple[int, int]]:
        self.opened.append((slot, cursor))
        numbers = count(cursor) if self._length is None else iter(range(cursor, self._length))
        return ((slot, number) for number in numbers)

    def learning_rate(self, schedule_step: int) -> float:
        return 100.0 + schedule_step

    def batch_tokens(self, _: object) -> int:
        return 7

    def is_compiled_for(self, _: object) -> bool:
        return True

    def compile(self, *_: object) -> None:
        assert not gc.isenabled()

    def warm(self, params: Any) -> Any:
        return params

    def fresh_state(self, _: object) -> str:
        self.fresh_count += 1
        return "fresh"

    def __call__(self, params: Any, state: Any, batch: Any, rate: float) -> tuple[Any, Any, Any]:
        self.clock.advance(self._step_seconds)
        self.batches.append(batch)
        self.rates.append(rate)
        return params, "used", jnp.zeros(())


def loop_of(record: Record, session: ScriptedSession, ramp: int = 0, step_seconds_min: float = 0.0) -> InnerLoop:
    return InnerLoop(
        CheckedWorkload(cast(Workload, record), "some:factory"),
        cast(InnerStep, record),
        cast(Session, session),
        WarmUp(ramp),
        step_seconds_min,
        record.clock,
        record.clock.advance,
    )


def run(record: Record, session: ScriptedSession, ramp: int = 0, step_seconds_min: float = 0.0) -> None:
    loop_of(record, session, ramp, step_seconds_min).run("params", "state")


def test_batches_follow_the_cursor_and_the_rate_follows_the_runs_step() -> None:
    record = Record()
    run(record, ScriptedSession(3), ramp=4)
    assert record.batches == [(3, 0), (3, 1), (3, 2)]
    assert record.opened == [(3, 0)]
    assert record.rates == [100.0, 101.0, 102.0], "no ramp at the start of a run: the schedule has its own"


def test_a_cursor_that_jumps_back_opens_the_data_there() -> None:
    record = Record()
    run(record, ScriptedSession(5, jumps={3: 1}))
    assert record.batches == [(3, 0), (3, 1), (3, 2), (3, 1), (3, 2)]
    assert record.opened == [(3, 0), (3, 1)]


def test_a_late_joiner_warms_up_at_the_rate_of_the_runs_step() -> None:
    record = Record()
    run(record, ScriptedSession(3, schedule_from=900), ramp=2)
    assert record.rates == [500.0, 1001.0, 1002.0]


def test_a_late_joiner_with_the_state_of_a_peer_needs_no_ramp() -> None:
    record = Record()
    run(record, ScriptedSession(3, schedule_from=900, recovered=True), ramp=2)
    assert record.rates == [1000.0, 1001.0, 1002.0]


def test_a_recovery_renews_the_optimizer_and_warms_up() -> None:
    record = Record()
    run(record, ScriptedSession(4, restarts={2}), ramp=2)
    assert record.fresh_count == 1
    assert record.rates == [100.0, 101.0, 51.0, 103.0]


@pytest.mark.parametrize(("own", "seconds"), [(0.3, 1.0), (1.7, 1.7)])
def test_short_steps_are_padded_and_long_ones_left_alone(own: float, seconds: float) -> None:
    record = Record(step_seconds=own)
    run(record, ScriptedSession(4), step_seconds_min=1.0)
    assert record.clock.now() == pytest.approx(4 * seconds)


def test_data_that_ends_is_the_workloads_fault() -> None:
    with pytest.raises(WorkloadError, match=r"data\(slot=3, cursor=0\) ended after 2 batches"):
        run(Record(length=2), ScriptedSession(5))


def test_the_collector_works_again_once_all_programs_are_there() -> None:
    record = Record()
    gc.disable()
    try:
        prepared = loop_of(record, ScriptedSession(0)).prepare("params", cast(DeviceFragments, record))
        assert prepared == ("params", "fresh")
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()
