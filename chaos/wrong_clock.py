"""`python -m chaos.wrong_clock SECONDS MODULE [ARGUMENTS]`: runs a module on a host whose wall clock is off.

What the process reads from `time.time` and `time.time_ns` is off by so many seconds; its monotonic clock is not, as on
a real host. Certificates are checked in C against the true time.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable


def shifted(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    """A clock that is off."""
    return lambda: clock() + seconds


def main(arguments: list[str]) -> None:
    """Shifts the clock, then becomes the module."""
    seconds, module = float(arguments[0]), arguments[1]
    true_ns = time.time_ns
    time.time = shifted(time.time, seconds)
    time.time_ns = lambda: true_ns() + int(seconds * 1e9)
    sys.argv = [module, *arguments[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
