"""One process of a learner: its machine, its steps, its control stream, and what may happen to each.

The link to the syncer has two directions that can be cut one by one. A stream that has lost a message never carries a
later one: it breaks, and the learner dials again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_effects as lfx
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.goodput import ActivityClock
from decoupled_diloco.core.ids import Activity, Fate
from decoupled_diloco.core.learner import LearnerMachine

if TYPE_CHECKING:
    from simulator.syncer_process import SyncerProcess
    from simulator.world import World

TOKENS_PER_STEP = 512
RETRY_SECONDS = 0.5
"""Wait before a broken transfer, stream or call is tried again."""

_HELD = {
    lfx.Hold.RECOVERING: Activity.RECOVER,
    lfx.Hold.PAUSED: Activity.PAUSED,
    lfx.Hold.DETACHED: Activity.PAUSED,
    lfx.Hold.BARRIER: Activity.SYNC_STALL,
    lfx.Hold.DRAINING: Activity.DRAINING,
    lfx.Hold.FINISHED: Activity.DRAINING,
}


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


class SimulatedLearner:
    """One learner's process; it may be started again, as another incarnation.

    Attributes:
        name: its id in the run.
        alive: whether the process runs.
        gone: it has left for good, or was refused; nobody starts it again by itself.
        incarnation: of the newest join; -1 while the process is dead, 0 before its first join.
        speaks, hears: whether the network carries what it sends, and what is sent to it.
        stopped_until: it stands still before this instant.
        link: the syncer that its control stream goes to.
        stream: counts its control streams; what belongs to an older one is lost.
        poisoned: its values are not finite until it has recovered.
    """

    def __init__(self, world: World, name: str, speed: Speed) -> None:
        self.world, self.name, self.speed = world, name, speed
        self.machine = LearnerMachine(world.policy)
        self.clock = ActivityClock(Activity.STARTUP, world.now)
        self.alive, self.gone = True, False
        self.incarnation = 0
        self.speaks = self.hears = True
        self.stopped_until = 0.0
        self.link: SyncerProcess | None = None
        self.stream = 0
        self.running, self.holding = False, True
        self.step_started = 0.0
        self.step_seconds: float | None = None
        self.poisoned = False
        self.fates: dict[Fate, int] = {}
        self.boundaries: list[lfx.Boundary] = []
        self._outbox: list[ev.Event] = []
        self._start_count = 0
        self._reported_at = -1.0

    @property
    def reachable(self) -> bool:
        """Whether messages go both ways."""
        return self.speaks and self.hears

    # ---- joining and attaching ---------------------------------------------------------------------------------------

    def join(self) -> None:
        """Wants in: nothing of an older incarnation is left."""
        self.unlink()
        self._start_count += 1
        self.machine = LearnerMachine(self.world.policy)
        self.clock = ActivityClock(Activity.RECOVER, self.world.now)
        self.alive, self.gone, self.running, self.holding = True, False, False, True
        self.speaks = self.hears = True
        self.incarnation = 0
        self.poisoned, self.step_seconds = False, None
        self._outbox.clear()
        self._ask_to_join(self._start_count)

    def _ask_to_join(self, start: int) -> None:
        def again() -> None:
            self.world.after(RETRY_SECONDS, lambda: self._ask_to_join(start))

        if start != self._start_count or not self.alive:
            return
        if not self.speaks:
            again()
            return

        def answered(value: object) -> None:
            if start == self._start_count and self.alive:
                self._on_join_answer(value, again)

        self.world.call(self, lambda number: ev.JoinRequested(number, self.name), answered, again)

    def _on_join_answer(self, value: object, again: Callable[[], None]) -> None:
        if isinstance(value, fx.Refusal):
            if value.reason in ("NOT_READY", "TOO_MANY_LEARNERS"):
                again()
            else:
                self.gone, self.alive, self.incarnation = True, False, -1
            return
        assert isinstance(value, fx.Admitted), value
        self.incarnation = value.incarnation
        self.world.incarnations[(self.name, value.incarnation)] = self
        self.machine.cursor = value.cursor
        for fragment, version, step in value.versions:
            self._act(self.machine.handle(lev.Published(fragment, version, step)))
        if value.paused:
            self.machine.handle(lev.PauseAsked("the run is paused"))
        self._dial(self.incarnation)
        self._heartbeat(self.incarnation)

    def dial(self) -> None:
        """Opens a new control stream, now."""
        if self.alive and self.incarnation > 0:
            self.unlink()
            self._dial(self.incarnation)

    def _dial(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive or self.link is not None:
            return
        process = self.world.process
        if not self.reachable or process is None or self.world.now < self.stopped_until:
            self.world.after(RETRY_SECONDS, lambda: self._dial(incarnation))
            return
        self.link = process
        self.stream += 1
        stream = self.stream
        applied = tuple(self.machine.applied_versions.items())
        hello = ev.LearnerAttached(self.name, incarnation, applied, self._progress())
        self.world.after(self.speed.latency_seconds, lambda: self._on_hello(process, stream, hello))

    def _on_hello(self, process: SyncerProcess, stream: int, hello: ev.LearnerAttached) -> None:
        """The syncer's side of a new stream."""
        if stream != self.stream or self.link is not process:
            return
        if not process.alive:
            self.on_stream_broken()
            return
        refusal = process.machine.admits(self.name, hello.incarnation)
        if refusal is not None:
            self.world.after(self.speed.latency_seconds, lambda: self._on_refused(stream, refusal))
            return
        self.hear(process, lev.AttachedAgain())
        self.hear(process, lev.SyncerSeen(process.store.epoch))
        process.tell(hello)
        outbox, self._outbox = self._outbox, []
        for event in outbox:
            self.send(event)

    def _on_refused(self, stream: int, refusal: fx.Refusal) -> None:
        if stream != self.stream or not self.alive:
            return
        if refusal.reason == "NOT_JOINED":
            self.join()
        else:
            self.kill()
            self.gone = True

    def on_stream_broken(self) -> None:
        """The control stream is gone; it dials again after a while."""
        if self.link is None:
            return
        self.unlink()
        if self.alive:
            incarnation = self.incarnation
            # Now before its uploads have begun again, and now after.
            self.world.after(2.0 * RETRY_SECONDS * self.world.draw(), lambda: self._dial(incarnation))

    def unlink(self) -> None:
        """Whatever is on its way on the present stream is lost."""
        self.link = None
        self.stream += 1

    def kill(self) -> None:
        """The process is gone; `join` starts it again."""
        self.unlink()
        self.alive = self.running = False
        self.incarnation = -1
        self._start_count += 1

    # ---- the wire ----------------------------------------------------------------------------------------------------

    def send(self, event: ev.Event) -> None:
        """A report on the control stream; it waits for one that is up."""
        link, stream = self.link, self.stream
        if link is None:
            if not isinstance(event, ev.ProgressReported):
                self._outbox.append(event)
        elif self.speaks:
            self.world.after(self.speed.latency_seconds, lambda: link.tell(event) if stream == self.stream else None)

    def hear(self, process: SyncerProcess, event: lev.LearnerEvent) -> None:
        """An instruction on the control stream, if it goes to that syncer."""
        if self.link is process and self.hears:
            stream = self.stream
            self.world.after(self.speed.latency_seconds, lambda: self._arrive(stream, event))

    def _arrive(self, stream: int, event: lev.LearnerEvent) -> None:
        if stream != self.stream or not self.alive:
            return
        if self.world.now < self.stopped_until:
            self.world.at(self.stopped_until, lambda: self._arrive(stream, event))
            return
        self.take(event)

    def take(self, event: lev.LearnerEvent) -> None:
        """The machine hears of something now."""
        self._act(self.machine.handle(event))
        if isinstance(event, lev.DrainAsked) and event.leaves:
            incarnation, seconds = self.incarnation, self.world.policy.deadlines.drain_seconds_max
            self.world.after(seconds, lambda: self._leave_in_time(incarnation, event.reason))
        if isinstance(event, lev.Ended):
            self.kill()
            self.gone = True
        elif self.holding and self.incarnation > 0:
            self._boundary()

    def _leave_in_time(self, incarnation: int, reason: str) -> None:
        """A drained learner leaves some time later even if a fragment has had no round for it."""
        if self.incarnation == incarnation and self.alive:
            self.world.leave(self, reason)

    def _act(self, effects: list[lfx.LearnerEffect]) -> None:
        for effect in effects:
            match effect:
                case lfx.Upload():
                    self.world.transfers.upload(self, effect)
                case lfx.DeclineRound(round_number, reason):
                    self.send(ev.ContributionDeclined(self.name, self.incarnation, round_number, reason))
                case lfx.Download():
                    self.world.transfers.download(self, effect)
                case lfx.CancelUpload(round_number):
                    self.world.transfers.cancel(self, round_number)
                case lfx.UploadInitialParameters():
                    self.world.transfers.upload_initial(self)
                case lfx.Leave(reason):
                    self.world.leave(self, reason)

    def _heartbeat(self, incarnation: int) -> None:
        if incarnation != self.incarnation or not self.alive:
            return
        now, seconds = self.world.now, self.world.policy.deadlines.heartbeat_seconds
        if now >= self.stopped_until and now >= self._reported_at + seconds:
            self._report()
        self.world.at(max(now + 0.1 * seconds, self._reported_at + seconds), lambda: self._heartbeat(incarnation))

    def _report(self) -> None:
        self._reported_at = self.world.now
        if self.link is not None:
            self.send(ev.ProgressReported(self.name, self.incarnation, self._progress()))

    def _progress(self) -> ev.Progress:
        machine, now = self.machine, self.world.now
        return ev.Progress(
            machine.local_step,
            machine.token_count,
            self.clock.activity,
            self.step_seconds,
            now - self.step_started if self.running else None,
            self.clock.take(now),
            schedule_step=machine.schedule_step,
        )

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        machine, incarnation = self.machine, self.incarnation
        plan = machine.at_boundary()
        self.poisoned = self.poisoned and not plan.restart_optimizer
        if self.world.keep_effects:
            self.boundaries.append(plan)
        for apply in plan.applies:
            self.send(
                ev.FragmentApplied(
                    self.name,
                    incarnation,
                    apply.fragment,
                    apply.version,
                    machine.local_step,
                    machine.token_count,
                    apply.kept_token_count,
                    self.speed.download_seconds,
                )
            )
        for upload in plan.uploads:
            self.world.transfers.upload(self, upload)
        self.holding = plan.hold is not None
        if plan.hold is None:
            self._start_step()
            return
        self.clock.switch(_HELD[plan.hold], self.world.now)
        if plan.hold is lfx.Hold.DRAINING:
            self._act(machine.drained())

    def _start_step(self) -> None:
        incarnation, speed = self.incarnation, self.speed
        self.running, self.step_started = True, self.world.now
        self.clock.switch(Activity.COMPUTE, self.world.now)
        seconds = speed.step_seconds
        if speed.jitter:
            seconds *= 1.0 + speed.jitter * (2.0 * self.world.draw() - 1.0)
        self.world.after(seconds, lambda: self._end_step(incarnation))

    def _end_step(self, incarnation: int) -> None:
        if self.incarnation != incarnation or not self.running:
            return
        now = self.world.now
        if now < self.stopped_until:
            self.world.at(self.stopped_until, lambda: self._end_step(incarnation))
            return
        self.running = False
        seconds, known = now - self.step_started, self.step_seconds
        self.step_seconds = seconds if known is None else known + 0.125 * (seconds - known)
        self.machine.step_finished(TOKENS_PER_STEP)
        self._report()
        self._boundary()
