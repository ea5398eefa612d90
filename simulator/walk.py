"""Runs in which everything goes wrong that can, drawn from one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.core.policy import Deadlines, Policy
from simulator.rule import BrokenRuleError
from simulator.transfers import Faults
from simulator.troubles import Troubles
from simulator.watched_world import WatchedWorld
from simulator.world import Speed

SPEEDS = (1.0, 0.82, 0.5, 0.34)
LEARNERS_MAX = 32
PARTICIPATION_MIN = 0.25
"""Share of the rounds after healing that every learner that is there all the time has to be a member of."""


def drawn_policy(source: random.Random) -> Policy:
    """A policy of a size that a walk can go through."""
    interval = source.choice((4, 8, 8, 24, 24))
    return Policy(
        fragment_count=source.choice([p for p in (1, 2, 4, 8, 8, 8, 24, 24, 24) if p <= interval]),
        interval_steps=interval,
        overlap_steps=source.choice((1, 2)),
        total_steps=source.choice((0, 0, 0, 100)),
        quorum_minimum=source.choice((1, 1, 2, 3)),
        last_call=source.random() < 0.8,
        below_quorum=source.choice(("wait", "degrade")),
        norm_outlier_factor=source.choice((0.0, 3.0)),
        learners_max=LEARNERS_MAX,
        apply_rule=source.choice(("overwrite", "overwrite", "carry", "blend")),
        barrier=source.random() < 0.05,
        deadlines=Deadlines(
            lease_seconds=source.choice((4.0, 10.0)), stall_seconds=2.0, drain_seconds_max=10.0, upload_seconds_min=8.0
        ),
    )


def drawn_speed(source: random.Random) -> Speed:
    """A learner's speed."""
    return Speed(
        step_seconds=1.0 / source.choice(SPEEDS),
        jitter=source.choice((0.0, 0.1)),
        upload_seconds=source.choice((0.0, 0.5, 3.0)),
        download_seconds=source.choice((0.0, 0.3)),
        latency_seconds=source.choice((0.0, 0.05)),
    )


class Walk:
    """One run: a time with troubles, a time without, an end.

    Args:
        seed: everything follows from it.
        trace: told of everything that happens, in words.
        make_world: what makes the world; for tests.
    """

    def __init__(
        self,
        seed: int,
        trace: Callable[[str], None] | None = None,
        make_world: Callable[..., WatchedWorld] = WatchedWorld,
    ) -> None:
        self.seed = seed
        source = self._source = random.Random(seed)
        policy = drawn_policy(source)
        faults = Faults(
            broken_uploads=source.choice((0.0, 0.1)),
            repeated_uploads=0.1,
            failed_merges=source.choice((0.0, 0.0, 0.1)),
        )
        self.world = make_world(
            policy,
            seed,
            faults,
            merge_seconds=0.05,
            commit_seconds=source.choice((0.02, 0.3)),
            save_seconds=source.choice((0.01, 0.2)),
            base_interval=source.choice((1, 4)),
            keeps_tape=seed % 10 == 0,
            trace=trace,
        )
        self.world.mirror_seconds = source.choice((0.0, 0.5, 5.0))
        crowd = LEARNERS_MAX if source.random() < 0.03 else source.choice((1, 2, 3, 3, 4, 4, 5, 5, 6, 8))
        self.troubles = Troubles(self.world, source, crowd, lambda: drawn_speed(source))
        self.calm_from = 0
        self._there: dict[str, int] = {}

    # ---- the parts of a run ------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> WatchedWorld:
        """Lets the run go on for some time with troubles, and then for a while without."""
        self.troubles.begin(seconds)
        self.world.run(until=seconds)
        self.troubles.end()
        self.world.run(until=self.world.now + self.healing_seconds)
        self.calm_from = len(self.world.commits)
        self._there = {
            learner.name: learner.incarnation
            for learner in self.world.learners.values()
            if learner.alive and learner.incarnation > 0
        }
        self.world.run(until=self.world.now + self.cycle_seconds)
        return self.world

    @property
    def cycle_seconds(self) -> float:
        """In this time every fragment is synchronised three times, by the slowest learner alone."""
        slowest = max(learner.speed.step_seconds for learner in self.world.learners.values())
        return 3.0 * (self.world.policy.interval_steps + 4) * slowest

    @property
    def healing_seconds(self) -> float:
        """After this time all have joined and hold every fragment, and what has hung was given up."""
        deadlines = self.world.policy.deadlines
        return deadlines.lease_seconds + deadlines.drain_seconds_max + deadlines.upload_seconds_min + 10.0

    def check_healed(self) -> None:
        """Every fragment is published again, of everybody.

        Raises:
            BrokenRuleError: one is not, or a learner is left out.
        """
        world = self.world
        machine, policy = world.syncer, world.policy
        if world.finished or (policy.total_steps and machine.global_step >= policy.total_steps):
            return
        if machine.phase is RunPhase.FINISHING:
            return  # `finish` sees to it that it ends
        needed = 1 if policy.below_quorum == "degrade" else policy.quorum_minimum
        there = [name for name, incarnation in self._there.items() if self._stayed(name, incarnation)]
        if len(there) < needed or not machine.versions:
            if self.troubles.crowd >= needed and len(self._there) >= needed and not machine.versions:
                raise BrokenRuleError("liveness", "the run never got its initial parameters")
            return
        calm = world.commits[self.calm_from :]
        fragments = Counter(row.fragment for row in calm)
        missing = [p for p in range(policy.fragment_count) if not fragments[p]]
        if missing:
            reasons = [machine.reason_of(item, world.now) for item in machine.rounds.in_order()]
            raise BrokenRuleError("liveness", f"fragments {missing} were not published after healing: {reasons}")
        if policy.last_call and self._is_in_time(there):
            self._check_participation(there, len(calm), Counter(name for row in calm for name in row.members))

    def _is_in_time(self, there: list[str]) -> bool:
        """Whether even the slowest makes a step on every version before the next round of its fragment."""
        world = self.world
        speeds = [learner.speed for learner in world.learners.values() if learner.name in there]
        steps = [speed.step_seconds * (1.0 + speed.jitter) for speed in speeds]
        wire = max(s.upload_seconds + s.download_seconds + 4 * s.latency_seconds for s in speeds)
        sync = wire + world.merge_seconds + world.commit_seconds + world.policy.deadlines.last_call_seconds_max
        return world.policy.interval_steps * min(steps) * 0.8 > sync + 3 * max(steps)

    def _stayed(self, name: str, incarnation: int) -> bool:
        record = self.world.syncer.membership.get(name, incarnation)
        return record is not None and record.can_answer()

    def _check_participation(self, there: list[str], round_count: int, members: Counter[str]) -> None:
        for name in there:
            if members[name] < PARTICIPATION_MIN * round_count:
                raise BrokenRuleError("participation", f"{name} is a member of {members[name]} of {round_count} rounds")

    def finish(self) -> None:
        """The operator ends the run; that may take a drain and a lease.

        Raises:
            BrokenRuleError: it does not end.
        """
        world, deadlines = self.world, self.world.policy.deadlines
        self.troubles.ask_to_finish()
        world.run(until=world.now + deadlines.drain_seconds_max + deadlines.lease_seconds + 5.0)
        if not world.finished:
            raise BrokenRuleError("liveness", f"the run did not finish: {world.syncer.status(world.now).reason}")

    def go(self, seconds: float) -> WatchedWorld:
        """All of it, with every check."""
        self.run(seconds)
        self.check_healed()
        if not self.world.finished:
            self.finish()
        self.world.check_replays()
        return self.world
