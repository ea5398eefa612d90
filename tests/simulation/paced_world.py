"""A world that remembers when its rounds left OPEN and closed, and says how it was paced."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.round import Round
from simulator.syncer_process import SyncerProcess
from simulator.world import SimulatedLearner, Speed, World

FASTEST = 1.0
"""Seconds of a step of the fastest learner: one second of virtual time is one step."""


@dataclass(frozen=True, slots=True)
class Closed:
    """How one round ended."""

    at: float
    left_open_at: float
    round: int
    fragment: int
    global_step: int
    members: tuple[str, ...]
    step_counts: dict[str, int]


class PacedWorld(World):
    """One run.

    Attributes:
        closed: the committed rounds, in order.
    """

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        super().__init__(policy, seed=seed)
        self.keep_effects = False
        self.closed: list[Closed] = []
        self._left_open: dict[int, float] = {}
        self._under_way: list[Round] = []

    def add(self, name: str, relative_speed: float, **speed: float) -> SimulatedLearner:
        """A learner that is `relative_speed` as fast as the fastest."""
        return self.add_learner(name, Speed(step_seconds=FASTEST / relative_speed, **speed))

    def run_rounds(self, count: int) -> None:
        """Lets that many more rounds be committed."""
        until = len(self.closed) + count
        self.run(stop=lambda: len(self.closed) >= until)
        assert len(self.closed) >= until

    def before_event(self, process: SyncerProcess, event: ev.Event) -> None:
        self._under_way = self.syncer.rounds.in_order()

    def after_event(self, process: SyncerProcess, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        for item in self._under_way:
            if item.closed_at and item.commit is not None and item.number in self._left_open:
                left = self._left_open.pop(item.number)
                counts = {a.learner: a.header.step_count for a in item.complete() if a.header}
                self.closed.append(
                    Closed(self.now, left, item.number, item.fragment, item.global_step, tuple(counts), counts)
                )
            elif item.left_open_at is not None and not item.closed_at:
                self._left_open[item.number] = item.left_open_at

    # ---- what a test asks --------------------------------------------------------------------------------------------

    def interval_steps(self, first: int = 0, last: int | None = None) -> float:
        """H as it came out, in steps of the fastest learner, over the closed rounds from `first` to `last`."""
        closed = self.closed[first:last]
        seconds = closed[-1].left_open_at - closed[0].left_open_at
        steps = closed[-1].global_step - closed[0].global_step
        return self.policy.interval_steps * seconds / FASTEST / steps

    def participation(self, name: str, first: int = 0, last: int | None = None) -> float:
        """Share of the closed rounds from `first` to `last` that contain the learner."""
        closed = self.closed[first:last]
        return sum(name in item.members for item in closed) / len(closed)

    def fragments_of(self, name: str, first: int = 0) -> Counter[int]:
        """By fragment, how many of the closed rounds from `first` on contain the learner."""
        return Counter(item.fragment for item in self.closed[first:] if name in item.members)

    def steps_early(self, first: int = 0) -> float:
        """By how much the earliest round left OPEN before its pace, in steps of the fastest learner; 0 if none did."""
        ordered = sorted(self.closed[first:], key=lambda item: item.round)
        pairs = itertools.pairwise(ordered)
        gaps = [
            (later.global_step - item.global_step) - (later.left_open_at - item.left_open_at) / FASTEST
            for item, later in pairs
        ]
        return max(0.0, *gaps)
