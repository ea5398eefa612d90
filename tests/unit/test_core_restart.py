"""A machine that is started again waits a little for those that were live, so that nobody's steps are left out."""

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity, RoundState
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.world import Speed, World

POLICY = Policy(fragment_count=4, interval_steps=8, overlap_steps=2)


def restarted(at):
    """A machine that was stopped while `a` and `b` trained; both have held every version."""
    world = World(POLICY)
    for name in "ab":
        world.add_learner(name, Speed(1.0))
    world.run(until=20.0)
    machine = SyncerMachine(POLICY)
    machine.restore(world.syncer.run_state(), (), at)
    return machine


def attach(machine, name, now):
    record = machine.membership.learners[name]
    applied = tuple(enumerate(machine.versions))
    report = ev.Progress(30, 30 * 512, Activity.COMPUTE, step_seconds=1.0)
    return machine.handle(ev.LearnerAttached(name, record.incarnation, applied, report), now)


def answer(machine, name, now):
    """Uploads to the oldest open round."""
    item = machine.rounds.in_order()[0]
    record = machine.membership.learners[name]
    header = ev.ContributionHeader(
        name, record.incarnation, item.number, item.fragment, item.base, 30, 30 * 512, 5, 5 * 512, 30
    )
    machine.handle(ev.ContributionStarted(1, header), now)
    machine.handle(ev.ContributionReceived(2, name, record.incarnation, item.number, True, 1.0), now)
    return item


def test_no_round_goes_on_before_everybody_is_back():
    machine = restarted(at=100.0)
    attach(machine, "a", 100.5)
    item = answer(machine, "a", 100.6)
    assert item.state is RoundState.OPEN
    assert machine.status(100.7).reason == "the syncer was started again; waiting for b to attach again"
    asks = [effect for effect in attach(machine, "b", 101.0) if isinstance(effect, fx.AskContribution)]
    assert asks, "who comes back is asked for the rounds that are open"
    assert item.state is not RoundState.OPEN


def test_it_does_not_wait_for_ever():
    machine = restarted(at=100.0)
    attach(machine, "a", 100.5)
    item = answer(machine, "a", 100.6)
    while item.state is RoundState.OPEN:
        deadline = machine.next_deadline()
        assert deadline is not None
        assert deadline <= 100.0 + 2 * POLICY.deadlines.stall_seconds
        machine.handle(ev.TimerFired(), deadline)
    assert not machine.membership.learners["b"].attached


def test_what_nobody_has_been_heard_of_yet_is_no_downtime():
    machine = restarted(at=100.0)
    before = machine.ledger.observed_seconds
    machine.handle(ev.TimerFired(), 102.0)
    attach(machine, "a", 103.0)
    assert machine.ledger.observed_seconds == before
    attach(machine, "b", 104.0)
    assert machine.ledger.observed_seconds == before + 1.0


def test_who_does_not_come_back_in_time_is_down():
    machine = restarted(at=100.0)
    before, advancing = machine.ledger.observed_seconds, machine.ledger.advancing_seconds
    end = machine.steering.attach_until
    machine.handle(ev.TimerFired(), end)
    machine.handle(ev.TimerFired(), end + 3.0)
    assert machine.ledger.observed_seconds == before + 3.0
    assert machine.ledger.advancing_seconds == advancing
