"""Who takes part: learners, their incarnations, leases and data slots.

An incarnation is a fencing token, one per start of a learner; a new one replaces the old at once. A lease lasts as
long as the syncer hears from the learner; moving bytes count. *Live for quorum* is narrower than having a lease: a
learner that is recovering, compiling, draining, paused, stalled or detached keeps its lease, but no round waits for
it.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass, field

from decoupled_diloco.core.events import Progress
from decoupled_diloco.core.ids import Activity, LearnerState, Role, Version
from decoupled_diloco.core.policy import Policy

GONE_LEASES = 30
"""A learner that has been lost for this many leases is gone for good: a new learner may take its data slot over."""

RATE_SECONDS = 10.0
"""A learner's rate is of about so many newest seconds."""

RATE_SECONDS_MIN = 1.0
"""No rate is of less: reports that were held back come all at once."""

_STATE_OF_ACTIVITY = {
    Activity.COMPILE: LearnerState.COMPILING,
    Activity.STARTUP: LearnerState.RECOVERING,
    Activity.RECOVER: LearnerState.RECOVERING,
    Activity.PAUSED: LearnerState.PAUSED,
    Activity.DRAINING: LearnerState.DRAINING,
}


@dataclass(slots=True, eq=False)
class LearnerRecord:
    """All that the syncer knows of one learner (or observer); the newest incarnation's."""

    learner: str
    incarnation: int
    role: Role
    slot: int
    heard_at: float
    cursor: int = 0
    """Committed cursor of the slot: that of its newest merged contribution."""
    first_cursor: int = 0
    """Where this incarnation began in its slot's data."""
    peer_address: str = ""
    software_version: str = ""
    attached: bool = False
    awaited: bool = False
    """It was live when this syncer was started again, and it has not attached yet."""
    lost: bool = False
    lost_at: float = 0.0
    """When the current loss began, by the last sign of life."""
    left: bool = False
    left_reason: str = ""
    must_join_again: str = ""
    """Why this incarnation is over although its process may live: what it is based on was rolled back."""
    draining: bool = False
    drain_reason: str = ""
    deaf: bool = False
    """It let a last call run out; nobody waits for it until it is heard again."""
    progress: Progress = field(default_factory=lambda: Progress(0, 0, Activity.STARTUP))
    progress_at: float = 0.0
    seen_token_count: int = 0
    """Most tokens of this incarnation that any message has shown."""
    loss: float | None = None
    tokens_per_second: float = 0.0
    rated_from: float = 0.0
    """When it attached: since then its tokens count for their rate."""
    applied: dict[int, Version] = field(default_factory=dict)
    recovering: bool = True
    based_on_global_step: int = -1
    """t(q) of the newest round that it answered or that closed without it."""
    based_on_local_step: int = 0
    """Its local step at that moment."""
    paced_on_global_step: int = -1
    """t(q) of the newest round that has left OPEN since it attached."""
    paced_on_local_step: float = 0.0
    """Its local step at that moment, with the part of the running step that was done."""
    accounted_tokens: list[int] = field(default_factory=list)
    """Per fragment: this incarnation's tokens whose fate is known."""
    upload_seconds: list[float] = field(default_factory=list)
    rounds_merged: list[int] = field(default_factory=list)
    newest_merged_round: int = 0
    gap_seconds: float = 0.0
    """How long it was away before this incarnation or re-attach, not booked yet."""

    def step_seconds(self) -> float | None:
        """xi_m: its smoothed step time."""
        return self.progress.step_seconds

    def running_step_seconds(self, now: float) -> float:
        """Age of its running step, as far as the syncer can know."""
        if self.progress.running_step_seconds is None:
            return 0.0
        return self.progress.running_step_seconds + (now - self.progress_at)

    def rate(self, made_count: int, now: float) -> None:
        """Takes the tokens since the report before into their rate, before `progress_at` moves on.

        The mean since it attached, later with the newest seconds weighing most. By time and not by reports: several
        of them can arrive at once, and there are more of them than steps.
        """
        elapsed = max(0.0, now - self.progress_at)
        window = max(elapsed, RATE_SECONDS_MIN, min(RATE_SECONDS, now - self.rated_from))
        self.tokens_per_second += (max(0, made_count) - elapsed * self.tokens_per_second) / window

    def rebase(self, global_step: int, local_step: int) -> None:
        """From now on due steps count from here: it attached, or it has just recovered."""
        self.based_on_global_step = self.paced_on_global_step = global_step
        self.based_on_local_step = local_step
        self.paced_on_local_step = local_step

    def running_step_share(self, now: float) -> float:
        """How much of its running step is done, 0 to 0.99, as far as the syncer can know."""
        step = self.step_seconds()
        age = (self.progress.running_step_seconds or 0.0) + (now - self.progress_at)
        return min(0.99, max(0.0, age / step)) if step else 0.0

    def stalls_at(self, policy: Policy) -> float:
        """The instant from which on it counts as stalled, if nothing more is heard."""
        deadlines = policy.deadlines
        silent_at = self.heard_at + deadlines.stall_seconds
        if self.progress.running_step_seconds is None:
            return silent_at
        patience = max(deadlines.stall_seconds, policy.stall_step_factor * (self.step_seconds() or 0.0))
        return min(silent_at, self.progress_at - self.progress.running_step_seconds + patience)

    def expires_at(self, policy: Policy) -> float:
        """The instant at which its lease runs out, if nothing more is heard."""
        return self.heard_at + policy.deadlines.lease_seconds

    def state(self, policy: Policy, now: float) -> tuple[LearnerState, str]:
        """Its state and, where there is one, the reason in words."""
        if self.left:
            return LearnerState.LEFT, self.left_reason
        if self.must_join_again:
            return LearnerState.LOST, self.must_join_again
        if self.lost:
            return LearnerState.LOST, f"not heard of for {now - self.heard_at:.1f} s"
        if self.draining:
            return LearnerState.DRAINING, self.drain_reason
        if self.progress.activity in _STATE_OF_ACTIVITY:
            return _STATE_OF_ACTIVITY[self.progress.activity], ""
        if self.recovering:
            return LearnerState.RECOVERING, "fetching published versions"
        if now >= self.stalls_at(policy):
            if now < self.heard_at + policy.deadlines.stall_seconds:
                return LearnerState.STALLED, f"in one step for {self.running_step_seconds(now):.1f} s"
            return LearnerState.STALLED, f"silent for {now - self.heard_at:.1f} s"
        if self.deaf:
            return LearnerState.STALLED, "did not answer a last call"
        return LearnerState.LIVE, ""

    def has_lease(self) -> bool:
        """Whether it takes part at all."""
        return not (self.left or self.lost)

    def is_gone_for_good(self, policy: Policy, now: float) -> bool:
        """Whether it has been lost for so long that its slot may be taken over."""
        return self.lost and not self.left and now - self.lost_at >= GONE_LEASES * policy.deadlines.lease_seconds

    def is_live_for_quorum(self, policy: Policy, now: float) -> bool:
        """Whether a round may count on it and wait for it."""
        return self.role is Role.LEARNER and self.attached and self.state(policy, now)[0] is LearnerState.LIVE

    def can_answer(self) -> bool:
        """Whether asking it makes sense: attached learners with parameters, draining ones included."""
        return self.role is Role.LEARNER and self.has_lease() and self.attached and not self.recovering


@dataclass(slots=True)
class Membership:
    """All learners by id; every query goes in the order of ids, so that the machine is deterministic."""

    fragment_count: int
    learners: dict[str, LearnerRecord] = field(default_factory=dict)
    newest_incarnation: int = 0
    slot_cursors: dict[int, int] = field(default_factory=dict)
    """Committed cursor of every slot that was ever used."""
    slot_reached: dict[int, int] = field(default_factory=dict)
    """Per slot: the batch after the furthest one that its newest incarnation has trained on."""
    evicted: dict[str, str] = field(default_factory=dict)
    """Learners that may not join until an operator readmits them, with the reason."""
    _order: list[str] = field(default_factory=list)
    """All ids, sorted."""

    def get(self, learner: str, incarnation: int) -> LearnerRecord | None:
        """The record, if that incarnation is the learner's newest and still takes part, or may again."""
        record = self.learners.get(learner)
        if record is None or record.incarnation != incarnation or record.left or record.must_join_again:
            return None
        return record

    def put(self, records: list[LearnerRecord]) -> None:
        """Replaces all records."""
        self.learners = {record.learner: record for record in records}
        self._order = sorted(self.learners)

    def admit(self, learner: str, role: Role, now: float) -> LearnerRecord:
        """Registers a new incarnation; the learner keeps its slot, a new one gets the lowest that is free."""
        self.newest_incarnation += 1
        old = self.learners.get(learner)
        slot = self._slot(old, role)
        record = LearnerRecord(learner, self.newest_incarnation, role, slot, now, self.slot_cursors.get(slot, 0))
        record.progress_at = now
        record.accounted_tokens = [0] * self.fragment_count
        record.rounds_merged = old.rounds_merged if old else [0] * self.fragment_count
        record.newest_merged_round = old.newest_merged_round if old else 0
        if learner not in self.learners:
            bisect.insort(self._order, learner)
        self.learners[learner] = record
        return record

    def _slot(self, old: LearnerRecord | None, role: Role) -> int:
        if role is Role.OBSERVER:
            return -1
        if old is not None and not old.left and old.slot >= 0:
            return old.slot
        used = {r.slot for r in self.with_role() if not r.left and r is not old}
        return next(slot for slot in itertools.count() if slot not in used)

    def begin(self, record: LearnerRecord, cursor: int) -> int:
        """An incarnation begins at a cursor; returns how many steps of the slot it will redo.

        They are those that another incarnation has trained on, and whose effect no committed round holds.
        """
        record.cursor = record.first_cursor = cursor
        redone = max(0, self.slot_reached.get(record.slot, 0) - cursor)
        self.slot_reached[record.slot] = cursor
        return redone

    def reach(self, record: LearnerRecord) -> None:
        """Takes in how far an incarnation has come in its slot's data."""
        reached = record.first_cursor + record.progress.local_step
        self.slot_reached[record.slot] = max(self.slot_reached.get(record.slot, 0), reached)

    def everybody(self) -> list[LearnerRecord]:
        """All records by id."""
        return [self.learners[name] for name in self._order]

    def with_role(self, role: Role = Role.LEARNER) -> list[LearnerRecord]:
        """All records of one role by id."""
        return [record for record in self.everybody() if record.role is role]

    def registered_count(self) -> int:
        """Learners known to the run that have not left, lost ones included."""
        return sum(record.role is Role.LEARNER and not record.left for record in self.learners.values())

    def live(self) -> list[LearnerRecord]:
        """Learners with a lease, by id."""
        return [record for record in self.with_role() if record.has_lease()]
