"""The run's first parameters.

One learner is asked; its fragments are staged and become the first versions in one transaction.

If that incarnation is lost, replaced or too slow before its set is whole, the set is discarded and another learner is
asked. Only committed state ever seeds anyone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import RunPhase, Version
from decoupled_diloco.core.membership import LearnerRecord

if TYPE_CHECKING:
    from decoupled_diloco.core.syncer import SyncerMachine


class InitialParameters:
    """Who was asked, until when, and what has arrived."""

    def __init__(self, machine: SyncerMachine, from_file: bool = False) -> None:
        self.machine = machine
        self.from_file = from_file
        """Whether the shell reads them from a file; no learner is asked then."""
        self.asked: tuple[str, int] | None = None
        self.until = math.inf
        self.digests: dict[int, str] = {}

    def refusal(self, learner: str, incarnation: int) -> fx.Refusal | None:
        """Why the fragments of an incarnation are not wanted; None if they are."""
        if self.asked == (learner, incarnation) and not self.machine.versions:
            return None
        return fx.Refusal("WRONG_STATE", f"{learner} was not asked for the initial parameters, or no longer is")

    def on_fragment(self, event: ev.InitialFragmentReceived, now: float) -> list[fx.Effect]:
        """One fragment is staged; the last one completes the set."""
        if (refusal := self.refusal(event.learner, event.incarnation)) is not None:
            return [fx.Answer(event.request, refusal)]
        count = self.machine.policy.fragment_count
        if not 0 <= event.fragment < count:
            text = f"fragment {event.fragment} does not exist: 0 to {count - 1}"
            return [fx.Answer(event.request, fx.Refusal("INVALID_FIELD", text))]
        record = self.machine.membership.learners[event.learner]
        effects: list[fx.Effect] = [*self.machine.admissions.hear(record, now), fx.Answer(event.request, None)]
        if len(self.digests) == count:
            return effects  # one more copy of a set that is being committed
        self.digests[event.fragment] = event.digest
        if len(self.digests) == count:
            self.until = math.inf
            effects.append(fx.CommitInitialParameters(event.learner, event.incarnation))
        return effects

    def on_model_agreed(self) -> list[fx.Effect]:
        """It is known which tensors a file has to hold."""
        if not self.from_file or self.machine.versions or self.machine.phase is not RunPhase.INITIALIZING:
            return []
        return [fx.LoadInitialParameters()]

    def on_committed(self, event: ev.InitialParametersCommitted) -> list[fx.Effect]:
        """The set is durable: the run has parameters."""
        if self.machine.phase is not RunPhase.INITIALIZING:
            return []  # the run was finished before it began
        self.asked, self.until = None, math.inf
        self.machine.versions = [Version(self.machine.timeline, 1, digest) for digest in event.digests]
        self.machine.phase = RunPhase.RUNNING
        published = [fx.PublishFragment(p, version, step) for p, version, step in self.machine.published()]
        return [*published, fx.Note("run_initialized", "the run has its initial parameters")]

    def discard(self, record: LearnerRecord, reason: str) -> list[fx.Effect]:
        """Forgets what an incarnation has staged, if it is the one that was asked."""
        if self.asked != (record.learner, record.incarnation):
            return []
        if len(self.digests) == self.machine.policy.fragment_count:
            return []  # whole already; the commit is under way and needs the learner no more
        self.asked, self.until, self.digests = None, math.inf, {}
        return [fx.DiscardInitialParameters(record.learner, record.incarnation, reason)]

    def seek(self, now: float) -> list[fx.Effect]:
        """Asks a learner, or another one after the deadline."""
        effects: list[fx.Effect] = []
        if self.from_file:
            return effects
        if self.asked is not None and now >= self.until:
            record = self.machine.membership.learners[self.asked[0]]
            effects += self.discard(record, "it took too long to upload the initial parameters")
            candidates = [r for r in self.machine.membership.live() if r.attached and r is not record] or [record]
        else:
            candidates = [r for r in self.machine.membership.live() if r.attached and not r.draining]
        if self.asked is None and candidates:
            chosen = candidates[0]
            self.asked = (chosen.learner, chosen.incarnation)
            self.until = now + self.machine.policy.deadlines.initial_parameters_seconds
            effects.append(fx.AskInitialParameters(chosen.learner, chosen.incarnation))
            effects.append(fx.Note("initial_parameters_asked", f"{chosen.learner} is asked for the initial parameters"))
        return effects
