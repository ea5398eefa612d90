"""How long the machine takes for a decision: simulated runs of many learners, each call of the machine timed.

In processor time of the calling thread: what other processes do on the same cores is no part of a decision.

Used by `benchmarks.latency`.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

from benchmarks.figures import Figure, Target
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.world import Speed, World

LEARNERS = 64
SETTLING_SECONDS = 60.0
"""Virtual seconds until everybody has joined and rounds overlap."""
DECISION_MS_MAX = 0.2
READ = "read: "
"""How calls that only read the machine are named."""
READ_COUNT = 50
"""Repetitions of what only reads the machine."""


@dataclass(slots=True)
class Decisions:
    """Seconds of the machine's calls, by what they were."""

    seconds: dict[str, list[float]]

    def figures(self) -> list[Figure]:
        """All events together, then median and 99th percentile of each kind of call."""
        events = sorted(value for name, values in self.seconds.items() if not name.startswith(READ) for value in values)
        together = Figure(
            f"all events of the machine, {LEARNERS} learners: 99th percentile",
            1e3 * events[int(0.99 * (len(events) - 1))],
            "ms",
            Target("at most", DECISION_MS_MAX),
            note=f"n = {len(events)}",
        )
        return [together, *(_figure(name, values) for name, values in sorted(self.seconds.items()))]


def _figure(name: str, values: list[float]) -> Figure:
    ordered = [1e3 * value for value in sorted(values)]
    return Figure(
        f"{name}, {LEARNERS} learners",
        statistics.median(ordered),
        "ms",
        Target("at most", DECISION_MS_MAX),
        low=ordered[0],
        high=ordered[int(0.99 * (len(ordered) - 1))],
        note=f"n = {len(ordered)}; range up to the 99th percentile",
    )


def kind_of(event: ev.Event, effects: list[fx.Effect]) -> str:
    """What a call is filed under: the three decisions of a round by themselves, all else by its event."""
    for effect in effects:
        match effect:
            case fx.StartMerge():
                return "decision: grace has closed, merge"
            case fx.CommitRound():
                return "decision: merged, commit"
            case fx.PublishFragment():
                return "decision: durable, publish, close, ask for the next round"
    return f"event: {type(event).__name__}"


def measure_decisions(virtual_seconds: float) -> Decisions:
    """Times every call of the machine in a steady run of 64 learners and 24 fragments.

    Args:
        virtual_seconds: how long the run is watched; the fastest learner's step is one second.
    """
    policy = Policy(fragment_count=24, interval_steps=24, overlap_steps=2, quorum_minimum=1, learners_max=LEARNERS)
    found: dict[str, list[float]] = defaultdict(list)
    handle = SyncerMachine.handle

    def timed(machine: SyncerMachine, event: ev.Event, now: float) -> list[fx.Effect]:
        began = time.thread_time()
        effects = handle(machine, event, now)
        seconds = time.thread_time() - began
        if now >= SETTLING_SECONDS:
            found[kind_of(event, effects)].append(seconds)
        return effects

    with mock.patch.object(SyncerMachine, "handle", timed):
        world = World(policy, merge_seconds=0.3, commit_seconds=0.05)
        world.keep_effects = False
        for index in range(LEARNERS):
            world.add_learner(f"learner-{index:02d}", Speed(1.0 + index / 200, 0.05, 0.4, 0.2, 0.02))
        world.run(until=SETTLING_SECONDS + virtual_seconds)
    machine, now = world.syncer, world.now
    reads: dict[str, Callable[[], object]] = {
        f"{READ}next deadline": machine.next_deadline,
        f"{READ}run's state, for a commit": machine.run_state,
        f"{READ}status, for a page": lambda: machine.status(now),
    }
    for name, read in reads.items():
        for _ in range(READ_COUNT):
            began = time.thread_time()
            read()
            found[name].append(time.thread_time() - began)
    return Decisions(dict(found))
