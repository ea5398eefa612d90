"""What the learner's machine does when news is lost, when it recovers, and when the barrier is on."""

from __future__ import annotations

from decoupled_diloco.core import learner_events as ev
from decoupled_diloco.core.ids import Decline, Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.learner_effects import Boundary, CancelUpload, Copy, DeclineRound, Hold, Upload
from decoupled_diloco.core.policy import Policy

FIRST = Version(1, 1, "first")
SECOND = Version(1, 2, "second")


def recovered(**policy: object) -> LearnerMachine:
    """A machine of one fragment and H = 4 that holds the initial version."""
    values = {"fragment_count": 1, "interval_steps": 4, **policy}
    machine = LearnerMachine(Policy().changed(**values))
    arrive(machine, FIRST, 0)
    machine.at_boundary()
    return machine


def arrive(machine: LearnerMachine, version: Version, global_step: int) -> None:
    machine.handle(ev.Published(0, version, global_step))
    machine.handle(ev.Downloaded(0, version, global_step))


def ask(round_number: int, due: int, base: Version = FIRST) -> ev.Asked:
    return ev.Asked(round_number, 0, base, 4 * (round_number - 1), due)


def step(machine: LearnerMachine, count: int = 1) -> Boundary:
    for _ in range(count):
        machine.step_finished(10)
        boundary = machine.at_boundary()
    return boundary


def test_a_round_that_was_abandoned_while_the_stream_was_down_does_not_block_the_next_one() -> None:
    machine = recovered()
    machine.handle(ask(1, due=1))
    assert [upload.round for upload in step(machine).uploads] == [1]
    machine.handle(ev.AttachedAgain())
    assert machine.handle(ask(2, due=2)) == [CancelUpload(1)]
    assert [upload.round for upload in step(machine).uploads] == [2]


def test_asks_that_the_syncer_does_not_repeat_after_a_new_attach_are_forgotten() -> None:
    machine = recovered()
    machine.handle(ask(1, due=1))
    machine.handle(ev.AttachedAgain())
    assert step(machine).uploads == ()
    assert machine.handle(ev.LastCalled(1)) == [DeclineRound(1, Decline.NO_COPY)]


def test_a_pause_that_ended_while_the_stream_was_down_does_not_last_for_ever() -> None:
    machine = recovered()
    machine.handle(ev.PauseAsked("maintenance"))
    assert step(machine).hold is Hold.PAUSED
    machine.handle(ev.AttachedAgain())
    assert machine.at_boundary().hold is None


def test_an_open_round_asked_for_again_is_not_answered_twice() -> None:
    machine = recovered()
    machine.handle(ask(1, due=1))
    step(machine)
    machine.handle(ev.AttachedAgain())
    assert machine.handle(ask(1, due=1)) == []
    assert step(machine).uploads == ()


def test_a_learner_that_has_to_recover_answers_no_last_call_with_what_it_had() -> None:
    machine = recovered()
    machine.handle(ask(1, due=3))
    step(machine)
    assert machine.handle(ev.RecoverAsked("not finite")) == [DeclineRound(1, Decline.NO_COPY)]
    machine.handle(ask(1, due=3))
    assert machine.handle(ev.LastCalled(1)) == [DeclineRound(1, Decline.NO_COPY)]
    boundary = step(machine)
    assert [apply.version for apply in boundary.applies] == [FIRST]
    assert boundary.restart_optimizer


def test_what_recovers_is_overwritten_whatever_the_apply_rule() -> None:
    for rule in ("carry", "blend"):
        machine = recovered(apply_rule=rule)
        machine.handle(ask(1, due=1))
        step(machine)
        arrive(machine, SECOND, 1)
        [apply] = step(machine).applies
        assert apply.rule == rule
        machine.handle(ev.RecoverAsked(""))
        [apply] = step(machine).applies
        assert (apply.rule, apply.since, apply.kept_token_count) == ("overwrite", None, 0)


def test_carry_measures_from_the_copy_that_was_sent_and_overwrites_without_one() -> None:
    machine = recovered(apply_rule="carry")
    machine.handle(ask(1, due=1))
    step(machine, 3)
    arrive(machine, SECOND, 1)
    [apply] = step(machine).applies
    assert isinstance(apply.since, Copy)
    assert (apply.since.local_step, apply.kept_token_count) == (1, 30)
    step(machine)
    arrive(machine, Version(1, 3, "third"), 5)
    [apply] = step(machine).applies
    assert (apply.rule, apply.since) == ("overwrite", None)


def test_the_barrier_lasts_until_the_committed_version_is_applied() -> None:
    machine = recovered(barrier=True)
    machine.handle(ask(1, due=1))
    assert step(machine).hold is Hold.BARRIER
    machine.handle(ev.Published(0, SECOND, 1))
    machine.handle(ev.RoundEnded(1, 0, True, ("me",), 0))
    machine.handle(ask(2, due=5, base=SECOND))
    assert machine.at_boundary().hold is Hold.BARRIER
    machine.handle(ev.Downloaded(0, SECOND, 1))
    assert machine.at_boundary().hold is None


def test_the_barrier_waits_for_every_round_answered_at_one_boundary() -> None:
    machine = LearnerMachine(Policy(fragment_count=2, interval_steps=2, barrier=True))
    for fragment in (0, 1):
        machine.handle(ev.Published(fragment, FIRST, 0))
        machine.handle(ev.Downloaded(fragment, FIRST, 0))
    machine.at_boundary()
    for round_number in (1, 2):
        machine.handle(ev.Asked(round_number, round_number - 1, FIRST, round_number - 1, 1))
    assert [upload.round for upload in step(machine).uploads] == [1, 2]
    for round_number in (3, 4):
        machine.handle(ev.Asked(round_number, round_number - 3, SECOND, round_number - 1, 3))
    for fragment, hold in ((1, Hold.BARRIER), (0, None)):
        machine.handle(ev.Published(fragment, SECOND, 1))
        machine.handle(ev.Downloaded(fragment, SECOND, 1))
        assert machine.at_boundary().hold is hold


def test_a_last_call_is_answered_with_the_copy_of_the_latest_boundary() -> None:
    machine = recovered()
    machine.handle(ask(1, due=4))
    step(machine, 2)
    [upload] = machine.handle(ev.LastCalled(1))
    assert isinstance(upload, Upload)
    assert (upload.copy.local_step, upload.copy.step_count, upload.copy.token_count) == (2, 2, 20)
