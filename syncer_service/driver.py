"""The driver: the single writer of the run's machine.

One asyncio task takes events from a bounded queue, hands each to the machine together with the instant, and has the
effects carried out in the order given, before the next event is looked at. It arms exactly one timer, at the
machine's next deadline. Everybody else talks to the machine through this queue:

    await driver.request(event)     a caller waits for the answer; refused with OVERLOADED when the queue is full
    await driver.offer(event)       a learner's report: waits for room, which slows that learner's stream down
    driver.report(event)            the shell's own news (a merge is done, a stream broke): never refused

Reading the machine (`driver.machine.status(now)`) is safe from the event loop's thread at any time between two
events.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar, overload

from decoupled_diloco.core.effects import Answer, Effect
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.events import Event, TimerFired
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger

QUEUE_EVENTS_MAX: Final = 4096
"""Events of callers and learners that may wait for a decision, unless the settings say otherwise."""

QUEUE_RETRY_SECONDS: Final = 0.5
"""What a caller is told to wait when the queue is full."""

TURN_EVENTS_MAX: Final = 64
"""Events handled before other tasks of the event loop get their turn."""

IDLE_SECONDS: Final = 1.0
"""The loop comes round at least this often, so that liveness can tell an idle driver from one that hangs."""

First = TypeVar("First")
Second = TypeVar("Second")

log = get_logger(__name__)


class Machine(Protocol):
    """What the driver needs of `core.syncer.SyncerMachine`."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The only way in."""

    def next_deadline(self) -> float | None:
        """When to fire the timer."""


class Tape(Protocol):
    """Takes down what the machine was told and what it decided, in order. Never waits, never raises."""

    def event(self, now: float, event: Event) -> None:
        """The machine is about to handle an event."""

    def effects(self, effects: list[Effect]) -> None:
        """What it gave; not called where it raised. Nobody changes the list afterwards."""


class Driver:
    """Owns the machine.

    Args:
        machine: The machine; nobody else calls `handle`.
        clock: Where the instants come from.
        queue_events_max: Most events of others that wait.
        tape: Where events and their effects go.
    """

    def __init__(
        self, machine: Machine, clock: Clock, queue_events_max: int = QUEUE_EVENTS_MAX, tape: Tape | None = None
    ) -> None:
        self.machine = machine
        self.turned_at = clock.now()
        """When the loop last came round; liveness looks at it."""
        self.handled_count = 0
        self.waiting_count_highest = 0
        """Most events that have waited for a decision at once."""
        self._clock = clock
        self._queue_events_max = queue_events_max
        self._tape = tape
        self._execute: Callable[[Effect], None] = lambda effect: None
        self._queue: deque[Event] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Condition()
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._tokens = itertools.count(1)
        self._stopping = False

    @property
    def waiting_count(self) -> int:
        """Events that wait for a decision."""
        return len(self._queue)

    def connect(self, execute: Callable[[Effect], None]) -> None:
        """Says who carries out the effects. Called once, before `run`."""
        self._execute = execute

    def record(self, tape: Tape) -> None:
        """Says where events and their effects go, in place of the constructor's argument. Called before `run`."""
        self._tape = tape

    # --- what others may do ---

    @overload
    async def request(self, make_event: Callable[[int], Event], first: type[First], /) -> First: ...
    @overload
    async def request(
        self, make_event: Callable[[int], Event], first: type[First], second: type[Second], /
    ) -> First | Second: ...
    async def request(self, make_event: Callable[[int], Event], /, *answer_types: type[object]) -> object:
        """Puts a question to the machine and waits for its answer.

        Args:
            make_event: The event for a request token.
            answer_types: What the answer may be an instance of.

        Raises:
            PeerError: OVERLOADED when the queue is full, SHUTTING_DOWN when the driver has ended.
        """
        if self._stopping:
            raise _shutting_down()
        if len(self._queue) >= self._queue_events_max:
            raise PeerError(
                Reason.OVERLOADED,
                f"{self._queue_events_max} events wait for a decision of the syncer, which is the limit "
                "(syncer.queue_events_max); call again",
                retry_seconds=QUEUE_RETRY_SECONDS,
            )
        token = next(self._tokens)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests[token] = future
        self._put(make_event(token))
        try:
            value = await future
        finally:
            self._requests.pop(token, None)
        if not isinstance(value, answer_types):
            raise TypeError(f"the machine answered {value!r} where one of {answer_types} was due")
        return value

    async def offer(self, event: Event) -> None:
        """Hands over a learner's report; waits while the queue is full.

        Raises:
            PeerError: SHUTTING_DOWN when the driver has ended.
        """
        async with self._room:
            await self._room.wait_for(lambda: self._stopping or len(self._queue) < self._queue_events_max)
        if self._stopping:
            raise _shutting_down()
        self._put(event)

    def offer_now(self, event: Event) -> bool:
        """Hands over a report that may get lost; returns whether there was room."""
        if self._stopping or len(self._queue) >= self._queue_events_max:
            return False
        self._put(event)
        return True

    def report(self, event: Event) -> None:
        """Hands over the shell's own news, whether or not the queue is full."""
        if not self._stopping:
            self._put(event)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds; it is looked at after every turn of the loop."""
        async with self._room:
            await self._room.wait_for(lambda: self._stopping or condition())

    def _put(self, event: Event) -> None:
        self._queue.append(event)
        self.waiting_count_highest = max(self.waiting_count_highest, len(self._queue))
        self._news.set()

    # --- the loop ---

    async def run(self) -> None:
        """Handles events until it is cancelled. A fault of the machine ends it with that exception."""
        try:
            while True:
                await self._wait_for_news()
                for _ in range(min(len(self._queue), TURN_EVENTS_MAX)):
                    self._handle(self._queue.popleft())
                if self._timer_is_due():
                    self._handle(TimerFired())
                self.turned_at = self._clock.now()
                async with self._room:
                    self._room.notify_all()
                await asyncio.sleep(0)
        finally:
            self._stop()

    async def _wait_for_news(self) -> None:
        """Until there is an event, the machine's next deadline has come, or `IDLE_SECONDS` are over."""
        if self._queue:
            return
        self._news.clear()
        deadline = self.machine.next_deadline()
        delay = IDLE_SECONDS if deadline is None else min(IDLE_SECONDS, max(0.0, deadline - self._clock.now()))
        with suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await self._news.wait()

    def _timer_is_due(self) -> bool:
        deadline = self.machine.next_deadline()
        return deadline is not None and deadline <= self._clock.now()

    def _handle(self, event: Event) -> None:
        now = self._clock.now()
        if self._tape is not None:
            self._tape.event(now, event)
        self.handled_count += 1
        effects = self.machine.handle(event, now)
        if self._tape is not None:
            self._tape.effects(effects)
        for effect in effects:
            self._execute(effect)
            if isinstance(effect, Answer):
                self._answer(effect)

    def _answer(self, answer: Answer) -> None:
        """Wakes the caller, after the effect was carried out; one that has gone away misses nothing."""
        future = self._requests.get(answer.request)
        if future is not None and not future.done():
            future.set_result(answer.value)

    def _stop(self) -> None:
        self._stopping = True
        for future in self._requests.values():
            if not future.done():
                future.set_exception(_shutting_down())
        self._requests.clear()


def _shutting_down() -> PeerError:
    return PeerError(Reason.SHUTTING_DOWN, "the syncer is shutting down; reconnect")
