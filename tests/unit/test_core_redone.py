"""Steps that are made again: from the committed cursor of a slot to where another incarnation had come."""

import itertools

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity, Version
from decoupled_diloco.core.membership import GONE_LEASES
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine

POLICY = Policy(fragment_count=1, interval_steps=4, overlap_steps=1)
REQUESTS = itertools.count(1)


def join(machine, name, now=0.0):
    effects = machine.handle(ev.JoinRequested(next(REQUESTS), name), now)
    return next(e.value for e in effects if isinstance(e, fx.Answer))


def report(machine, admitted, steps, now=0.0):
    progress = ev.Progress(steps, steps * 10, Activity.COMPUTE, step_seconds=1.0)
    machine.handle(ev.ProgressReported(admitted.learner, admitted.incarnation, progress), now)


def redone(machine):
    return machine.status(0.0).goodput.steps_redone


def merge_one_round(machine, admitted, steps):
    machine.handle(ev.LearnerAttached(admitted.learner, admitted.incarnation, (), ev.Progress(0, 0)), 0.0)
    machine.handle(ev.InitialFragmentReceived(next(REQUESTS), admitted.learner, admitted.incarnation, 0, "d"), 0.0)
    machine.handle(ev.InitialParametersCommitted(("d",)), 0.0)
    base = Version(1, 1, "d")
    machine.handle(ev.FragmentApplied(admitted.learner, admitted.incarnation, 0, base, 0, 0), 0.0)
    report(machine, admitted, steps)
    header = ev.ContributionHeader(
        admitted.learner, admitted.incarnation, 1, 0, base, steps, steps * 10, steps, steps * 10, steps
    )
    machine.handle(ev.ContributionStarted(next(REQUESTS), header), 0.0)
    machine.handle(ev.ContributionReceived(next(REQUESTS), admitted.learner, admitted.incarnation, 1, True, 1.0), 0.0)
    machine.handle(ev.MergeFinished(1, "e", True, 0.0), 0.0)
    machine.handle(ev.CommitFinished(1, 0.0), 0.0)
    assert machine.global_step == 1


def test_a_replacement_redoes_what_was_not_merged():
    machine = SyncerMachine(POLICY)
    first = join(machine, "a")
    merge_one_round(machine, first, steps=5)
    report(machine, first, steps=12)
    second = join(machine, "a")
    assert second.cursor == 5
    assert redone(machine) == 7


def test_steps_that_were_to_be_redone_count_once():
    machine = SyncerMachine(POLICY)
    first = join(machine, "a")
    report(machine, first, steps=10)
    second = join(machine, "a")
    report(machine, second, steps=3)
    join(machine, "a")
    assert redone(machine) == 10 + 3


def test_who_takes_a_slot_over_redoes_the_steps_of_the_one_before():
    machine = SyncerMachine(POLICY)
    report(machine, join(machine, "a"), steps=10)
    while (deadline := machine.next_deadline()) is not None and deadline <= POLICY.deadlines.lease_seconds:
        machine.handle(ev.TimerFired(), deadline)
    gone = (GONE_LEASES + 2) * POLICY.deadlines.lease_seconds
    taken = join(machine, "b", gone)
    assert (taken.slot, taken.cursor) == (0, 0)
    assert redone(machine) == 10


def test_a_restarted_syncer_knows_how_far_learners_had_come():
    machine = SyncerMachine(POLICY)
    report(machine, join(machine, "a"), steps=10)
    restarted = SyncerMachine(POLICY)
    restarted.restore(machine.run_state(), (), 100.0)
    join(restarted, "a", 100.0)
    assert redone(restarted) == 10
