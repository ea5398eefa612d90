"""A learner's tokens per second are what it makes, however its reports arrive."""

import pytest

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity, Role
from decoupled_diloco.core.membership import RATE_SECONDS_MIN, LearnerRecord
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.world import Speed, World

STEP_TOKENS = 32
POLICY = Policy(fragment_count=4, interval_steps=8, overlap_steps=2)


def rates(step_seconds, report_instants):
    """What is shown after each report of a learner that attached at 0 and has made whole steps since."""
    record = LearnerRecord("a", 1, Role.LEARNER, 0, 0.0)
    shown = []
    for now in report_instants:
        tokens = int(now / step_seconds) * STEP_TOKENS
        record.rate(tokens - record.progress.token_count, now)
        record.progress, record.progress_at = ev.Progress(0, tokens, Activity.COMPUTE), now
        shown.append(record.tokens_per_second)
    return shown


@pytest.mark.parametrize("step_seconds", [0.05, 0.5, 2.0])
@pytest.mark.parametrize("report_seconds", [0.2, 0.5, 3.0])
def test_the_rate_does_not_depend_on_how_often_it_reports(step_seconds, report_seconds):
    shown = rates(step_seconds, [report_seconds * count for count in range(1, int(60 / report_seconds))])
    newest = shown[len(shown) // 2 :]
    assert sum(newest) / len(newest) == pytest.approx(STEP_TOKENS / step_seconds, rel=0.1)


def test_reports_that_were_held_back_and_come_at_once_are_no_higher_rate():
    steady = [0.5 * count for count in range(1, 60)]
    held = [35.0 + 1e-5 * count for count in range(10)]
    assert max(rates(0.1, steady + held)) < 2 * STEP_TOKENS / 0.1
    assert max(rates(0.1, [0.001, 0.002, 0.003])) <= STEP_TOKENS / RATE_SECONDS_MIN


def test_what_was_made_while_the_syncer_was_away_is_no_rate():
    world = World(POLICY)
    world.add_learner("a", Speed(1.0))
    world.run(until=20.0)
    machine = SyncerMachine(POLICY)
    machine.restore(world.syncer.run_state(), (), 100.0)
    record = machine.membership.learners["a"]
    tokens = record.progress.token_count + 100_000

    def report(count):
        return ev.Progress(200, tokens + count * STEP_TOKENS, Activity.COMPUTE, step_seconds=1.0)

    machine.handle(ev.LearnerAttached("a", record.incarnation, tuple(enumerate(machine.versions)), report(0)), 100.001)
    assert record.tokens_per_second == 0.0
    for count in range(1, 11):
        machine.handle(ev.ProgressReported("a", record.incarnation, report(count)), 100.001 + count)
    assert record.tokens_per_second == pytest.approx(STEP_TOKENS, rel=0.05)
