"""A run in virtual time: one SyncerMachine, many LearnerMachines, and the delays between them.

The world plays the part of the shells: it carries effects from one machine to another after the link's latency, lets
transfers and merges take their time, and steps each learner at its own speed. Everything random comes from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_effects as lfx
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.goodput import ActivityClock
from decoupled_diloco.core.ids import Activity, Fate
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.messages import event_for_learner
from simulator.transfers import RETRY_SECONDS, Faults, Transfers

TOKENS_PER_STEP = 512


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one learner is. Times in seconds.

    Attributes:
        step_seconds: mean duration of an inner step.
        jitter: a step takes step_seconds * (1 + jitter * u), u uniform in [-1, 1].
        upload_seconds, download_seconds: duration of one fragment's transfer.
        latency_seconds: one way, for every message.
    """

    step_seconds: float = 1.0
    jitter: float = 0.0
    upload_seconds: float = 0.0
    download_seconds: float = 0.0
    latency_seconds: float = 0.0


@dataclass(slots=True)
class SimulatedLearner:
    """One learner of the world; a new `machine` per incarnation."""

    name: str
    speed: Speed
    machine: LearnerMachine
    clock: ActivityClock
    incarnation: int = 0
    reachable: bool = True
    gone: bool = False
    """It has left, or was refused."""
    running: bool = False
    holding: bool = True
    step_started: float = 0.0
    step_seconds: float | None = None
    poisoned: bool = False
    """Its values are not finite until it has recovered."""
    fates: dict[Fate, int] = field(default_factory=dict)
    boundaries: list[lfx.Boundary] = field(default_factory=list)


class World:
    """Virtual time and everything in it.

    Args:
        policy: the run's policy.
        merge_seconds, commit_seconds: what the syncer needs per round.
        seed: of everything that is random.
        faults: what goes wrong.
    """

    def __init__(
        self,
        policy: Policy,
        merge_seconds: float = 0.0,
        commit_seconds: float = 0.0,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.policy = policy
        self.now = 0.0
        self.syncer = SyncerMachine(policy)
        self.learners: dict[str, SimulatedLearner] = {}
        self.effects: list[tuple[float, fx.Effect]] = []
        self.keep_effects = True
        self._merge_seconds, self._commit_seconds = merge_seconds, commit_seconds
        self._random = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._request = itertools.count(1)
        self._answers: dict[int, Callable[[object], None]] = {}
        self._timer_at: float | None = None
        self._inbox: deque[ev.Event] = deque()
        self._handling = False
        self._faults = faults or Faults()
        self._transfers = Transfers(self, self._faults)
        self.finished = False

    # ---- time --------------------------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Does something at an instant."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something later."""
        self.at(self.now + seconds, action)

    def run(self, until: float = float("inf"), stop: Callable[[], bool] | None = None) -> None:
        """Lets time pass until an instant, until `stop` says so, or until the run has finished."""
        while self._queue and not self.finished and not (stop is not None and stop()):
            when, _, action = heapq.heappop(self._queue)
            if when > until:
                self.at(when, action)
                self.now = until
                return
            self.now = when
            action()

    # ---- the syncer's shell ------------------------------------------------------------------------------------------

    def draw(self) -> float:
        """A random number from 0 to 1."""
        return self._random.random()

    def tell_syncer(self, event: ev.Event) -> None:
        """Hands an event to the syncer's machine now; all effects of one are carried out before the next is handled."""
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        while self._inbox:
            self._handle(self._inbox.popleft())
        self._handling = False

    def _handle(self, event: ev.Event) -> None:
        for effect in self.syncer.handle(event, self.now):
            if self.keep_effects:
                self.effects.append((self.now, effect))
            self._carry_out(effect)
        deadline = self.syncer.next_deadline()
        if deadline is not None and (self._timer_at is None or deadline < self._timer_at or self._timer_at <= self.now):
            self._timer_at = deadline
            self.at(deadline, lambda: self._fire(deadline))

    def _fire(self, deadline: float) -> None:
        if self._timer_at == deadline:
            self._timer_at = None
            self.tell_syncer(ev.TimerFired())

    def request(self, make: Callable[[int], ev.Event], answered: Callable[[object], None]) -> None:
        """An event that is answered."""
        number = next(self._request)
        self._answers[number] = answered
        self.tell_syncer(make(number))

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Answer(request, value):
                self._answers.pop(request)(value)
            case fx.StartMerge(round=number, fragment=fragment, base=base):
                digest = f"{fragment}.{base.number + 1}"
                done = ev.MergeFinished(number, digest, not self._fails(), self._merge_seconds)
                self.after(self._merge_seconds, lambda: self.tell_syncer(done))
            case fx.CommitRound(round=number):
                failed = ev.CommitFailed(number, "no space left on device")
                committed = failed if self._fails() else ev.CommitFinished(number, self._commit_seconds)
                self.after(self._commit_seconds, lambda: self.tell_syncer(committed))
            case fx.CommitInitialParameters():
                digests = tuple(f"{p}.1" for p in range(self.policy.fragment_count))
                self.after(0.0, lambda: self.tell_syncer(ev.InitialParametersCommitted(digests)))
            case fx.PublishFragment(fragment, version, step):
                self._tell_all(lev.Published(fragment, version, step))
            case fx.CloseRound(
                round=number, fragment=fragment, committed=committed_, members=members, global_step=step
            ):
                self._tell_all(lev.RoundEnded(number, fragment, committed_, members, step))
            case fx.EndRun():
                self.finished = True
            case fx.AbortUpload():
                self._transfers.abort(effect)
            case fx.ExpireLearner(name, incarnation):
                self._cut_off(name, incarnation)
            case fx.Note() | fx.ChangePolicy() | fx.DiscardInitialParameters():
                pass
            case _:
                self._tell(effect.learner, effect.incarnation, event_for_learner(effect))

    def _fails(self) -> bool:
        return self._faults.failed_merges > 0.0 and self.draw() < self._faults.failed_merges

    def _tell_all(self, event: lev.LearnerEvent) -> None:
        for learner in self.learners.values():
            self._tell(learner.name, learner.incarnation, event)

    def _tell(self, name: str, incarnation: int, event: lev.LearnerEvent | None) -> None:
        learner = self.learners.get(name)
        if event is not None and learner is not None and learner.reachable:
            self.after(learner.speed.latency_seconds, lambda: self.deliver(learner, incarnation, event))

    def _cut_off(self, name: str, incarnation: int) -> None:
        """A learner whose stream is closed although it runs dials again."""
        learner = self.learners.get(name)
        if learner is not None and learner.incarnation == incarnation and learner.reachable and not learner.gone:
            self.after(RETRY_SECONDS, lambda: self.reconnect(learner) if learner.incarnation == incarnation else None)

    # ---- the learners' shells ----------------------------------------------------------------------------------------

    def add_learner(self, name: str, speed: Speed) -> SimulatedLearner:
        """Starts a learner now."""
        machine = LearnerMachine(self.policy)
        learner = SimulatedLearner(name, speed, machine, ActivityClock(Activity.STARTUP, self.now))
        self.learners[name] = learner
        self.join(learner)
        self._heartbeat(learner)
        return learner

    def join(self, learner: SimulatedLearner) -> None:
        """A new incarnation: nothing of the old one is left."""
        learner.machine = LearnerMachine(self.policy)
        learner.clock = ActivityClock(Activity.RECOVER, self.now)
        learner.running, learner.holding, learner.reachable = False, True, True
        learner.poisoned = learner.gone = False
        learner.step_seconds = None

        def admitted(value: object) -> None:
            if isinstance(value, fx.Refusal):
                learner.gone = True
                return
            assert isinstance(value, fx.Admitted), value
            learner.incarnation = value.incarnation
            learner.machine.cursor = value.cursor
            self._attach(learner)

        self.request(lambda number: ev.JoinRequested(number, learner.name), admitted)

    def _attach(self, learner: SimulatedLearner) -> None:
        applied = tuple(learner.machine.applied_versions.items())
        self.tell_syncer(ev.LearnerAttached(learner.name, learner.incarnation, applied, self._progress(learner)))
        if learner.holding:
            self._boundary(learner)

    def disconnect(self, learner: SimulatedLearner, noticed: bool = True) -> None:
        """The network is gone; the learner trains on. `noticed`: the syncer sees the control stream break."""
        learner.reachable = False
        if noticed:
            self.tell_syncer(ev.LearnerDetached(learner.name, learner.incarnation, "partition"))

    def reconnect(self, learner: SimulatedLearner) -> None:
        """The network is back."""
        if learner.gone or learner.incarnation < 0:
            return
        learner.reachable = True
        learner.machine.handle(lev.AttachedAgain())
        self._attach(learner)

    def drain(self, learner: SimulatedLearner) -> None:
        """The learner was asked to stop: it leaves when its last steps are merged."""
        self._send(learner, ev.LeavingAnnounced(learner.name, learner.incarnation, "it was asked to stop"))
        self.deliver(learner, learner.incarnation, lev.DrainAsked("it was asked to stop"))

    def leave(self, learner: SimulatedLearner, reason: str = "it was stopped") -> None:
        """The learner says goodbye and is gone, whatever it had under way."""
        left, learner.gone = learner.incarnation, True
        self.request(lambda number: ev.LearnerLeft(number, learner.name, left, reason), lambda _: None)
        self.kill(learner)

    def kill(self, learner: SimulatedLearner) -> None:
        """The process is gone; `join` starts it again."""
        learner.reachable = learner.running = False
        learner.incarnation = -1

    def _heartbeat(self, learner: SimulatedLearner) -> None:
        if learner.reachable and learner.incarnation > 0:
            self._send(learner, ev.ProgressReported(learner.name, learner.incarnation, self._progress(learner)))
        self.after(self.policy.deadlines.heartbeat_seconds, lambda: self._heartbeat(learner))

    def _progress(self, learner: SimulatedLearner) -> ev.Progress:
        machine = learner.machine
        return ev.Progress(
            machine.local_step,
            machine.token_count,
            learner.clock.activity,
            learner.step_seconds,
            self.now - learner.step_started if learner.running else None,
            learner.clock.take(self.now),
            schedule_step=machine.schedule_step,
        )

    def _send(self, learner: SimulatedLearner, event: ev.Event) -> None:
        if learner.reachable:
            self.after(learner.speed.latency_seconds, lambda: self.tell_syncer(event))

    def deliver(self, learner: SimulatedLearner, incarnation: int, event: lev.LearnerEvent) -> None:
        """Something arrives at a learner, if it is still there."""
        if learner.incarnation != incarnation or not learner.reachable:
            return
        for effect in learner.machine.handle(event):
            self._learner_effect(learner, effect)
        if learner.holding:
            self._boundary(learner)

    def _learner_effect(self, learner: SimulatedLearner, effect: lfx.LearnerEffect) -> None:
        match effect:
            case lfx.Upload():
                self._transfers.upload(learner, effect)
            case lfx.DeclineRound(round_number, reason):
                self._send(learner, ev.ContributionDeclined(learner.name, learner.incarnation, round_number, reason))
            case lfx.Download(fragment, version):
                self._transfers.download(learner, fragment, version)
            case lfx.CancelUpload(round_number):
                self._transfers.cancel(learner, round_number)
            case lfx.UploadInitialParameters():
                self.after(learner.speed.latency_seconds, lambda: self._upload_initial(learner, learner.incarnation))
            case lfx.Leave(reason):
                self.leave(learner, reason)

    def _upload_initial(self, learner: SimulatedLearner, incarnation: int) -> None:
        for p in range(self.policy.fragment_count):
            if learner.reachable and learner.incarnation == incarnation:
                self._send_initial(learner.name, incarnation, p)

    def _send_initial(self, name: str, incarnation: int, fragment: int) -> None:
        digest = f"{fragment}.1"
        self.request(
            lambda number: ev.InitialFragmentReceived(number, name, incarnation, fragment, digest), lambda _: None
        )

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _boundary(self, learner: SimulatedLearner) -> None:
        plan = learner.machine.at_boundary()
        learner.poisoned = learner.poisoned and not plan.restart_optimizer
        learner.boundaries.append(plan) if self.keep_effects else None
        for apply in plan.applies:
            machine = learner.machine
            applied = ev.FragmentApplied(
                learner.name,
                learner.incarnation,
                apply.fragment,
                apply.version,
                machine.local_step,
                machine.token_count,
                apply.kept_token_count,
                learner.speed.download_seconds,
            )
            self._send(learner, applied)
        for upload in plan.uploads:
            self._transfers.upload(learner, upload)
        learner.holding = plan.hold is not None
        if plan.hold is None:
            self._start_step(learner)
            return
        learner.clock.switch(_HELD[plan.hold], self.now)
        if plan.hold is lfx.Hold.DRAINING:
            for effect in learner.machine.drained():
                self._learner_effect(learner, effect)

    def _start_step(self, learner: SimulatedLearner) -> None:
        speed, incarnation = learner.speed, learner.incarnation
        learner.running, learner.step_started = True, self.now
        learner.clock.switch(Activity.COMPUTE, self.now)
        seconds = speed.step_seconds * (1.0 + speed.jitter * self._random.uniform(-1.0, 1.0))
        self.after(seconds, lambda: self._end_step(learner, incarnation, seconds))

    def _end_step(self, learner: SimulatedLearner, incarnation: int, seconds: float) -> None:
        if learner.incarnation != incarnation or not learner.running:
            return
        learner.running = False
        known = learner.step_seconds
        learner.step_seconds = seconds if known is None else known + 0.125 * (seconds - known)
        learner.machine.step_finished(TOKENS_PER_STEP)
        self._send(learner, ev.ProgressReported(learner.name, incarnation, self._progress(learner)))
        self._boundary(learner)


_HELD = {
    lfx.Hold.RECOVERING: Activity.RECOVER,
    lfx.Hold.PAUSED: Activity.PAUSED,
    lfx.Hold.DETACHED: Activity.PAUSED,
    lfx.Hold.BARRIER: Activity.SYNC_STALL,
    lfx.Hold.DRAINING: Activity.DRAINING,
    lfx.Hold.FINISHED: Activity.DRAINING,
}
