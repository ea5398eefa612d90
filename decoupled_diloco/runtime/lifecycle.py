"""Life of a process: exit codes, stop signals (the second one exits at once), supervised background work.

Nothing here decides what a clean stop consists of; it only says when to begin and makes sure that the process
ends.
"""

from __future__ import annotations

import asyncio
import enum
import os
import select
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Protocol

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ExitCode(enum.IntEnum):
    """How a process ends, for scripts and restart rules."""

    OK = 0
    """The work is done, or a clean stop was asked for."""
    FAILED = 1
    """A fault of this process; its log has the story. Restart it."""
    CONFIG = 2
    """The settings cannot be used. A restart does not help."""
    REFUSED = 3
    """The other side refused to work with this process. A restart does not help."""
    DETACHED = 4
    """The other side could not be reached for as long as the settings allow."""
    DIVERGED = 5
    """What this process computes is not finite, again and again. A restart alone does not help."""
    INTERRUPTED = 130
    """A second SIGINT, or the clean stop after a SIGINT took too long."""
    TERMINATED = 143
    """A second SIGTERM, or the clean stop after a SIGTERM took too long."""


class EventLogger(Protocol):
    """The part of a structlog logger that is used here."""

    def info(self, event: str, **values: object) -> object:
        """Logs an event."""

    def error(self, event: str, **values: object) -> object:
        """Logs a fault."""


class StopRequest:
    """A one-way switch that asks the process to stop. Thread-safe; the first reason and exit code stay."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._callbacks: list[Callable[[], None]] = []
        self.reason = ""
        self.exit_code: int = ExitCode.OK

    @property
    def is_requested(self) -> bool:
        """Whether the process has been asked to stop."""
        return self._event.is_set()

    def request(self, reason: str, exit_code: int = ExitCode.OK) -> bool:
        """Asks to stop. Returns False, and changes nothing, if somebody else did before."""
        with self._lock:
            if self._event.is_set():
                return False
            self.reason, self.exit_code = reason, int(exit_code)
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        return True

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Blocks until a stop is requested or the time is over; returns whether it is requested."""
        return self._event.wait(timeout_seconds)

    def on_request(self, callback: Callable[[], None]) -> None:
        """Calls back once, from whichever thread requests the stop; at once if that has happened."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    async def wait_async(self) -> None:
        """Waits for the request in the running event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def finish() -> None:
            if not future.done():
                future.set_result(None)

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish)

        self.on_request(wake)
        await future


class SignalWatch:
    """Turns SIGTERM and SIGINT into a stop request; the second one ends the process at once with 143 or 130.

    A thread of its own reads the signals, so that they act also while the main thread is inside a long call
    into C (a compilation, a device computation). Use as a context manager in the main thread, before an event
    loop is started; the loop must not install signal handlers itself.

    Args:
        stop: The switch.
        logger: Told about each signal.
        stop_seconds_max: A clean stop that takes longer than this after the signal is ended like by a second
            signal.
        end_process: Ends the process with an exit code, at once; replaced in tests.
    """

    def __init__(
        self,
        stop: StopRequest,
        logger: EventLogger,
        stop_seconds_max: float | None = None,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._stop = stop
        self._logger = logger
        self._stop_seconds_max = stop_seconds_max
        self._end_process = end_process
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> SignalWatch:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # The handler does nothing: its presence makes the interpreter write the number into the pipe.
            self._previous[number] = signal.signal(number, _ignore)
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.write(self._writer, b"\0")  # number 0 ends the thread
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def _watch(self) -> None:
        first: int | None = None
        while True:
            timeout = self._stop_seconds_max if first is not None else None
            ready, _, _ = select.select([self._reader], [], [], timeout)
            if not ready:
                self._logger.error("stop_took_too_long", seconds=timeout, signal=_name(first or 0))
                self._end_process(128 + (first or 0))
                return
            for number in os.read(self._reader, 64):
                if number == 0:
                    return
                if number not in STOP_SIGNALS:
                    continue
                if first is not None:
                    self._logger.error("stop_forced", signal=_name(number))
                    self._end_process(128 + number)
                    return
                first = number
                self._logger.info("stop_requested", signal=_name(number), hint="a second one exits at once")
                self._stop.request(f"received {_name(number)}")


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def _name(number: int) -> str:
    return signal.Signals(number).name if number else ""


class TaskSupervisor:
    """Owns the background tasks of an event loop; one that dies takes the process down.

    Args:
        stop: Requested with `ExitCode.FAILED` when a task dies.
        logger: Told which task died of what.
    """

    def __init__(self, stop: StopRequest, logger: EventLogger) -> None:
        self._stop = stop
        self._logger = logger
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self.failure: BaseException | None = None

    def start(self, work: Coroutine[object, object, None], name: str, *, may_finish: bool = False) -> None:
        """Runs a coroutine. Unless `may_finish`, its return before the stop is a fault as well."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(lambda done: self._ended(done, may_finish))

    def _ended(self, task: asyncio.Task[None], may_finish: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            error: BaseException | None = None if self._is_closing else asyncio.CancelledError("cancelled")
        else:
            error = task.exception()
        if error is None and not may_finish and not self._stop.is_requested and not self._is_closing:
            error = RuntimeError("returned although it should run until the process stops")
        if error is not None:
            self.failure = self.failure or error
            fail(self._stop, self._logger, f"task {task.get_name()}", error)

    async def close(self) -> None:
        """Cancels what still runs and waits for it."""
        self._is_closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def start_thread(work: Callable[[], None], name: str, stop: StopRequest, logger: EventLogger) -> threading.Thread:
    """Runs a function in a daemon thread; an exception takes the process down."""

    def run() -> None:
        try:
            work()
        except BaseException as error:  # everything that ends the thread must be told
            fail(stop, logger, f"thread {name}", error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def fail(stop: StopRequest, logger: EventLogger, where: str, error: BaseException) -> None:
    """Logs a fault of this process with its traceback and asks the process to stop with `ExitCode.FAILED`."""
    logger.error("background_work_died", where=where, error=f"{type(error).__name__}: {error}", exc_info=error)
    stop.request(f"{where} died: {type(error).__name__}: {error}", ExitCode.FAILED)
