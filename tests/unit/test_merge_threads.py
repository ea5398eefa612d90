"""The threads of merges give way to all others, and end with the syncer."""

import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from decoupled_diloco.arrays.stripes import CALLING_THREAD
from syncer_service import merge_threads
from syncer_service.merge_threads import NICE, load_loops, loop_threads, merge_executor, processor_count, step_back

threads_have_priorities = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="not Linux")


def own_priority() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@threads_have_priorities
def test_threads_of_a_merge_have_a_lower_priority_and_the_caller_keeps_its_own() -> None:
    before = own_priority()
    with ExitStack() as stack:
        threads = loop_threads(stack, 2)
        assert threads.executor is not None
        assert threads.executor.submit(own_priority).result() == NICE
        assert merge_executor(stack).submit(own_priority).result() == NICE
    assert own_priority() == before


async def test_the_loops_are_loaded_at_ordinary_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind threads that are busy all the time a compilation would take minutes."""
    before, found = own_priority(), []
    monkeypatch.setattr(merge_threads, "kernels", lambda: found.append(own_priority()))
    with ExitStack() as stack:
        await load_loops(stack)
    assert found == [before]


async def test_loops_that_cannot_be_compiled_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no compiler for this processor")

    monkeypatch.setattr(merge_threads, "kernels", fails)
    with ExitStack() as stack, pytest.raises(RuntimeError, match="no compiler for this processor"):
        await load_loops(stack)


@threads_have_priorities
def test_the_compiler_is_let_go_of_and_still_works() -> None:
    program = """
import asyncio
import numba
from contextlib import ExitStack
from syncer_service.merge_threads import COMPILER_LIBRARY, load_loops

def resident():
    total, is_code = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            is_code = "r-xp" in line and COMPILER_LIBRARY in line
        elif is_code and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total

with ExitStack() as stack:
    before = resident()
    asyncio.run(load_loops(stack))
    print(before, resident(), numba.njit(lambda value: value + 1)(3))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert int(found[0]) > 0
    assert found[1:] == ["0", "4"]


def test_a_single_thread_needs_no_pool() -> None:
    with ExitStack() as stack:
        assert loop_threads(stack, 1) is CALLING_THREAD
        assert loop_threads(stack, 0).thread_count == processor_count()


def test_a_system_without_priorities_of_threads_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuses)
    step_back()
