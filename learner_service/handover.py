"""What the device thread and the network thread share: the learner's machine, copies, versions, and the report.

One lock guards it all and is held for microseconds: nothing here waits for a transfer, a device or the other thread.
The one wait, `wait_for_news`, is the device thread's and only while a hold lasts.

    device thread                                       network thread
    ------------------------------------------------    ---------------------------------------------------
    begin_step, finish_step, plan (what to do now)      handle (what arrived), put_version
    fills the copies of the plan, then `publish`        take_outbox (uploads, applied versions), take_progress

What both keep of a model of N parameters in P fragments. On the devices, in the parameters' own type: at most one copy
of each fragment, N in all; in a run that trains about one for every round that is open or soon asked for, and for a
moment two, when a newer copy takes the place of an older one. Published
versions lie there, 4 N/P bytes each, from their arrival to their boundary: one or none, all of them (4 N bytes) in a
recovery. In host memory: the newest version of each fragment, 4 N bytes, which deltas are taken against, and as much
again for leaves narrower than float32; 4 N/P bytes and the encoded ones for each upload or download under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from decoupled_diloco.arrays.device import DeviceCopy
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.events import Progress
from decoupled_diloco.core.ids import Activity, Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.learner_effects import Apply, Hold, LearnerEffect, Upload
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.clock import Clock
from learner_service.activity import ActivityAccount, Spans, StepTimer
from learner_service.copies import CopySlot
from learner_service.handed_over import Action, Applied, Arrived, Outbox, Plan, Snapshot, UploadJob
from learner_service.journal import Journal


class Handover:
    """The meeting point of the two threads.

    Args:
        machine: of the first incarnation.
        account: where time goes.
        clock: instants.
        journal: told about all that happens; default: none is written.
    """

    def __init__(
        self, machine: LearnerMachine, account: ActivityAccount, clock: Clock, journal: Journal | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._machine = machine
        self._account = account
        self._clock = clock
        self.journal = journal or Journal()
        self._timer = StepTimer()
        self._generation = 0
        self._news_count = 0
        self._slots: dict[int, CopySlot] = {}
        self._sent: dict[int, CopySlot] = {}
        self._arrived: list[dict[Version, Arrived]] = [{} for _ in range(machine.policy.fragment_count)]
        self._outbox = Outbox()
        self._loss_sum = 0.0
        self._loss_count = 0
        self._hold: Hold | None = None
        self._network_wait_seconds = 0.0
        self.uploaded_bytes = 0
        self.downloaded_bytes = 0
        self.wake_network: Callable[[], None] = lambda: None
        """Called without the lock when there is something for the network thread; must not wait."""
        self.likely_copies: tuple[int, ...] = ()
        """Fragments that the next boundary will likely have copied; for the device thread alone."""
        self._wakes_late = False
        self._wake_is_due = False

    # ---- the device thread -------------------------------------------------------------------------------------------

    def enter(self, activity: Activity) -> Activity:
        """Goes over to another activity; returns the one before."""
        with self._lock:
            return self._account.switch(activity, self._clock.now())

    def begin_step(self) -> None:
        """The device thread is let go: a step begins."""
        with self._lock:
            now = self._clock.now()
            self._timer.begin(now)
            self._account.switch(Activity.COMPUTE, now)

    def finish_step(self, token_count: int) -> None:
        """The step is done; its boundary begins."""
        with self._lock:
            self._account.switch(Activity.SYNC_STALL, self._clock.now())
            self._machine.step_finished(token_count)
            self.journal.step(self._generation, self._machine.local_step, self._machine.cursor, token_count)

    def add_loss(self, loss: float) -> None:
        """A step's loss, for the next report."""
        with self._lock:
            self._loss_sum += loss
            self._loss_count += 1

    def plan(self) -> Plan:
        """Asks the machine what to do at this boundary. May be asked again while a hold lasts."""
        with self._lock:
            machine = self._machine
            boundary = machine.at_boundary()
            applies = tuple(self._prepare(apply) for apply in boundary.applies)
            slots = tuple(CopySlot(copy) for copy in boundary.copies)
            self._slots.update({slot.copy.fragment: slot for slot in slots})
            uploads = tuple(self._job(upload) for upload in boundary.uploads)
            self._hold = boundary.hold
            return Plan(
                applies=applies,
                slots=slots,
                hold=boundary.hold,
                schedule_step=boundary.schedule_step,
                restart_optimizer=boundary.restart_optimizer,
                uploads=uploads,
                generation=self._generation,
                news_count=self._news_count,
            )

    def publish(self, plan: Plan) -> float | None:
        """The boundary's work is done: hands its results over. Returns the seconds of the step, if one ended."""
        with self._lock:
            seconds = self._timer.end(self._clock.now())
            self.journal.boundary(plan.generation, plan.hold)
            if plan.generation == self._generation:
                self._outbox.uploads += plan.uploads
                self._outbox.applied += [
                    Applied(apply, self._machine.local_step, self._machine.token_count, arrived.download_seconds)
                    for apply, arrived, _ in plan.applies
                ]
                self._outbox.is_draining = plan.hold is Hold.DRAINING
                made = (self._machine.local_step, self._machine.token_count)
                for apply, arrived, _ in plan.applies:
                    self.journal.applied(plan.generation, apply, arrived.staged.flat, *made)
                    self._release(apply.fragment, apply.version)
        sent = {upload.slot.copy.fragment for upload in plan.uploads}
        self.likely_copies = tuple(slot.copy.fragment for slot in plan.slots if slot.copy.fragment not in sent)
        self._wake_is_due = True
        if plan.hold is not None or not self._wakes_late:
            self.wake_if_due()
        return seconds

    def step_under_way(self) -> None:
        """The devices compute and the device thread will wait for them: the network thread may have the interpreter.

        Whoever has called this once calls it in every step; from then on `publish` leaves the waking to it.
        """
        self._wakes_late = True
        self.wake_if_due()

    def wake_if_due(self) -> None:
        """Wakes the network thread for what was published, unless that was done."""
        if self._wake_is_due:
            self._wake_is_due = False
            self.wake_network()

    def wait_for_news(self, plan: Plan) -> None:
        """Waits until something has arrived since the plan was made."""
        began = self._clock.now()
        with self._news:
            self._news.wait_for(lambda: self._news_count != plan.news_count)
            seconds = self._clock.now() - began
            self.journal.waited(plan.generation, plan.hold, seconds)
            if plan.hold is Hold.BARRIER:
                self._network_wait_seconds += seconds

    # ---- the network thread ------------------------------------------------------------------------------------------

    def handle(self, event: lev.LearnerEvent) -> list[Action]:
        """Tells the machine what arrived; uploads come back with their copy and base."""
        with self._lock:
            if isinstance(event, lev.RecoverAsked):
                self.journal.recovery(self._generation, event.reason)
            effects = self._machine.handle(event)
            return self._told(effects)

    def drained(self) -> list[Action]:
        """After a boundary with the hold DRAINING: what cannot be answered is declined; in the end, leave."""
        with self._lock:
            return self._with_jobs(self._machine.drained())  # no news for the device thread, which only waits

    def wake_device(self) -> None:
        """Something outside the machine has changed that a held device thread should look at."""
        with self._lock:
            self._tell_device()

    def arrive(self, fragment: int, version: Version, global_step: int, arrived: Arrived) -> list[Action]:
        """A version is here. It is kept until it is neither applied nor the newest."""
        with self._lock:
            self._arrived[fragment][version] = arrived
            return self._told(self._machine.handle(lev.Downloaded(fragment, version, global_step)))

    def version(self, fragment: int, version: Version) -> Arrived | None:
        """A version that is kept here."""
        with self._lock:
            return self._arrived[fragment].get(version)

    def start_incarnation(self, machine: LearnerMachine, published: Iterable[lev.Published]) -> dict[int, Arrived]:
        """Puts the machine of a new incarnation in place of the old one; all that was in flight is void.

        Args:
            machine: the new one.
            published: the syncer's versions; those of them that are here need no download.

        Returns:
            The newest versions of the old incarnation, by fragment.
        """
        with self._lock:
            held = self._machine.held_versions
            newest = {p: self._arrived[p][version] for p, version in held.items()}
            current = {(entry.fragment, entry.version) for entry in published}
            for fragment, kept in enumerate(self._arrived):
                for version in [v for v in kept if (fragment, v) not in current]:
                    del kept[version]
            if self._generation:
                self._account.start_over(self._clock.now())
            self._machine = machine
            self._generation += 1
            self._slots.clear()
            self._sent.clear()
            self._outbox = Outbox()
            self._tell_device()
            return newest

    @property
    def generation(self) -> int:
        """Number of the incarnation within this process."""
        with self._lock:
            return self._generation

    def change_policy(self, policy: Policy) -> None:
        """The values that learners act by have changed."""
        with self._lock:
            self._machine.policy = policy

    def take_outbox(self) -> Outbox:
        """What the device thread left since the last time."""
        with self._lock:
            outbox, self._outbox = self._outbox, Outbox()
            return outbox

    def take_progress(self) -> Progress:
        """A report; its spans and loss count as reported unless `give_back` returns them."""
        with self._lock:
            now = self._clock.now()
            spans = self._account.take(now)
            loss = self._loss_sum / self._loss_count if self._loss_count else None
            self._loss_sum, self._loss_count = 0.0, 0
            return self._progress(now, spans, loss)

    def give_back(self, progress: Progress) -> None:
        """The report did not go out."""
        with self._lock:
            self._account.give_back(progress.spans)

    # ---- both --------------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The learner now; takes nothing out of the next report."""
        with self._lock:
            progress = self._progress(self._clock.now(), (), None)
            return Snapshot(progress, self._hold, self._machine.applied_versions)

    def activity_seconds(self) -> dict[Activity, float]:
        """Seconds by activity since the process started."""
        with self._lock:
            return self._account.totals(self._clock.now())

    @property
    def cursor(self) -> int:
        """The next batch of the slot."""
        with self._lock:
            return self._machine.cursor

    @property
    def schedule_step(self) -> int:
        """The step of the inner learning-rate schedule."""
        with self._lock:
            return self._machine.schedule_step

    # ---- under the lock ----------------------------------------------------------------------------------------------

    def _prepare(self, apply: Apply) -> tuple[Apply, Arrived, DeviceCopy | None]:
        kept = self._arrived[apply.fragment]
        arrived = kept[apply.version]
        for version in [v for v in kept if v not in (apply.version, self._machine.held_versions[apply.fragment])]:
            del kept[version]
        self._slots.pop(apply.fragment, None)
        since = self._sent.pop(apply.fragment, None)
        copy = since.arrays() if since is not None and apply.since is not None else None
        return apply, arrived, copy

    def _release(self, fragment: int, version: Version) -> None:
        """An applied version is kept as what deltas are taken against, but not on the devices."""
        kept = self._arrived[fragment]
        if (arrived := kept.get(version)) is not None:
            kept[version] = replace(arrived, staged=arrived.staged.in_host_memory())

    def _job(self, upload: Upload) -> UploadJob:
        fragment = upload.copy.fragment
        slot = self._slots[fragment]
        assert slot.copy == upload.copy
        self._sent[fragment] = slot
        return UploadJob(upload.round, slot, self._arrived[fragment][upload.copy.base].base, self._generation)

    def _told(self, effects: list[LearnerEffect]) -> list[Action]:
        self._tell_device()
        return self._with_jobs(effects)

    def _with_jobs(self, effects: list[LearnerEffect]) -> list[Action]:
        return [self._job(effect) if isinstance(effect, Upload) else effect for effect in effects]

    def _tell_device(self) -> None:
        self._news_count += 1
        self._news.notify_all()

    def _progress(self, now: float, spans: Spans, loss: float | None) -> Progress:
        machine = self._machine
        return Progress(
            local_step=machine.local_step,
            token_count=machine.token_count,
            activity=self._account.current,
            step_seconds=self._timer.step_seconds,
            running_step_seconds=self._timer.running_seconds(now),
            spans=spans,
            loss=loss,
            schedule_step=machine.schedule_step,
            network_wait_seconds=self._network_wait_seconds,
            uploaded_bytes=self.uploaded_bytes,
            downloaded_bytes=self.downloaded_bytes,
        )
