"""Runs in which everything goes wrong that can, drawn from one seed. Replay one with

python -m tests.simulation.random_walk SEED
"""

from __future__ import annotations

import hashlib
import random
import sys

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.policy import Deadlines, Policy
from simulator.transfers import Faults
from simulator.world import SimulatedLearner, Speed
from tests.simulation.watched_world import WatchedWorld

SPEEDS = (1.0, 0.82, 0.5, 0.34)
TROUBLES = ("kill", "restart", "disconnect", "poison", "drain", "leave", "pause", "join")


def drawn_policy(source: random.Random) -> Policy:
    interval = source.choice((4, 8, 24))
    return Policy(
        fragment_count=source.choice([p for p in (1, 2, 4, 8, 24) if p <= interval]),
        interval_steps=interval,
        overlap_steps=source.choice((1, 2)),
        total_steps=source.choice((0, 0, 60)),
        quorum_minimum=source.choice((1, 1, 2, 3)),
        last_call=source.random() < 0.8,
        below_quorum=source.choice(("wait", "degrade")),
        norm_outlier_factor=source.choice((0.0, 3.0)),
        learners_max=6,
        apply_rule=source.choice(("overwrite", "overwrite", "carry", "blend")),
        deadlines=Deadlines(lease_seconds=source.choice((4.0, 10.0)), stall_seconds=2.0, drain_seconds_max=20.0),
    )


class Walk:
    """One run with troubles."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)
        policy = drawn_policy(self._source)
        faults = Faults(
            broken_uploads=self._source.choice((0.0, 0.1)),
            repeated_uploads=0.1,
            failed_merges=self._source.choice((0.0, 0.1)),
        )
        self.world = WatchedWorld(policy, seed, faults, merge_seconds=0.05, commit_seconds=0.02)
        self._names = iter(f"learner-{i}" for i in range(10_000))
        self._crowd = self._source.randint(1, 5)
        self._weights = [self._source.random() ** 2 for _ in TROUBLES]
        self._trouble_seconds = self._source.choice((1.0, 4.0))
        self._paused = False
        self.committed_before_calm = 0

    def run(self, seconds: float) -> WatchedWorld:
        """Lets the run go on for some time with troubles, and then for a while without."""
        for _ in range(self._crowd):
            self._start_one()
        self._next_trouble(seconds)
        self.world.run(until=seconds)
        self._end_troubles()
        policy = self.world.policy
        calm = 30.0 + 6.0 * policy.interval_steps / policy.fragment_count / min(SPEEDS)
        self.committed_before_calm = len(self.world.commits)
        self.world.run(until=seconds + calm)
        return self.world

    def finish(self) -> None:
        """The operator ends the run; that may take a drain and a lease."""
        self.world.request(lambda number: ev.FinishRequested(number, "enough"), lambda _: None)
        deadlines = self.world.policy.deadlines
        self.world.run(until=self.world.now + deadlines.drain_seconds_max + deadlines.lease_seconds + 5.0)

    def has_recovered(self) -> bool:
        """Whether rounds were committed again once the troubles were over, if enough learners are there."""
        machine, policy = self.world.syncer, self.world.policy
        needed = 1 if policy.below_quorum == "degrade" else policy.quorum_minimum
        enough = sum(record.can_answer() for record in machine.membership.live()) >= needed
        return self.world.finished or not enough or len(self.world.commits) > self.committed_before_calm

    def _start_one(self) -> None:
        source = self._source
        speed = Speed(
            step_seconds=1.0 / source.choice(SPEEDS),
            jitter=source.choice((0.0, 0.1)),
            upload_seconds=source.choice((0.0, 0.5, 3.0)),
            download_seconds=source.choice((0.0, 0.3)),
            latency_seconds=source.choice((0.0, 0.05)),
        )
        self.world.add_learner(next(self._names), speed)

    def _next_trouble(self, until: float) -> None:
        at = self.world.now + self._source.expovariate(1.0 / self._trouble_seconds)
        if at < until:
            self.world.at(at, lambda: self._trouble(until))

    def _trouble(self, until: float) -> None:
        source, world = self._source, self.world
        learner = source.choice(list(world.learners.values()))
        running = learner.incarnation > 0 and not learner.gone
        match source.choices(TROUBLES, self._weights)[0]:
            case "kill" if running:
                world.kill(learner)
                world.after(source.uniform(0.1, 20.0), lambda: self._restart(learner))
            case "restart" if running:
                self._restart(learner)
            case "disconnect" if running and learner.reachable:
                world.disconnect(learner, noticed=source.random() < 0.5)
                world.after(source.uniform(0.1, 20.0), lambda: world.reconnect(learner))
            case "poison" if running:
                learner.poisoned = True
            case "drain" if running:
                world.drain(learner)
            case "leave" if running and learner.reachable:
                world.leave(learner)
                world.after(source.uniform(0.0, 2.0), self._join_one)
            case "pause":
                self._toggle_pause()
            case "join":
                self._join_one()
        self._next_trouble(until)

    def _join_one(self) -> None:
        """A new learner, or one that has left comes again; the crowd stays of a size."""
        here = [learner for learner in self.world.learners.values() if not learner.gone]
        gone = [learner for learner in self.world.learners.values() if learner.gone]
        if gone and self._source.random() < 0.5:
            self._restart(self._source.choice(gone))
        elif len(here) <= self._crowd:
            self._start_one()

    def _restart(self, learner: SimulatedLearner) -> None:
        self.world.kill(learner)
        self.world.join(learner)

    def _toggle_pause(self) -> None:
        self._paused = not self._paused
        if self._paused:
            self.world.request(lambda number: ev.PauseRequested(number, "maintenance"), lambda _: None)
            self.world.after(self._source.uniform(0.5, 5.0), self._resume)

    def _resume(self) -> None:
        self._paused = False
        self.world.request(ev.ResumeRequested, lambda _: None)

    def _end_troubles(self) -> None:
        self._resume()
        for learner in list(self.world.learners.values()):
            learner.poisoned = False
            if learner.incarnation < 0:
                self.world.join(learner)
            else:
                self.world.reconnect(learner)


def digest_of(seed: int, seconds: float) -> str:
    """Names everything that happened in a walk."""
    return hashlib.sha256("\n".join(Walk(seed).run(seconds).log).encode()).hexdigest()


if __name__ == "__main__":
    print(digest_of(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 60.0))
