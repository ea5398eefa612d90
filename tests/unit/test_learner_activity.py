"""Time accounts, step times, losses and the warm-up ramp of a learner."""

from __future__ import annotations

import math

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.core.ids import Activity
from learner_service.activity import ActivityAccount, StepTimer
from learner_service.inner_loop import WarmUp
from learner_service.losses import LossMeter

REPORTED = [activity for activity in Activity if activity is not Activity.LOST]


def test_every_second_falls_into_exactly_one_activity() -> None:
    account = ActivityAccount(Activity.STARTUP, since=10.0)
    assert account.switch(Activity.COMPILE, 12.0) is Activity.STARTUP
    account.switch(Activity.COMPUTE, 15.0)
    assert dict(account.take(15.5)) == {Activity.STARTUP: 2.0, Activity.COMPILE: 3.0, Activity.COMPUTE: 0.5}
    assert dict(account.take(17.5)) == {Activity.COMPUTE: 2.0}
    assert account.take(17.5) == ()


@given(st.lists(st.tuples(st.sampled_from(REPORTED), st.floats(0, 100), st.booleans()), max_size=30))
def test_reports_add_up_to_the_whole_time_whatever_is_lost_on_the_way(
    steps: list[tuple[Activity, float, bool]],
) -> None:
    account, now, reported = ActivityAccount(Activity.STARTUP, 0.0), 0.0, 0.0
    for activity, seconds, arrives in steps:
        now += seconds
        account.switch(activity, now)
        spans = account.take(now)
        if arrives:
            reported += math.fsum(seconds for _, seconds in spans)
        else:
            account.give_back(spans)
    reported += math.fsum(seconds for _, seconds in account.take(now))
    assert reported == pytest.approx(now)
    assert math.fsum(account.totals(now).values()) == pytest.approx(now)


def test_what_an_old_incarnation_did_not_report_is_not_the_new_ones() -> None:
    account = ActivityAccount(Activity.COMPUTE, 0.0)
    account.start_over(60.0)
    assert dict(account.take(61.0)) == {Activity.COMPUTE: 1.0}


def test_the_first_step_may_compile_and_does_not_count() -> None:
    timer = StepTimer()
    timer.begin(0.0)
    assert timer.running_seconds(3.0) == 3.0
    assert timer.end(30.0) == 30.0
    assert timer.step_seconds is None
    timer.begin(30.0)
    timer.end(32.0)
    assert timer.step_seconds == 2.0
    assert timer.running_seconds(40.0) is None


def test_a_process_that_stood_still_is_soon_itself_again_but_a_slower_one_stays_slower() -> None:
    timer = StepTimer()
    for seconds in [1.0, 1.0, 60.0]:
        timer.begin(0.0)
        timer.end(seconds)
    assert timer.step_seconds == pytest.approx(1.375)
    for _ in range(100):
        timer.begin(0.0)
        timer.end(5.0)
    assert timer.step_seconds == pytest.approx(5.0, rel=0.01)


def test_the_rate_rises_in_equal_steps_after_a_recovery() -> None:
    warm_up = WarmUp(4)
    assert warm_up.next_share() == 1.0
    warm_up.begin()
    assert [warm_up.next_share() for _ in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    never = WarmUp(0)
    never.begin()
    assert never.next_share() == 1.0


def test_losses_that_are_not_finite_are_told_and_not_averaged() -> None:
    taken: list[float] = []
    meter = LossMeter(taken.append)
    assert meter.settle(jnp.float32(2.5))
    assert meter.settle(1)
    assert not meter.settle(jnp.float32(jnp.nan))
    assert not meter.settle(math.inf)
    assert taken == [2.5, 1.0]
