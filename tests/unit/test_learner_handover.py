"""What the two threads of a learner hand over to each other."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from decoupled_diloco.arrays.device import DeviceCopy
from decoupled_diloco.arrays.staging import StagedFragment
from decoupled_diloco.core import learner_events as ev
from decoupled_diloco.core.ids import Activity, Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.learner_effects import Hold
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.clock import ManualClock
from learner_service.activity import ActivityAccount
from learner_service.handed_over import Arrived, Plan, UploadJob
from learner_service.handover import Handover

POLICY = Policy(fragment_count=1, interval_steps=4)


def version(number: int) -> Version:
    return Version(1, number, f"digest {number}")


def arrived(number: int) -> Arrived:
    values = np.full(3, number, np.float32)
    in_host_memory = cast(StagedFragment, SimpleNamespace(flat=values, is_on_devices=False))
    staged = SimpleNamespace(flat=values, is_on_devices=True, in_host_memory=lambda: in_host_memory)
    return Arrived(cast(StagedFragment, staged), values)


def handover_with(number: int = 1) -> tuple[Handover, ManualClock]:
    """A hand-over of one fragment whose version `number` was applied."""
    clock = ManualClock()
    handover = Handover(LearnerMachine(POLICY), ActivityAccount(Activity.STARTUP, 0.0), clock)
    handover.start_incarnation(LearnerMachine(POLICY), ())
    receive(handover, number)
    boundary(handover)
    return handover, clock


def receive(handover: Handover, number: int) -> None:
    handover.handle(ev.Published(0, version(number), number))
    handover.arrive(0, version(number), number, arrived(number))


def boundary(handover: Handover) -> Plan:
    """The device thread's part of a boundary, without devices."""
    plan = handover.plan()
    for slot in plan.slots:
        slot.fill(cast(DeviceCopy, f"copy at {slot.copy.local_step}"))
    handover.publish(plan)
    return plan


def step(handover: Handover) -> Plan:
    handover.begin_step()
    handover.finish_step(10)
    return boundary(handover)


def ask(round_number: int, due: int, base: int = 1) -> ev.Asked:
    return ev.Asked(round_number, 0, version(base), 4 * round_number, due)


def only_job(actions: list[Any]) -> UploadJob:
    [job] = actions
    assert isinstance(job, UploadJob)
    return job


def test_a_due_contribution_reaches_the_network_thread_with_its_copy_and_base() -> None:
    handover, _ = handover_with()
    handover.take_outbox()
    handover.handle(ask(1, due=1))
    step(handover)
    job = only_job(handover.take_outbox().uploads)
    assert job.slot.arrays() == "copy at 1"
    assert list(job.base) == [1, 1, 1]
    assert handover.take_outbox().uploads == []


def test_a_last_call_in_the_middle_of_a_boundary_waits_for_the_copy_that_is_being_taken() -> None:
    handover, _ = handover_with()
    handover.handle(ask(1, due=100))
    handover.begin_step()
    handover.finish_step(10)
    plan = handover.plan()
    job = only_job(handover.handle(ev.LastCalled(1)))
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(job.slot.arrays()))
    waiting.start()
    plan.slots[0].fill(cast(DeviceCopy, "copy of this boundary"))
    waiting.join()
    assert found == ["copy of this boundary"]


def test_a_base_stays_until_its_upload_has_it_and_goes_when_a_newer_version_is_applied() -> None:
    handover, _ = handover_with()
    handover.handle(ask(1, due=1))
    step(handover)
    receive(handover, 2)
    assert handover.version(0, version(1)) is not None
    [job] = handover.take_outbox().uploads
    step(handover)
    assert handover.version(0, version(1)) is None
    assert handover.version(0, version(2)) is not None
    assert list(job.base) == [1, 1, 1]


def test_an_applied_version_is_kept_in_host_memory_alone() -> None:
    handover, _ = handover_with()
    kept = handover.version(0, version(1))
    assert kept is not None
    assert not cast(Any, kept.staged).is_on_devices
    receive(handover, 2)
    newer = handover.version(0, version(2))
    assert newer is not None
    assert cast(Any, newer.staged).is_on_devices, "it waits for its boundary"


def test_the_network_thread_is_woken_at_once_where_nobody_says_that_a_step_is_under_way() -> None:
    handover, _ = handover_with()
    woken: list[int] = []
    handover.wake_network = lambda: woken.append(len(woken))
    step(handover)
    step(handover)
    assert len(woken) == 2


def test_the_network_thread_is_woken_once_the_devices_compute_where_somebody_says_so() -> None:
    handover, _ = handover_with()
    handover.step_under_way()
    woken: list[int] = []
    handover.wake_network = lambda: woken.append(len(woken))
    step(handover)
    assert not woken
    handover.step_under_way()
    handover.step_under_way()
    assert len(woken) == 1, "once for a boundary"
    step(handover)
    handover.wake_if_due()
    assert len(woken) == 2, "the next boundary begins, and nobody has said so"


def test_what_is_kept_for_a_last_call_will_likely_be_copied_again_until_it_is_sent() -> None:
    handover, _ = handover_with()
    assert handover.likely_copies == ()
    handover.handle(ask(1, due=2))
    step(handover)
    assert handover.likely_copies == (0,)
    assert len(step(handover).uploads) == 1
    assert handover.likely_copies == ()


def test_a_boundary_that_holds_wakes_the_network_thread_at_once() -> None:
    handover, _ = handover_with()
    handover.step_under_way()
    woken: list[int] = []
    handover.wake_network = lambda: woken.append(len(woken))
    handover.handle(ev.PauseAsked("lunch"))
    step(handover)
    assert len(woken) == 1


def test_what_was_under_way_for_an_old_incarnation_is_void_but_versions_that_still_hold_are_kept() -> None:
    handover, _ = handover_with()
    handover.handle(ask(1, due=1))
    handover.begin_step()
    handover.finish_step(10)
    plan = handover.plan()
    newest = handover.start_incarnation(LearnerMachine(POLICY), [ev.Published(0, version(1), 1)])
    for slot in plan.slots:
        slot.fill(cast(DeviceCopy, "copy"))
    handover.publish(plan)
    assert handover.take_outbox().uploads == []
    assert list(newest[0].base) == [1, 1, 1]
    assert handover.version(0, version(1)) is not None
    assert handover.plan().hold is Hold.RECOVERING
    assert handover.snapshot().progress.local_step == 0


def test_a_version_that_is_no_longer_published_is_dropped_at_a_new_join() -> None:
    handover, _ = handover_with()
    handover.start_incarnation(LearnerMachine(POLICY), [ev.Published(0, version(7), 70)])
    assert handover.version(0, version(1)) is None


def test_a_held_device_thread_is_woken_by_whatever_arrives() -> None:
    handover, _ = handover_with()
    handover.handle(ev.PauseAsked("lunch"))
    plan = boundary(handover)
    assert plan.hold is Hold.PAUSED
    woken = threading.Event()

    def wait() -> None:
        handover.wait_for_news(plan)
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    handover.handle(ev.ResumeAsked())
    thread.join()
    assert woken.is_set()
    assert boundary(handover).hold is None


def test_a_report_says_where_the_time_went_and_the_mean_loss_since_the_last_one() -> None:
    handover, clock = handover_with()
    handover.take_progress()
    for loss in (1.0, 3.0):
        handover.begin_step()
        clock.advance(2.0)
        handover.add_loss(loss)
        handover.finish_step(10)
        clock.advance(0.5)
        boundary(handover)
    progress = handover.take_progress()
    assert (progress.local_step, progress.token_count, progress.loss) == (2, 20, 2.0)
    assert dict(progress.spans) == {Activity.COMPUTE: 4.0, Activity.SYNC_STALL: 1.0}
    assert progress.step_seconds == 2.5
    assert progress.running_step_seconds is None
    assert progress.network_wait_seconds == 0.0
    handover.begin_step()
    clock.advance(7.0)
    assert handover.take_progress().running_step_seconds == 7.0
    assert handover.take_progress().loss is None


def test_a_draining_learner_waits_for_news_instead_of_asking_again_and_again() -> None:
    handover, _ = handover_with()
    handover.handle(ask(1, due=1))
    step(handover)
    handover.handle(ev.DrainAsked("told to"))
    plan = boundary(handover)
    assert plan.hold is Hold.DRAINING
    assert handover.take_outbox().is_draining
    handover.drained()
    assert handover.plan().news_count == plan.news_count
