import asyncio
from contextlib import asynccontextmanager

import pytest

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime.clock import MonotonicClock
from syncer_service.driver import Driver


class ScriptedMachine:
    """Answers requests, notes what it was handed, and wakes up when the test says so."""

    def __init__(self):
        self.handled = []
        self.deadline = None
        self.reply = lambda event: []

    def handle(self, event, now):
        self.handled.append(event)
        if isinstance(event, ev.TimerFired):
            self.deadline = None
        return self.reply(event)

    def next_deadline(self):
        return self.deadline


@asynccontextmanager
async def driving(machine, **options):
    clock = MonotonicClock()
    driver = Driver(machine, clock, **options)
    executed = []
    driver.connect(executed.append)
    task = asyncio.create_task(driver.run())
    try:
        yield driver, executed, clock
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


MOVED = ev.BytesMoved("a", 1)


async def test_a_request_gets_the_answer_with_its_token():
    machine = ScriptedMachine()
    machine.reply = lambda event: [fx.Answer(event.request, fx.Refusal("NOT_FOUND", event.reason))]
    async with driving(machine) as (driver, _, _):
        answers = await asyncio.gather(
            *(driver.request(lambda token, n=n: ev.PauseRequested(token, str(n)), fx.Refusal) for n in range(5))
        )
    assert [answer.text for answer in answers] == ["0", "1", "2", "3", "4"]


async def test_effects_are_carried_out_in_order_before_the_next_event_and_before_the_answer():
    machine = ScriptedMachine()
    machine.reply = lambda event: [fx.Note("one", ""), fx.Answer(event.request, None), fx.Note("two", "")]
    seen = []
    async with driving(machine) as (driver, executed, _):
        await driver.request(ev.ResumeRequested, type(None))
        seen = [type(effect).__name__ for effect in executed]
    assert seen == ["Note", "Answer", "Note"]


async def test_an_answer_of_another_kind_is_a_fault():
    machine = ScriptedMachine()
    machine.reply = lambda event: [fx.Answer(event.request, None)]
    async with driving(machine) as (driver, _, _):
        with pytest.raises(TypeError, match="the machine answered None"):
            await driver.request(ev.ResumeRequested, fx.Refusal)


async def test_the_timer_fires_at_the_deadline_without_any_event():
    machine = ScriptedMachine()
    async with driving(machine) as (driver, _, clock):
        machine.deadline = due = clock.now() + 0.02
        driver.report(MOVED)
        async with asyncio.timeout(5):
            await driver.wait_until(lambda: ev.TimerFired() in machine.handled)
        assert clock.now() >= due
    assert machine.handled == [MOVED, ev.TimerFired()]


async def test_a_full_queue_refuses_requests_holds_offers_and_takes_the_shells_own_news():
    machine = ScriptedMachine()
    clock = MonotonicClock()
    driver = Driver(machine, clock, queue_events_max=2)
    assert driver.offer_now(MOVED)
    await driver.offer(MOVED)
    assert not driver.offer_now(MOVED)
    with pytest.raises(PeerError) as refused:
        await driver.request(ev.ResumeRequested, type(None))
    assert refused.value.reason is Reason.OVERLOADED
    waiting = asyncio.create_task(driver.offer(MOVED))
    driver.report(MOVED)
    assert driver.waiting_count == driver.waiting_count_highest == 3
    task = asyncio.create_task(driver.run())
    await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(driver.wait_until(lambda: driver.handled_count == 4), 5)
    assert (driver.waiting_count, driver.waiting_count_highest) == (0, 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class ListTape:
    def __init__(self):
        self.events, self.gave = [], []

    def event(self, now, event):
        self.events.append((now, event))

    def effects(self, effects):
        self.gave.append(effects)


async def test_the_tape_holds_every_event_before_it_is_handled_and_its_effects_before_they_are_carried_out():
    tape = ListTape()
    machine = ScriptedMachine()
    machine.reply = lambda event: [fx.Note("handled", f"{len(tape.events)} {len(tape.gave)}")]
    seen = []
    async with driving(machine) as (driver, executed, _):
        driver.record(tape)
        driver.connect(lambda effect: (executed.append(effect), seen.append(len(tape.gave))))
        driver.report(MOVED)
        driver.report(ev.BytesMoved("b", 2))
        await driver.wait_until(lambda: driver.handled_count == 2)
    assert [event for _, event in tape.events] == machine.handled
    assert [note.text for note in executed] == ["1 0", "2 1"]
    assert [effect for effects in tape.gave for effect in effects] == executed
    assert seen == [1, 2]
    assert tape.events[0][0] <= tape.events[1][0]


async def test_an_event_whose_handling_raises_is_on_the_tape_without_effects():
    machine, tape = ScriptedMachine(), ListTape()

    def fail(event):
        raise ZeroDivisionError

    machine.reply = fail
    driver = Driver(machine, MonotonicClock(), tape=tape)
    driver.report(MOVED)
    with pytest.raises(ZeroDivisionError):
        await driver.run()
    assert [event for _, event in tape.events] == [MOVED]
    assert tape.gave == []


async def test_who_waits_when_the_driver_ends_is_told():
    machine = ScriptedMachine()
    async with driving(machine) as (driver, _, _):
        waiting = asyncio.create_task(driver.request(ev.ResumeRequested, type(None)))
        await driver.wait_until(lambda: driver.handled_count == 1)
    with pytest.raises(PeerError) as refused:
        await waiting
    assert refused.value.reason is Reason.SHUTTING_DOWN
    with pytest.raises(PeerError):
        await driver.offer(MOVED)


async def test_a_fault_of_the_machine_ends_the_driver_with_it():
    machine = ScriptedMachine()

    def fail(event):
        raise ZeroDivisionError

    machine.reply = fail
    driver = Driver(machine, MonotonicClock())
    driver.report(MOVED)
    with pytest.raises(ZeroDivisionError):
        await driver.run()


async def test_a_caller_that_went_away_misses_nothing():
    machine = ScriptedMachine()
    machine.reply = lambda event: [fx.Answer(event.request, None)] if isinstance(event, ev.ResumeRequested) else []
    async with driving(machine) as (driver, _, _):
        gone = asyncio.create_task(driver.request(ev.ResumeRequested, type(None)))
        await asyncio.sleep(0)
        gone.cancel()
        await driver.wait_until(lambda: driver.handled_count == 1)
        assert await driver.request(ev.ResumeRequested, type(None)) is None
