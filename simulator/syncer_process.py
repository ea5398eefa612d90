"""One process of the syncer: its machine, its hands, its store, and every way to die.

It does with the effects what the service's shell does, in the same order: payload, transaction, then the answer or the
publication. It may be killed between any two of these steps, and between any two effects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.syncer import SyncerMachine
from simulator import facts
from simulator.disk import DiskFullError, SimulatedDisk
from simulator.store import FencedError, SimulatedStore, Transaction

if TYPE_CHECKING:
    from simulator.world import World

PROBE_SECONDS = 1.0
"""Between two attempts to write to a store that could not."""

COMMANDS = (
    ev.PauseRequested,
    ev.ResumeRequested,
    ev.FinishRequested,
    ev.DrainRequested,
    ev.EvictRequested,
    ev.ReadmitRequested,
)
SAVED_BEFORE_ANSWER = (ev.JoinRequested, ev.LearnerLeft, *COMMANDS)
"""Requests whose answers must hold."""


@dataclass(slots=True)
class Request:
    """A question to the machine. `broken`: called instead of `answered` when no answer will come, or it must not."""

    event: ev.Event
    answered: Callable[[object], None]
    broken: Callable[[], None]


@dataclass(slots=True)
class Job:
    """Work for the store's thread: steps that each take some seconds, then what follows."""

    steps: list[tuple[float, Callable[[], None]]]
    done: Callable[[], None]
    failed: Callable[[str], None]
    request: Request | None = None
    """Whose answer waits for it."""


class SyncerProcess:
    """A syncer from its start to its death.

    Args:
        world: where it lives.
        number: which of the world's syncers it is, from 1.
        disk: its volume.

    Attributes:
        alive: whether it still runs.
        stopped_until: it stands still before this instant: a suspended host.
        dies_after: after how many more effects it is killed; None: it is not.
        serving: the newest version of every fragment that it serves.
    """

    def __init__(self, world: World, number: int, disk: SimulatedDisk) -> None:
        self.world, self.number, self.disk = world, number, disk
        self.store = SimulatedStore(disk, world.base_interval)
        self.machine = SyncerMachine(world.policy)
        self.alive = True
        self.stopped_until = 0.0
        self.dies_after: int | None = None
        self.serving: dict[int, Version] = {}
        self._inbox: deque[ev.Event] = deque()
        self._backlog: list[ev.Event] = []
        self._handling = False
        self._requests: dict[int, Request] = {}
        self._timer_at: float | None = None
        self._jobs: deque[Job] = deque()
        self._is_working = False
        self._can_write = True
        self._when_possible: list[Callable[[], None]] = []
        self._waiting_saves: list[tuple[Request, object]] = []

    def start(self) -> None:
        """Takes up what the volume holds."""
        world, machine = self.world, self.machine
        from_mirror, self.disk.is_mirror = self.disk.is_mirror, False
        was_rotten, self.disk.is_rotten = self.disk.is_rotten, False
        restored = self.store.restored(world.policy, is_mirror=from_mirror)
        if restored is None:
            world.note(facts.Started(world.now, self.number, machine, None))
            return
        effects = machine.restore(restored.state, restored.newer, world.now)
        self.serving = dict(enumerate(machine.versions))
        world.note(facts.Started(world.now, self.number, machine, restored, from_mirror, was_rotten))
        for effect in effects:
            self._carry_out(effect)
        self._arm()

    def die(self) -> None:
        """SIGKILL, or the end of a fenced process: nothing more happens here."""
        if not self.alive:
            return
        self.alive = False
        requests, self._requests = self._requests, {}
        saves, self._waiting_saves = self._waiting_saves, []
        waiting = [job.request for job in self._jobs if job.request is not None]
        self.world.on_death(self, [*requests.values(), *(request for request, _ in saves), *waiting])

    # ---- events ------------------------------------------------------------------------------------------------------

    def request(self, number: int, request: Request) -> None:
        """An event that is answered under that number."""
        self._requests[number] = request
        self.tell(request.event)

    def tell(self, event: ev.Event) -> None:
        """Hands over an event now; all effects of one are carried out before the next is handled."""
        if not self.alive:
            return
        if self.world.now < self.stopped_until:
            if not self._backlog:
                self.world.at(self.stopped_until, self._go_on)
            self._backlog.append(event)
            return
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        while self._inbox and self.alive:
            self._handle(self._inbox.popleft())
        self._handling = False

    def _go_on(self) -> None:
        if self.world.now < self.stopped_until:
            self.world.at(self.stopped_until, self._go_on)
            return
        backlog, self._backlog = self._backlog, []
        for event in backlog:
            self.tell(event)

    def _handle(self, event: ev.Event) -> None:
        world = self.world
        world.before_event(self, event)
        effects = self.machine.handle(event, world.now)
        world.after_event(self, event, effects)
        for effect in effects:
            if self.dies_after is not None:
                self.dies_after -= 1
                if self.dies_after < 0:
                    self.die()
            if not self.alive:
                return
            self._carry_out(effect)
        self._arm()
        if self._waiting_saves and not self.machine.steering.is_rolling_back:
            saves, self._waiting_saves = self._waiting_saves, []
            for request, value in saves:
                self._save(request, value)

    def _arm(self) -> None:
        deadline, armed, now = self.machine.next_deadline(), self._timer_at, self.world.now
        if deadline is not None and (armed is None or deadline < armed or armed <= now):
            self._timer_at = deadline
            self.world.at(deadline, lambda: self._fire(deadline))

    def _fire(self, deadline: float) -> None:
        if self._timer_at != deadline or not self.alive:
            return
        if self.world.now < self.stopped_until:
            self.world.at(self.stopped_until, lambda: self._fire(deadline))
            return
        self._timer_at = None
        wanted = self.machine.next_deadline()
        if wanted is not None and wanted <= self.world.now:
            self.tell(ev.TimerFired())
        else:
            self._arm()

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: fx.Effect) -> None:
        world = self.world
        match effect:
            case fx.Answer(number, value):
                self._answer(self._requests.pop(number), value)
            case fx.StartMerge():
                done = world.merged(effect)
                world.after(world.merge_seconds, lambda: self.tell(done))
            case fx.CommitRound():
                self._commit(effect)
            case fx.CommitInitialParameters():
                self._commit_initial()
            case fx.PublishFragment(fragment, version):
                self.serving[fragment] = version
                world.note(facts.Published(world.now, self.number, fragment, version))
                world.tell_all(self, effect)
            case fx.CloseRound():
                world.tell_all(self, effect)
            case fx.RollBack():
                self._roll_back(effect)
            case fx.EndRun():
                world.finished = True
            case fx.AbortUpload():
                world.transfers.abort(effect)
            case fx.ExpireLearner(learner, incarnation):
                world.cut_off(self, learner, incarnation)
            case fx.Note() | fx.ChangePolicy() | fx.DiscardInitialParameters() | fx.LoadInitialParameters():
                pass
            case _:
                world.tell_one(self, effect)

    def _answer(self, request: Request, value: object) -> None:
        if isinstance(request.event, SAVED_BEFORE_ANSWER) and not isinstance(value, fx.Refusal):
            self._waiting_saves.append((request, value))
        else:
            request.answered(value)

    def _save(self, request: Request, value: object) -> None:
        """Makes the state of now durable; then the answer may go out."""
        state = self.machine.run_state()

        def saved() -> None:
            if isinstance(value, fx.Admitted):
                handed_out = facts.HandedOut(self.world.now, self.number, value.learner, value.incarnation, value.slot)
                self.world.note(handed_out)
            elif isinstance(request.event, COMMANDS):
                self.world.note(facts.Answered(self.world.now, self.number, request.event, state))
            request.answered(value)

        step = (self.world.save_seconds, lambda: self._transact(Transaction(0, state)))
        self._enqueue(Job([step], saved, lambda _: request.broken(), request))

    def _commit(self, effect: fx.CommitRound) -> None:
        world, store, fragment = self.world, self.store, effect.fragment
        state, base, began = self.machine.run_state(), self.machine.versions[fragment], world.now
        failure = world.commit_failure()

        def append() -> None:
            if failure is not None:
                raise DiskFullError(failure)
            store.append_payload(fragment, effect.version, base)

        steps = self._commit_order(
            append, lambda: store.sync_payload(fragment), lambda: self._transact(Transaction(0, state, effect))
        )
        done = lambda: self.tell(ev.CommitFinished(effect.round, world.now - began))  # noqa: E731
        self._enqueue(Job(steps, done, lambda reason: self.tell(ev.CommitFailed(effect.round, reason))))

    def _commit_order(
        self, append: Callable[[], None], sync: Callable[[], None], transact: Callable[[], None]
    ) -> list[tuple[float, Callable[[], None]]]:
        """The payload is durable before the one transaction that makes it count."""
        third = self.world.commit_seconds / 3
        return [(third, append), (third, sync), (third, transact)]

    def _commit_initial(self) -> None:
        count, store = self.world.policy.fragment_count, self.store
        timeline = self.machine.timeline
        versions = tuple(Version(timeline, 1, f"{p}.1.{self.world.next_number()}") for p in range(count))

        def append() -> None:
            for fragment, version in enumerate(versions):
                store.append_payload(fragment, version, None)
                store.sync_payload(fragment)

        def done() -> None:
            self.serving = dict(enumerate(versions))
            self.tell(ev.InitialParametersCommitted(tuple(version.digest for version in versions)))

        seconds = self.world.save_seconds
        name = lambda: self._transact(Transaction(0, None, None, versions, (0,) * count))  # noqa: E731
        self._enqueue(
            Job([(seconds, append), (seconds, name)], done, lambda _: self._when_possible.append(self._commit_initial))
        )

    def _roll_back(self, effect: fx.RollBack) -> None:
        store, state = self.store, effect.state
        cut = self.world.rolling_back_to

        def append() -> None:
            for fragment, version in enumerate(state.versions):
                store.append_payload(fragment, version, None)
                store.sync_payload(fragment)

        def done() -> None:
            self.serving = dict(enumerate(state.versions))
            self.tell(ev.RolledBack())

        name = lambda: self._transact(  # noqa: E731
            Transaction(0, state, None, state.versions, state.version_steps), cut
        )
        seconds = self.world.save_seconds
        self._enqueue(
            Job([(seconds, append), (seconds, name)], done, lambda reason: self.tell(ev.RollBackFailed(reason)))
        )

    # ---- the store's thread ------------------------------------------------------------------------------------------

    def _transact(self, wanted: Transaction, cut: tuple[Version, ...] = ()) -> None:
        store = self.store
        if wanted.row is not None and wanted.state is not None:
            store.commit(wanted.row, wanted.state)
        elif wanted.named:
            store.name(wanted.named, wanted.steps, wanted.state)
        elif wanted.state is not None:
            store.save(wanted.state)
        self.world.note(facts.Durable(self.world.now, self.number, wanted, cut))
        self.world.mirror_later(self)

    def _enqueue(self, job: Job) -> None:
        self._jobs.append(job)
        if not self._is_working:
            self._work()

    def _work(self) -> None:
        """Takes the steps of the jobs in order; a step that takes time comes back here."""
        self._is_working = True
        while self._jobs and self.alive:
            job = self._jobs[0]
            if not job.steps:
                self._jobs.popleft()
                job.done()
                continue
            seconds, step = job.steps.pop(0)
            if seconds > 0.0:
                self.world.after(seconds, lambda step=step: self._step_later(step))  # type: ignore[misc]
                return
            self._step(step)
        self._is_working = False

    def _step_later(self, step: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.world.now < self.stopped_until:
            self.world.at(self.stopped_until, lambda: self._step_later(step))
            return
        self._step(step)
        self._work()

    def _step(self, step: Callable[[], None]) -> None:
        try:
            step()
        except DiskFullError as error:
            job = self._jobs.popleft()
            self._cannot_write(str(error))
            job.failed(str(error))
        except FencedError:
            self.world.count("fenced")
            self.die()

    def _cannot_write(self, reason: str) -> None:
        self.tell(ev.StorageFailed(reason))
        if self._can_write:
            self._can_write = False
            self.world.after(PROBE_SECONDS, self._probe)

    def _probe(self) -> None:
        if self.alive:
            again = lambda _: self.world.after(PROBE_SECONDS, self._probe)  # noqa: E731
            self._enqueue(Job([(0.0, self.store.probe)], self._can_again, again))

    def _can_again(self) -> None:
        self._can_write = True
        self.tell(ev.StorageRecovered())
        waiting, self._when_possible = self._when_possible, []
        for work in waiting:
            work()
