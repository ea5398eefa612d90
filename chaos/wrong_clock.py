"""`python -m chaos.wrong_clock SECONDS MODULE [ARGUMENTS]`: runs a module on a host whose wall clock is off.

What the process reads from `time.time` and `time.time_ns` is off by so many seconds; its monotonic clock is not, as on
a real host. What is read in C is not off either: certificates are checked against the true time, and gRPC, which hands
deadlines of Python's clock to C, keeps the true one in both, since a host has but one.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import grpc.aio  # noqa: F401 - loaded before its modules are given their clock


def shifted(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    """A clock that is off."""
    return lambda: clock() + seconds


def leave_grpc_alone() -> None:
    """Gives gRPC's modules the true clock for good."""
    true = SimpleNamespace(**vars(time))
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "grpc" and getattr(module, "time", None) is time:
            module.time = true  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    """Shifts the clock, then becomes the module."""
    seconds, module = float(arguments[0]), arguments[1]
    leave_grpc_alone()
    true_ns = time.time_ns
    time.time = shifted(time.time, seconds)
    time.time_ns = lambda: true_ns() + int(seconds * 1e9)
    sys.argv = [module, *arguments[2:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
