"""Stop signals, supervision, clocks, malloc."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from decoupled_diloco.runtime.clock import ManualClock, MonotonicClock
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest, TaskSupervisor, start_thread
from decoupled_diloco.runtime.malloc import tune_malloc

PROGRAM = """
import asyncio, hashlib, sys, threading
from decoupled_diloco.runtime.lifecycle import SignalWatch, StopRequest
class Logger:
    def info(self, event, **values): print(event, values.get("signal"), flush=True)
    error = info
stop = StopRequest()
how = sys.argv[1]
with SignalWatch(stop, Logger(), stop_seconds_max=0.2 if how == "slow" else None):
    print("ready", flush=True)
    if how == "asyncio":
        asyncio.run(stop.wait_async())
    elif how == "native":  # a call into C that holds the main thread and not the GIL
        threading.Thread(target=lambda: (stop.wait(), print("told", flush=True)), daemon=True).start()
        hashlib.pbkdf2_hmac("sha256", b"x", b"x", 2_000_000_000)
    else:
        stop.wait()
        if how in ("stuck", "slow"):
            threading.Event().wait()
print("clean", stop.reason, flush=True)
sys.exit(stop.exit_code)
"""


class RecordingLogger:
    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, object]]] = []

    def info(self, event: str, **values: object) -> None:
        self.events.append((event, values))

    error = info


class Child:
    """A process that runs PROGRAM; lines are awaited, so that nothing depends on its speed."""

    def __init__(self, how: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=30)
        return self.process.returncode, out, err


@pytest.mark.parametrize("how", ["asyncio", "thread"])
@pytest.mark.parametrize("number", [15, 2])
def test_the_first_signal_starts_a_clean_stop(how: str, number: int) -> None:
    child = Child(how)
    child.send(number)
    code, out, err = child.end()
    assert code == 0
    assert f"clean received {'SIGTERM' if number == 15 else 'SIGINT'}" in out
    assert err == ""


@pytest.mark.parametrize(("number", "code"), [(15, ExitCode.TERMINATED), (2, ExitCode.INTERRUPTED)])
def test_the_second_signal_exits_at_once(number: int, code: int) -> None:
    child = Child("stuck")
    child.send(number)
    assert child.line().startswith("stop_requested")
    child.send(number)
    assert child.end()[0] == code


def test_signals_act_while_the_main_thread_is_inside_a_long_native_call() -> None:
    child = Child("native")
    child.send(15)
    assert child.line().startswith("stop_requested")
    assert child.line() == "told"
    child.send(15)
    assert child.end()[0] == ExitCode.TERMINATED


def test_a_clean_stop_that_takes_too_long_is_ended() -> None:
    child = Child("slow")
    child.send(15)
    code, out, _ = child.end()
    assert code == ExitCode.TERMINATED
    assert "stop_took_too_long" in out


def test_the_first_reason_of_a_stop_stays() -> None:
    stop = StopRequest()
    calls: list[str] = []
    stop.on_request(lambda: calls.append("early"))
    assert stop.request("the run is finished")
    assert not stop.request("something else", ExitCode.FAILED)
    stop.on_request(lambda: calls.append("late"))
    assert (stop.reason, stop.exit_code, stop.is_requested, calls) == (
        "the run is finished",
        0,
        True,
        ["early", "late"],
    )


async def test_a_stop_from_a_thread_wakes_the_event_loop() -> None:
    stop = StopRequest()
    waiting = asyncio.create_task(stop.wait_async())
    await asyncio.sleep(0)
    threading.Thread(target=stop.request, args=("done",)).start()
    await waiting
    await stop.wait_async()


async def test_a_task_that_dies_takes_the_process_down_and_says_why() -> None:
    stop, logger = StopRequest(), RecordingLogger()
    supervisor = TaskSupervisor(stop, logger)

    async def dies() -> None:
        raise ValueError("no such round")

    supervisor.start(dies(), "driver")
    await stop.wait_async()
    assert stop.exit_code == ExitCode.FAILED
    assert stop.reason == "task driver died: ValueError: no such round"
    assert isinstance(supervisor.failure, ValueError)
    assert [event for event, _ in logger.events] == ["background_work_died"]


async def test_a_task_that_returns_although_it_should_run_for_ever_is_a_fault() -> None:
    stop = StopRequest()
    supervisor = TaskSupervisor(stop, RecordingLogger())
    supervisor.start(asyncio.sleep(0), "driver")
    await stop.wait_async()
    assert "returned although it should run" in stop.reason


async def test_tasks_end_quietly_with_the_process() -> None:
    stop, logger = StopRequest(), RecordingLogger()
    supervisor = TaskSupervisor(stop, logger)

    async def for_ever() -> None:
        await asyncio.Event().wait()

    supervisor.start(for_ever(), "driver")
    supervisor.start(asyncio.sleep(0), "warm-up", may_finish=True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await supervisor.close()
    assert not stop.is_requested
    assert logger.events == []


def test_a_thread_that_dies_takes_the_process_down() -> None:
    stop, logger = StopRequest(), RecordingLogger()

    def dies() -> None:
        raise OSError("disk")

    start_thread(dies, "merger", stop, logger).join()
    assert stop.reason == "thread merger died: OSError: disk"
    assert isinstance(logger.events[0][1]["exc_info"], OSError)


def test_a_manual_clock_moves_only_forward() -> None:
    clock = ManualClock(5.0, wall_start_seconds=100.0)
    clock.advance(2.5)
    clock.advance_to(3.0)
    assert (clock.now(), clock.wall_time()) == (7.5, 102.5)
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(-1.0)
    assert MonotonicClock().now() <= MonotonicClock().now()


def test_malloc_is_tuned_on_glibc_and_left_alone_elsewhere() -> None:
    calls: list[tuple[int, int]] = []

    def library(accepts: bool) -> SimpleNamespace:
        def mallopt(parameter: object, value: object) -> int:
            calls.append((parameter.value, value.value))  # type: ignore[attr-defined]
            return int(accepts)

        return SimpleNamespace(mallopt=mallopt, gnu_get_libc_version=None)

    assert tune_malloc(library(True)).is_applied  # type: ignore[arg-type]
    assert calls == [(-3, 1 << 30), (-1, 1 << 30), (-2, 64 << 20)]
    calls.clear()
    assert tune_malloc(library(True), one_arena=True).reason.endswith("one arena")  # type: ignore[arg-type]
    assert calls[-1] == (-8, 1)
    calls.clear()
    assert not tune_malloc(library(False)).is_applied  # type: ignore[arg-type]
    assert len(calls) == 1
    assert not tune_malloc(SimpleNamespace()).is_applied  # type: ignore[arg-type]


def test_malloc_of_this_process_can_be_asked() -> None:
    outcome = subprocess.run(
        [sys.executable, "-c", "from decoupled_diloco.runtime.malloc import *; print(tune_malloc().reason)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert outcome.stdout.strip()
