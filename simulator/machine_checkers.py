"""What must hold of every decision of a syncer's machine, one rule per class."""

from __future__ import annotations

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import RoundState, RunPhase
from decoupled_diloco.core.policy import Policy
from simulator import facts
from simulator.history import History
from simulator.rule import Rule


class TimerAhead(Rule):
    """A deadline that has passed would make the timer spin."""

    name = "timer ahead"

    def decided(self, fact: facts.Decided) -> None:
        """An event was handled."""
        deadline = fact.machine.next_deadline()
        if deadline is not None and deadline <= fact.now:
            self.broken(f"at {fact.now} s the next deadline is {deadline} s, after {fact.event}")


class AnsweredOnce(Rule):
    """Every request gets one answer: at once, or, for a roll-back, when it is done."""

    name = "answered once"

    def __init__(self, policy: Policy, history: History) -> None:
        super().__init__(policy, history)
        self._open: set[tuple[int, int]] = set()

    def decided(self, fact: facts.Decided) -> None:
        """An event was handled."""
        event = fact.event
        asked = [event.request] if hasattr(event, "request") else []
        answered = [effect.request for effect in fact.effects if isinstance(effect, fx.Answer)]
        ended = any(isinstance(effect, fx.EndRun) for effect in fact.effects)
        if asked == answered and not ended:
            return
        if isinstance(event, ev.RollBackRequested) and not answered:
            self._open.add((fact.process, event.request))
            return
        for request in answered:
            if (fact.process, request) in self._open:
                self._open.remove((fact.process, request))
            elif request not in asked:
                self.broken(f"request {request} was answered although it was not open: {event}")
        if any(request not in answered for request in asked):
            self.broken(f"{event} was not answered")
        if ended:
            open_requests = [request for process, request in self._open if process == fact.process]
            if open_requests:
                self.broken(f"the run is over, and requests {open_requests} are not answered")


class RoundsInOrder(Rule):
    """At most one round of a fragment is under way, none of them closed, and they leave OPEN in order."""

    name = "rounds in order"

    def decided(self, fact: facts.Decided) -> None:
        """An event was handled."""
        machine = fact.machine
        rounds = machine.rounds.in_order()
        if len({item.fragment for item in rounds}) != len(rounds):
            self.broken(f"two rounds of one fragment: {[(item.number, item.fragment) for item in rounds]}")
        if machine.phase is not RunPhase.RUNNING:
            return
        waiting = False
        for item in rounds:
            if item.state is RoundState.COMMITTED or item.state is RoundState.ABANDONED:
                self.broken(f"round {item.number} is {item.state} and under way")
            if item.left_open_at is None:
                waiting = True
            elif waiting:
                self.broken(f"round {item.number} left OPEN before an older one")


class Fenced(Rule):
    """An incarnation that is over is told nothing; one that was replaced is a member of nothing that begins after."""

    name = "fenced"
    TO_ONE = (
        fx.AskContribution,
        fx.SendLastCall,
        fx.AnnounceFragment,
        fx.AskInitialParameters,
        fx.RecoverLearner,
        fx.DrainLearner,
        fx.PauseLearner,
        fx.ResumeLearner,
        fx.FinishLearner,
    )

    def __init__(self, policy: Policy, history: History) -> None:
        super().__init__(policy, history)
        self._replaced: set[tuple[int, str, int]] = set()

    def decided(self, fact: facts.Decided) -> None:
        """An event was handled."""
        learners = fact.machine.membership.learners
        for effect in fact.effects:
            if isinstance(effect, fx.ExpireLearner):
                if isinstance(fact.event, ev.JoinRequested) and fact.event.learner == effect.learner:
                    self._replaced.add((fact.process, effect.learner, effect.incarnation))
            elif isinstance(effect, self.TO_ONE):
                record = learners.get(effect.learner)
                if record is None or record.incarnation != effect.incarnation or record.left:
                    self.broken(f"{effect} goes to an incarnation that is over")
            elif isinstance(effect, fx.StartMerge):
                names = [learner for learner, _, _ in effect.contributions]
                if names != sorted(set(names)) or any(weight <= 0 for _, _, weight in effect.contributions):
                    self.broken(f"members of a merge come by id, each once, with a weight: {effect.contributions}")
                for learner, incarnation, _ in effect.contributions:
                    if (fact.process, learner, incarnation) in self._replaced:
                        self.broken(f"{learner}/{incarnation} was replaced, and is merged into round {effect.round}")
