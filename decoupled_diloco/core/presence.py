"""Who is here, as the rounds see it: read once, then kept up to date learner by learner.

Most events are reports that change nothing for any round. `note` finds that out by looking at one learner; only when
it says so, or when `due_at` has come, do the rounds have to be looked at again.
"""

from __future__ import annotations

import math

from decoupled_diloco.core.ids import Activity
from decoupled_diloco.core.membership import LearnerRecord, Membership
from decoupled_diloco.core.policy import Policy

STEPPING = frozenset({Activity.COMPUTE, Activity.DATA_WAIT, Activity.SYNC_STALL})
"""What a learner does while it makes steps; a report from a step boundary may name any of them. One that waits for its
data for too long is stalled by the age of its step, and then it is not live for quorum."""

_Standing = tuple[int, bool, bool, bool, bool, bool]


class Presence:
    """The membership at the instant of the newest event.

    Attributes:
        live: learners with a lease, by id.
        waitable: those of them that are live for quorum.
        waitable_names: their ids.
        step_seconds: step time of the fastest of them; None if none has been measured.
        due_at: no lease runs out and nobody stalls before this instant, if nothing more is heard.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._standings: dict[str, _Standing] = {}
        self._steps: dict[str, float] = {}
        self._stepping: set[str] = set()
        self._stale = True
        self.live: tuple[LearnerRecord, ...] = ()
        self.waitable: tuple[LearnerRecord, ...] = ()
        self.waitable_names: frozenset[str] = frozenset()
        self.step_seconds: float | None = None
        self.due_at = -math.inf

    @property
    def is_advancing(self) -> bool:
        """Whether at least one learner that is live for quorum makes steps."""
        return bool(self._stepping)

    @property
    def is_stale(self) -> bool:
        """Whether it has to be read anew."""
        return self._stale

    def touch(self) -> None:
        """Something happened that `note` was not told of: read everything anew."""
        self._stale = True

    def note(self, record: LearnerRecord, policy: Policy, now: float) -> bool:
        """Looks at one learner after an event of its own; returns whether a round may be decided differently."""
        if self._stale:
            return True
        self.due_at = min(self.due_at, _due_at(record, policy, now))
        standing = _standing(record, policy, now)
        if standing != self._standings.get(record.learner):
            self._stale = True
            return True
        return self._note_step(record) if standing[-1] else False

    def _note_step(self, record: LearnerRecord) -> bool:
        """Takes in what a learner that is live for quorum does now, and how fast; whether the fastest step changed."""
        name, step, fastest = record.learner, record.step_seconds(), self.step_seconds
        if record.progress.activity in STEPPING:
            self._stepping.add(name)
        else:
            self._stepping.discard(name)
        old = self._steps.pop(name, None)
        if step:
            self._steps[name] = step
        if step != old and (old == fastest or fastest is None or (step is not None and step < fastest)):
            self.step_seconds = min(self._steps.values(), default=None)
        return self.step_seconds != fastest

    def refresh(self, policy: Policy, now: float) -> None:
        """Reads the membership, if anything has changed or may have changed by now."""
        if not self._stale and now < self.due_at:
            return
        leased = [record for record in self._membership.everybody() if record.has_lease()]
        self._standings = {record.learner: _standing(record, policy, now) for record in leased}
        self.live = tuple(self._membership.live())
        self.waitable = tuple(record for record in self.live if self._standings[record.learner][-1])
        self.waitable_names = frozenset(record.learner for record in self.waitable)
        self._steps = {record.learner: step for record in self.waitable if (step := record.step_seconds())}
        self._stepping = {r.learner for r in self.waitable if r.progress.activity in STEPPING}
        self.step_seconds = min(self._steps.values(), default=None)
        self.due_at = min((_due_at(record, policy, now) for record in leased), default=math.inf)
        self._stale = False


def _standing(record: LearnerRecord, policy: Policy, now: float) -> _Standing:
    """All of a learner that decisions look at, but for its step time."""
    return (
        record.incarnation,
        record.has_lease(),
        record.attached,
        record.recovering,
        record.draining,
        record.is_live_for_quorum(policy, now),
    )


def _due_at(record: LearnerRecord, policy: Policy, now: float) -> float:
    """When a learner stalls or loses its lease, whichever comes next."""
    expires_at, stalls_at = record.expires_at(policy), record.stalls_at(policy)
    return min(expires_at, stalls_at) if stalls_at > now else expires_at
