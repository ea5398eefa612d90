"""What of a learner's time belongs to the run, and when somebody advances."""

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.accounts import book_progress
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.ids import Activity, Role
from decoupled_diloco.core.membership import LearnerRecord
from decoupled_diloco.core.policy import Policy
from simulator.world import Speed, World


def test_waiting_before_the_run_existed_is_not_the_runs_time():
    ledger = GoodputLedger((1.0,))
    record = LearnerRecord("a", 1, Role.LEARNER, 0, heard_at=0.0)
    report = ev.Progress(0, 0, Activity.RECOVER, spans=((Activity.STARTUP, 10.0), (Activity.RECOVER, 590.0)))
    book_progress(ledger, record, report, run_age_seconds=6.0)
    assert abs(sum(ledger.activity_seconds.values()) - 6.0) < 1e-9


def test_a_report_from_a_step_boundary_does_not_interrupt_the_uptime():
    world = World(Policy(fragment_count=2, interval_steps=4))
    learner = world.add_learner("a", Speed(0.05))
    world.run(until=1.0)
    learner.clock.switch(Activity.DATA_WAIT, world.now)
    report = ev.ProgressReported("a", learner.incarnation, learner._progress())
    world.tell_syncer(report)
    assert world.syncer.presence.is_advancing
    world.run(until=30.0)
    assert world.syncer.status(world.now).goodput.uptime > 0.97
