"""One end of a way, in the environment of that way: `python -m benchmarks.peers.end MODULE near|far --bytes N`.

Takes orders as lines of JSON on standard input and answers each on standard output; what libraries print goes to
standard error. `pairs.py` is the other side of these lines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.loopback import Vector
from benchmarks.peers.usage import family_cpu_seconds, family_peak_bytes, resident_bytes
from decoupled_diloco.runtime.malloc import tune_malloc


def answers() -> Callable[[dict[str, Any]], None]:
    """A function that answers; from now on nothing else reaches standard output."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    return say


def be_far(module: Any, byte_count: int, say: Callable[[dict[str, Any]], None]) -> None:
    """Serves one round trip for each order."""
    base = resident_bytes(os.getpid())
    far = module.Far(byte_count // 4)
    say({"address": far.address})
    far.connect()
    say({"ready": True})
    for _ in sys.stdin:
        before = family_cpu_seconds()
        far.serve()
        sys.stdin.readline()
        say({"cpu_seconds": family_cpu_seconds() - before, "peak_bytes": family_peak_bytes(), "base_bytes": base})


def be_near(module: Any, byte_count: int, address: str, say: Callable[[dict[str, Any]], None]) -> None:
    """Makes one round trip for each order; the first one is checked."""
    base = resident_bytes(os.getpid())
    payload: Vector = np.random.default_rng(0).standard_normal(byte_count // 4, np.float32)
    near = module.Near(address, payload.size)
    say({"ready": True})
    try:
        _make_trips(near, payload, base, say)
    finally:
        getattr(near, "close", lambda: None)()


def _make_trips(near: Any, payload: Vector, base: int, say: Callable[[dict[str, Any]], None]) -> None:
    is_checked = False
    for _ in sys.stdin:
        before, started = family_cpu_seconds(), time.perf_counter()
        returned = near.round_trip(payload)
        seconds, used = time.perf_counter() - started, family_cpu_seconds() - before
        trip = {"seconds": seconds, "cpu_seconds": used, "peak_bytes": family_peak_bytes(), "base_bytes": base}
        trip |= getattr(near, "measured", {})  # who does other work between the two transfers takes the time itself
        if not is_checked:
            check = getattr(near, "check", lambda sent, got: np.array_equal(sent, got))
            if not check(payload, returned):
                raise SystemExit("what came back is not what was to come back")
            is_checked = True
        say(trip)


def main() -> int:
    """Runs until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="below benchmarks.peers")
    parser.add_argument("role", choices=("near", "far"))
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--address", default="")
    options = parser.parse_args()
    say = answers()
    tune_malloc()
    module = importlib.import_module(f"benchmarks.peers.{options.module}")
    if options.role == "far":
        be_far(module, options.bytes, say)
    else:
        be_near(module, options.bytes, options.address, say)
    # Libraries may keep threads that nobody can end; nothing of this process is needed any more.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
