"""A run in virtual time: syncers, learners, the disk, and the delays between them.

The world plays the part of the network, the operating system and the operator: it carries messages after the link's
latency, keeps the volume when a syncer dies, and starts another one. Everything random comes from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.disk import SimulatedDisk
from simulator.learner_process import RETRY_SECONDS, SimulatedLearner, Speed
from simulator.messages import event_for_learner
from simulator.store import written_down
from simulator.syncer_process import Request, SyncerProcess
from simulator.transfers import Faults, Transfers

if TYPE_CHECKING:
    from simulator.facts import Fact

__all__ = ["Faults", "SimulatedLearner", "Speed", "World"]


class World:
    """Virtual time and everything in it.

    Args:
        policy: the run's policy.
        merge_seconds, commit_seconds, save_seconds: what the syncer needs per round, and to save its state.
        seed: of everything that is random.
        faults: what goes wrong.
        base_interval: commits of a fragment from one full payload to the next.

    Attributes:
        process: the syncer that new connections reach; None while there is none.
        effects: (instant, effect) of all syncers, in order, while `keep_effects`.
        mirror: a copy of the volume that lags: the volume, and how long its files were; None before the first copy.
        counts: what happened how often, by kind.
    """

    def __init__(
        self,
        policy: Policy,
        merge_seconds: float = 0.0,
        commit_seconds: float = 0.0,
        seed: int = 0,
        faults: Faults | None = None,
        save_seconds: float = 0.0,
        base_interval: int = 4,
    ) -> None:
        self.policy = policy
        self.now = 0.0
        self.learners: dict[str, SimulatedLearner] = {}
        self.incarnations: dict[tuple[str, int], SimulatedLearner] = {}
        self.effects: list[tuple[float, fx.Effect]] = []
        self.keep_effects = True
        self.merge_seconds, self.commit_seconds, self.save_seconds = merge_seconds, commit_seconds, save_seconds
        self.base_interval = base_interval
        self.mirror_seconds = 0.0
        self.mirror: tuple[SimulatedDisk, dict[str, int]] | None = None
        self.rolling_back_to: tuple[Version, ...] = ()
        self.counts: Counter[str] = Counter()
        self.finished = False
        self._random = random.Random(seed)
        self.draw = self._random.random
        self._queue: list[tuple[float, int, Callable[[], Any]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self.processes: list[SyncerProcess] = []
        self.transfers = Transfers(self, faults or Faults())
        self.disk = SimulatedDisk()
        self.process: SyncerProcess | None = None
        self._newest_machine = SyncerMachine(policy)
        self.start_syncer()

    @property
    def syncer(self) -> SyncerMachine:
        """The machine of the newest syncer, dead or alive."""
        return self._newest_machine

    # ---- time and chance ---------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], Any]) -> None:
        """Does something at an instant."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], Any]) -> None:
        """Does something later."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), action))

    def run(self, until: float = float("inf"), stop: Callable[[], bool] | None = None) -> None:
        """Lets time pass until an instant, until `stop` says so, or until the run has finished."""
        queue = self._queue
        while queue and not self.finished and not (stop is not None and stop()):
            if queue[0][0] > until:
                self.now = until
                return
            self.now, _, action = heapq.heappop(queue)
            action()

    def chance(self, share: float) -> bool:
        """Whether something happens that happens in this share of the cases."""
        return share > 0.0 and self.draw() < share

    def next_number(self) -> int:
        """A number that was never given before."""
        return next(self._numbers)

    def count(self, kind: str) -> None:
        """One more of a kind."""
        self.counts[kind] += 1

    # ---- what is watched ---------------------------------------------------------------------------------------------

    def note(self, fact: Fact) -> None:
        """Something is so now; for whoever watches."""

    def before_event(self, process: SyncerProcess, event: ev.Event) -> None:
        """A machine is about to handle an event; for whoever watches."""

    def after_event(self, process: SyncerProcess, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """A machine has handled an event; for whoever watches."""
        if self.keep_effects:
            self.effects.extend((self.now, effect) for effect in effects)

    # ---- the syncer's life -------------------------------------------------------------------------------------------

    def start_syncer(self) -> None:
        """Starts a syncer on the volume; one that runs there already is fenced by it."""
        process = SyncerProcess(self, len(self.processes) + 1, self.disk)
        self.processes.append(process)
        self.process, self._newest_machine = process, process.machine
        process.start()

    def crash_syncer(self, *, power: bool = True) -> None:
        """SIGKILL; with the power gone, what was not synced is lost as well."""
        process = self.process
        if process is not None:
            process.die()
        if power:
            self.disk.crash(self.draw)

    def on_death(self, process: SyncerProcess, broken: list[Request]) -> None:
        """Everything that a syncer had under way breaks."""
        if self.process is process:
            self.process = None
            self.transfers.break_all()
        for learner in list(self.learners.values()):
            if learner.link is process:
                learner.on_stream_broken()
        for request in broken:
            self.after(RETRY_SECONDS, request.broken)

    def lose_disk(self) -> bool:
        """The volume is gone; a copy of the mirror takes its place. False if there is none yet."""
        if self.mirror is None:
            return False
        for process in self.processes:
            if process.disk is self.disk:
                process.die()
        disk, marks = self.mirror
        self.disk, self.mirror = disk.copy(marks), None
        return True

    def mirror_later(self, process: SyncerProcess) -> None:
        """Copies what was just made durable, some seconds later."""
        if self.mirror_seconds > 0.0:
            disk, marks = process.disk, process.store.marks()
            self.after(self.mirror_seconds, lambda: self._mirrored(disk, marks))

    def _mirrored(self, disk: SimulatedDisk, marks: dict[str, int]) -> None:
        if disk is self.disk:
            self.mirror = (disk, marks)

    def merged(self, merge: fx.StartMerge) -> ev.MergeFinished:
        """What a merge comes to; its digest is that of no other."""
        digest = f"{merge.fragment}.{merge.base.number + 1}.{self.next_number()}"
        finite = not self.chance(self.transfers.faults.failed_merges)
        return ev.MergeFinished(merge.round, digest, finite, self.merge_seconds)

    def commit_failure(self) -> str | None:
        """Why the next commit fails; None if nothing is in its way."""
        return "no space left on device" if self.chance(self.transfers.faults.failed_merges) else None

    # ---- calls and messages ------------------------------------------------------------------------------------------

    def tell_syncer(self, event: ev.Event) -> None:
        """Hands an event to the syncer now, if there is one."""
        if self.process is not None:
            self.process.tell(event)

    def request(
        self,
        make: Callable[[int], ev.Event],
        answered: Callable[[object], None] = lambda _: None,
        broken: Callable[[], None] = lambda: None,
    ) -> None:
        """A call that is answered, or breaks."""
        number = self.next_number()
        if self.process is None:
            self.after(RETRY_SECONDS, broken)
        else:
            self.process.request(number, Request(make(number), answered, broken))

    def call(
        self,
        learner: SimulatedLearner,
        make: Callable[[int], ev.Event],
        answered: Callable[[object], None],
        broken: Callable[[], None],
        later: bool = True,
    ) -> None:
        """A learner's call: there and back over its link, either of which may be cut."""
        latency = learner.speed.latency_seconds

        def back(value: object) -> None:
            self.after(latency, lambda: answered(value) if learner.hears else self.after(RETRY_SECONDS, broken))

        if later:
            self.after(latency, lambda: self.request(make, back, broken))
        else:
            self.request(make, back, broken)

    def tell_all(self, process: SyncerProcess, effect: fx.Effect) -> None:
        """An instruction to everybody that is attached to a syncer."""
        event = event_for_learner(effect)
        assert event is not None
        for learner in self.learners.values():
            if learner.link is process:
                learner.hear(process, event)

    def tell_one(self, process: SyncerProcess, effect: Any) -> None:
        """An instruction to one incarnation."""
        learner = self.incarnations.get((effect.learner, effect.incarnation))
        event = event_for_learner(effect)
        if learner is not None and event is not None and learner.incarnation == effect.incarnation:
            learner.hear(process, event)

    def cut_off(self, process: SyncerProcess, name: str, incarnation: int) -> None:
        """The syncer closes a stream; a learner that runs dials again."""
        learner = self.incarnations.get((name, incarnation))
        if learner is not None and learner.incarnation == incarnation and learner.link is process:
            learner.on_stream_broken()

    # ---- learners ----------------------------------------------------------------------------------------------------

    def add_learner(self, name: str, speed: Speed) -> SimulatedLearner:
        """Starts a learner now."""
        key = name if name not in self.learners else f"{name}#{self.next_number()}"
        learner = self.learners[key] = SimulatedLearner(self, name, speed)
        learner.join()
        return learner

    def disconnect(self, learner: SimulatedLearner, noticed: bool = True) -> None:
        """The network is gone; the learner trains on. `noticed`: the syncer sees the control stream break."""
        link = learner.link
        learner.speaks = learner.hears = False
        if noticed and link is not None:
            link.tell(ev.LearnerDetached(learner.name, learner.incarnation, "partition"))

    def reconnect(self, learner: SimulatedLearner) -> None:
        """The network is back; a stream that lost anything is opened anew."""
        learner.speaks = learner.hears = True
        learner.dial()

    def drain(self, learner: SimulatedLearner) -> None:
        """The learner was asked to stop: it leaves when its last steps are merged."""
        reason = "it was asked to stop"
        learner.send(ev.LeavingAnnounced(learner.name, learner.incarnation, reason))
        learner.take(lev.DrainAsked(reason))

    def leave(self, learner: SimulatedLearner, reason: str = "it was stopped") -> None:
        """The learner says goodbye and is gone, whatever it had under way."""
        left = learner.incarnation
        learner.kill()
        learner.gone = True
        if learner.speaks:
            self.request(lambda number: ev.LearnerLeft(number, learner.name, left, reason))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoint(self) -> RunState | None:
        """The run as it stands, as a checkpoint keeps it; None before it has parameters."""
        if self.process is None or not self.process.machine.versions:
            return None
        return written_down(RunState, self.process.machine.run_state())

    def roll_back(self, cut: RunState, reason: str) -> None:
        """An operator's call."""

        def answered(value: object) -> None:
            self.count("rolled back" if value is None else "roll back refused")

        self.rolling_back_to = cut.versions
        self.request(lambda number: ev.RollBackRequested(number, "checkpoint", cut, reason), answered)
