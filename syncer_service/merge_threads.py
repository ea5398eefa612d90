"""The threads of merges: as many as the machine has processors, and behind all other threads of the process.

While a merge keeps every processor busy, calls must still be answered. So these threads take a lower priority from the
system: they use what is idle, and a thread that serves a call gets its processor at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from typing import Final

from decoupled_diloco.arrays.encoding import kernels
from decoupled_diloco.arrays.stripes import CALLING_THREAD, LoopThreads
from decoupled_diloco.runtime.library_pages import let_go_of_library
from decoupled_diloco.runtime.logs import get_logger

NICE: Final = 10
"""Priority of merging threads, 0 (as all others) to 19 (lowest). At 10 a thread gets about a tenth of a processor that
a thread of ordinary priority wants whole."""

COMPILER_LIBRARY: Final = "libllvmlite"

SLOW_SECONDS: Final = 3.0
"""Loops that come from a cache are there by then."""

log = get_logger(__name__)


def processor_count() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_back() -> None:
    """Lowers the priority of the calling thread; does nothing where the system has no priorities of threads."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def loop_threads(stack: ExitStack | AsyncExitStack, thread_count: int) -> LoopThreads:
    """Threads for the loops of a merge; they end with the stack.

    Args:
        stack: closed when the syncer stops.
        thread_count: how many; 0: one per processor.
    """
    wanted = thread_count or processor_count()
    if wanted == 1:
        return CALLING_THREAD
    pool = ThreadPoolExecutor(wanted, thread_name_prefix="merge-loop", initializer=step_back)
    return LoopThreads(stack.enter_context(pool), wanted)


def merge_executor(stack: ExitStack | AsyncExitStack) -> ThreadPoolExecutor:
    """The one thread that merges are made in, one after the other."""
    return stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="merge", initializer=step_back))


async def load_loops(stack: ExitStack | AsyncExitStack) -> None:
    """Loads the compiled loops, or compiles them, beside all else; whoever needs them before waits for them.

    Its thread keeps its ordinary priority: behind others that are busy all the time it would take minutes.

    Raises:
        Exception: they cannot be compiled, so nothing can be merged.
    """
    executor = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="loops"))
    loading = asyncio.wrap_future(executor.submit(_load))
    done, _ = await asyncio.wait([loading], timeout=SLOW_SECONDS)
    if not done:
        log.info("compiling_loops", reason="they are not in the cache; merges wait for them, seconds to half a minute")
    await loading


def _load() -> None:
    """The loops; the pages of the compiler, a third of the process so far, are not needed again."""
    kernels()
    let_go_of_library(COMPILER_LIBRARY)
