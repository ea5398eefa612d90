"""What does the event tape cost? `python -m benchmarks.tape`.

The same events are handled by a fresh machine without a tape and with one, in pairs, one after the other; the
differences of processor time on the driver's thread and of the whole process are what the tape costs. Events come
from simulated runs of 8 and 32 learners, and bytes are those of the files.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.clock import MonotonicClock
from simulator.world import Speed, World
from syncer_service.replay.comparison import replay
from syncer_service.tape import open_tape
from syncer_service.tape_file import Beginning, TapeFile, captured, tape_files

RUN_SECONDS = 400.0
"""Virtual time of a simulated run."""

BURST_EVENTS = 5000
"""Events that come as fast as they can be handled; then the writing thread catches up."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One size of a run. Microseconds are medians over the pairs, bytes are of files."""

    learner_count: int
    event_count: int
    effect_count: int
    handle_us_per_event: float
    driver_us_per_event: float
    process_us_per_event: float
    bytes_per_event: float
    text_bytes_per_event: float
    events_per_second_and_learner: float
    replayed_events_per_second: float
    capture_ms: float
    capture_bytes: int


def events_of(learner_count: int) -> tuple[Policy, list[tuple[float, ev.Event]]]:
    """The events of a simulated run without faults: steps of a second, a report a second and one per step."""
    policy = Policy(fragment_count=8, interval_steps=24, quorum_minimum=1)
    events: list[tuple[float, ev.Event]] = []
    handle = SyncerMachine.handle

    def handle_and_keep(machine: SyncerMachine, event: ev.Event, now: float) -> list[fx.Effect]:
        events.append((now, event))
        return handle(machine, event, now)

    with mock.patch.object(SyncerMachine, "handle", handle_and_keep):
        world = World(policy)
        for index in range(learner_count):
            world.add_learner(f"learner-{index:02d}", Speed(1.0 + index / 100, 0.05, 0.4, 0.2, 0.02))
        world.run(until=RUN_SECONDS)
    return policy, events


def handled(policy: Policy, events: list[tuple[float, ev.Event]], folder: Path | None) -> tuple[float, float]:
    """Seconds of the processor that the driver's thread and the process need for all events."""
    machine, clock = SyncerMachine(policy), MonotonicClock()
    tape = None
    if folder is not None:
        beginning = Beginning("new", events[0][0])
        tape = open_tape(folder, machine, beginning, epoch=1, software_version="benchmark", clock=clock)
        assert tape is not None
    gc.collect()
    process_before, thread_before = time.process_time(), time.thread_time()
    for index, (now, event) in enumerate(events):
        if tape is not None:
            tape.event(now, event)
        effects = machine.handle(event, now)
        if tape is not None:
            tape.effects(effects)
            while index % BURST_EVENTS == 0 and tape.figures().waiting_count:
                time.sleep(0.01)
    thread_seconds = time.thread_time() - thread_before
    if tape is not None:
        tape.close()
        assert tape.figures().missed_count == 0
    return thread_seconds, time.process_time() - process_before


def measure(learner_count: int, pairs: int) -> Measured:
    """Measures one size of a run."""
    policy, events = events_of(learner_count)
    without, with_tape = [], []
    with tempfile.TemporaryDirectory() as name:
        for pair in range(pairs):
            folder = Path(name) / str(pair)
            without.append(handled(policy, events, None))
            with_tape.append(handled(policy, events, folder))
        (path,) = tape_files(folder / "tape")
        size = path.stat().st_size
        started = time.perf_counter()
        result = replay(TapeFile(path))
        seconds = time.perf_counter() - started
        assert result.difference is None
        text_bytes = len(_text(path))
    started = time.perf_counter()
    content = captured(result.machine)
    capture_seconds = time.perf_counter() - started
    micro = 1e6 / len(events)
    return Measured(
        learner_count=learner_count,
        event_count=len(events),
        effect_count=result.effect_count,
        handle_us_per_event=round(statistics.median(thread for thread, _ in without) * micro, 2),
        driver_us_per_event=round(_difference(without, with_tape, 0) * micro, 2),
        process_us_per_event=round(_difference(without, with_tape, 1) * micro, 2),
        bytes_per_event=round(size / len(events), 1),
        text_bytes_per_event=round(text_bytes / len(events), 1),
        events_per_second_and_learner=round(len(events) / RUN_SECONDS / learner_count, 2),
        replayed_events_per_second=round(len(events) / seconds),
        capture_ms=round(1e3 * capture_seconds, 2),
        capture_bytes=len(content),
    )


def _difference(without: list[tuple[float, float]], with_tape: list[tuple[float, float]], part: int) -> float:
    return statistics.median(b[part] - a[part] for a, b in zip(without, with_tape, strict=True))


def _text(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tape", description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="measurements with and without a tape (5)")
    parser.add_argument("--learners", type=int, nargs="+", default=[8, 32], help="sizes of the runs (8 32)")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}, {options.pairs} pairs")
    for learner_count in options.learners:
        print(json.dumps(asdict(measure(learner_count, options.pairs)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
