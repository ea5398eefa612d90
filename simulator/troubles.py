"""Everything that goes wrong in a walk: who is hit when, and what is done about it later."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.run_state import RunState
from simulator.store import LEDGER, payload_file

if TYPE_CHECKING:
    from simulator.learner_process import SimulatedLearner, Speed
    from simulator.watched_world import WatchedWorld

CHECKPOINTS_KEPT = 4
RESTART_SECONDS_MAX = 6.0
"""Longest time without a syncer."""


class Troubles:
    """The troubles of one world.

    Args:
        world: what they happen to.
        source: where they are drawn from.
        crowd: how many learners there are most of the time.
        draw_speed: the speed of one more learner.
    """

    def __init__(self, world: WatchedWorld, source: random.Random, crowd: int, draw_speed: Callable[[], Speed]) -> None:
        self._world, self._source, self.crowd = world, source, crowd
        self._draw_speed = draw_speed
        self._until = 0.0
        self._pause_wanted = False
        self._evicted: set[str] = set()
        self._checkpoints: list[RunState] = []
        self._names = (f"learner-{i}" for i in range(10_000))
        self._kinds: dict[str, Callable[[], bool]] = {
            "learner killed": self._kill,
            "learner restarted": self._restart_one,
            "second process of a learner": self._clone,
            "learner suspended": self._suspend,
            "link cut": self._cut,
            "link cut one way": self._cut_one_way,
            "values not finite": self._poison,
            "learner asked to stop": self._drain_itself,
            "learner left": self._leave,
            "learner joined": self._join_one,
            "run paused": self._pause,
            "learner drained by operator": self._drain,
            "learner evicted": self._evict,
            "run finished by operator": self._finish,
            "syncer killed": self._crash,
            "syncer killed between effects": self._crash_between,
            "power lost": self._lose_power,
            "syncer suspended": self._suspend_syncer,
            "syncer taken over": self._take_over,
            "disk full": self._fill_disk,
            "record damaged": self._damage,
            "disk lost": self._lose_disk,
            "rolled back to checkpoint": self._roll_back,
            "checkpoint": self._checkpoint,
        }
        self._weights = [source.random() ** 2 for _ in self._kinds]
        self._seconds = source.choice((1.0, 4.0))

    # ---- from the beginning to the end -------------------------------------------------------------------------------

    def begin(self, seconds: float) -> None:
        """The crowd arrives; from then on things go wrong for some seconds."""
        self._until = seconds
        for _ in range(self.crowd):
            self._start_one()
        self._plan_next()

    def end(self) -> None:
        """Everything is mended: who is dead is started again, who is cut off is not any more."""
        world = self._world
        world.disk.full = False
        world.transfers.faults.broken_uploads = world.transfers.faults.failed_merges = 0.0
        if world.process is None:
            world.start_syncer()
        assert world.process is not None
        world.process.dies_after = None
        for name in sorted(self._evicted):
            self._readmit(name)
        self._resume()
        for learner in list(world.learners.values()):
            learner.poisoned = False
            if not learner.alive and not learner.gone:
                learner.join()
            elif not learner.reachable:
                world.reconnect(learner)
        if self._source.random() < 0.5:  # one last restart, which everybody has to come back from by itself
            world.crash_syncer()
            world.count("last restart")
            world.after(self._source.uniform(0.1, 2.0), self._start_again)

    def ask_to_finish(self) -> None:
        """An operator's call, again and again until it is answered."""
        self._insist(lambda number: ev.FinishRequested(number, "enough"))

    def _plan_next(self) -> None:
        at = self._world.now + self._source.expovariate(1.0 / self._seconds)
        if at < self._until:
            self._world.at(at, self._happen)

    def _happen(self) -> None:
        kind = self._source.choices(list(self._kinds), self._weights)[0]
        if self._kinds[kind]():
            self._world.count(kind)
        self._plan_next()

    def _later(self, seconds_max: float, action: Callable[[], object]) -> None:
        """Does something in a while, but not after the troubles have ended."""
        at = self._world.now + self._source.uniform(0.1, seconds_max)
        if at < self._until:
            self._world.at(at, action)

    def _insist(self, make: Callable[[int], ev.Event]) -> None:
        again = lambda: self._insist(make)  # noqa: E731

        def answered(value: object) -> None:
            if isinstance(value, fx.Refusal) and value.reason == "NOT_READY":
                self._world.after(1.0, again)

        self._world.request(make, answered, again)

    # ---- learners ----------------------------------------------------------------------------------------------------

    def _start_one(self) -> None:
        self._world.add_learner(next(self._names), self._draw_speed())

    def _running(self) -> SimulatedLearner | None:
        running = [x for x in self._world.learners.values() if x.alive and x.incarnation > 0]
        return self._source.choice(running) if running else None

    def _kill(self) -> bool:
        learner = self._running()
        if learner is None:
            return False
        learner.kill()
        self._later(20.0, lambda: self._revive(learner))
        return True

    def _revive(self, learner: SimulatedLearner) -> None:
        if not learner.alive and not learner.gone:
            learner.join()

    def _restart_one(self) -> bool:
        learner = self._running()
        if learner is None:
            return False
        learner.kill()
        learner.join()
        return True

    def _clone(self) -> bool:
        """A second process with the same id; the first one has not been stopped."""
        learner = self._running()
        if learner is None:
            return False
        self._world.add_learner(learner.name, learner.speed)
        return True

    def _suspend(self) -> bool:
        learner = self._running()
        if learner is None:
            return False
        learner.stopped_until = min(self._until, self._world.now + self._source.uniform(0.5, 20.0))
        return True

    def _cut(self) -> bool:
        learner = self._running()
        if learner is None or not learner.reachable:
            return False
        self._world.disconnect(learner, noticed=self._source.random() < 0.5)
        self._later(20.0, lambda: self._world.reconnect(learner))
        return True

    def _cut_one_way(self) -> bool:
        learner = self._running()
        if learner is None or not learner.reachable:
            return False
        if self._source.random() < 0.5:
            learner.speaks = False
        else:
            learner.hears = False
        self._later(20.0, lambda: self._world.reconnect(learner))
        return True

    def _poison(self) -> bool:
        learner = self._running()
        if learner is not None:
            learner.poisoned = True
        return learner is not None

    def _drain_itself(self) -> bool:
        learner = self._running()
        if learner is None or learner.link is None:
            return False
        self._world.drain(learner)
        self._later(5.0, self._join_one)
        return True

    def _leave(self) -> bool:
        learner = self._running()
        if learner is None:
            return False
        self._world.leave(learner)
        self._later(2.0, self._join_one)
        return True

    def _join_one(self) -> bool:
        """A new learner, or one that has left comes again; the crowd stays of a size."""
        learners = self._world.learners.values()
        here = [learner for learner in learners if not learner.gone]
        gone = [learner for learner in learners if learner.gone]
        if gone and self._source.random() < 0.5:
            self._source.choice(gone).join()
        elif len(here) <= self.crowd:
            self._start_one()
        else:
            return False
        return True

    # ---- operators ---------------------------------------------------------------------------------------------------

    def _pause(self) -> bool:
        if self._pause_wanted:
            return False
        self._pause_wanted = True
        self._world.request(lambda number: ev.PauseRequested(number, "maintenance"))
        self._later(5.0, self._resume)
        return True

    def _resume(self) -> None:
        self._pause_wanted = False
        self._insist(ev.ResumeRequested)

    def _drain(self) -> bool:
        learner = self._running()
        if learner is None:
            return False
        self._world.request(lambda number: ev.DrainRequested(number, learner.name, "maintenance"))
        self._later(5.0, self._join_one)
        return True

    def _evict(self) -> bool:
        learner = self._running()
        if learner is None:
            return False
        name = learner.name
        self._evicted.add(name)
        self._world.request(lambda number: ev.EvictRequested(number, name, "it misbehaves"))
        self._later(10.0, lambda: self._readmit(name))
        return True

    def _readmit(self, name: str) -> None:
        self._evicted.discard(name)
        self._insist(lambda number: ev.ReadmitRequested(number, name))

    def _finish(self) -> bool:
        """Rarely, and late: the troubles go on while the run is in its last rounds."""
        if self._world.now < 0.7 * self._until or self._source.random() < 0.8:
            return False
        self.ask_to_finish()
        return True

    def _checkpoint(self) -> bool:
        cut = self._world.checkpoint()
        if cut is not None:
            self._checkpoints = [*self._checkpoints[1 - CHECKPOINTS_KEPT :], cut]
        return cut is not None

    def _roll_back(self) -> bool:
        if not self._checkpoints:
            return False
        self._world.roll_back(self._source.choice(self._checkpoints), "the loss has diverged")
        return True

    # ---- the syncer and its disk -------------------------------------------------------------------------------------

    def _start_again(self) -> None:
        if self._world.process is None:
            self._world.start_syncer()

    def _crash(self) -> bool:
        if self._world.process is None:
            return False
        self._world.crash_syncer(power=False)
        self._later(RESTART_SECONDS_MAX, self._start_again)
        return True

    def _lose_power(self) -> bool:
        if self._world.process is None:
            return False
        self._world.crash_syncer()
        self._later(RESTART_SECONDS_MAX, self._start_again)
        return True

    def _crash_between(self) -> bool:
        process = self._world.process
        if process is None:
            return False
        process.dies_after = self._source.randint(0, 12)
        self._later(RESTART_SECONDS_MAX + 3.0, self._crash_and_start_again)
        return True

    def _crash_and_start_again(self) -> None:
        """If it has had nothing to do it is still alive, and dies now."""
        process = self._world.process
        if process is not None and process.dies_after is not None:
            self._world.crash_syncer()
        self._start_again()

    def _suspend_syncer(self) -> bool:
        process = self._world.process
        if process is None:
            return False
        process.stopped_until = self._world.now + self._source.uniform(0.5, 15.0)
        return True

    def _take_over(self) -> bool:
        """Another syncer is started on the volume while the first one runs, and lives on for a while."""
        first = self._world.process
        if first is None:
            return False
        self._world.start_syncer()
        self._world.after(self._source.uniform(0.5, 10.0), first.die)
        return True

    def _fill_disk(self) -> bool:
        disk = self._world.disk
        disk.full = True
        self._later(8.0, lambda: setattr(disk, "full", False))
        return True

    def _damage(self) -> bool:
        """A payload rots, and the syncer is killed: the restart finds it."""
        world, process = self._world, self._world.process
        if process is None or not process.machine.versions:
            return False
        fragment = self._source.randrange(world.policy.fragment_count)
        records = world.disk.file(payload_file(fragment)).records
        named = [t.content.named for t in world.disk.file(LEDGER).records if t.content.named]
        first = next(i for i, record in enumerate(records) if record.content.version == named[-1][fragment])
        if len(records) - first < 2:
            return False
        at = self._source.randrange(max(first + 1, len(records) - 6), len(records))
        world.disk.rot(payload_file(fragment), at)
        world.crash_syncer(power=False)
        self._later(RESTART_SECONDS_MAX, self._start_again)
        return True

    def _lose_disk(self) -> bool:
        if not self._world.lose_disk():
            return False
        at = self._source.uniform(0.1, RESTART_SECONDS_MAX)
        self._world.after(at, self._start_again)
        return True
