"""A world whose every event is checked against what must always hold."""

from __future__ import annotations

from collections import defaultdict

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity, RoundState, RunPhase, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.round import RoundAnswer
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.transfers import Faults
from simulator.world import World

TO_ONE_LEARNER = (
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


class WatchedWorld(World):
    """A world that fails at the first event after which something is wrong.

    Attributes:
        log: every event and effect in order, as text; the same seed gives the same log.
        tape: every event with its instant.
        commits: the rounds that were committed, in order.
        merged: per (learner, incarnation, round), that it was merged.
    """

    def __init__(self, policy: Policy, seed: int = 0, faults: Faults | None = None, **seconds: float) -> None:
        super().__init__(policy, seed=seed, faults=faults, **seconds)
        self.log: list[str] = []
        self.tape: list[tuple[float, ev.Event]] = []
        self.commits: list[fx.CommitRound] = []
        self.merged: set[tuple[str, int, int]] = set()
        self._merging: dict[int, fx.StartMerge] = {}
        self._committing: dict[int, tuple[fx.CommitRound, list[RoundAnswer]]] = {}
        self._versions: dict[int, Version] = {}
        self._fenced: set[tuple[str, int]] = set()
        self._ranges: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        self._event_count = 0

    def _handle(self, event: ev.Event) -> None:
        before = len(self.effects)
        self.tape.append((self.now, event))
        super()._handle(event)
        effects = [effect for _, effect in self.effects[before:]]
        self.log.append(f"{self.now!r} {event!r} -> {effects!r}")
        self._event_count += 1
        self._check_answers(event, effects)
        for effect in effects:
            self._check_effect(effect)
        self._check_rounds()
        self._check_deadline()
        if self._event_count % 10 == 0 or self.syncer.phase is RunPhase.FINISHED:
            self.check_tokens()

    def replay(self, machine: SyncerMachine) -> list[tuple[float, fx.Effect]]:
        """The effects of a new machine that gets the same events at the same instants."""
        return [(now, effect) for now, event in self.tape for effect in machine.handle(event, now)]

    def _check_answers(self, event: ev.Event, effects: list[fx.Effect]) -> None:
        asked = [event.request] if hasattr(event, "request") else []
        assert [effect.request for effect in effects if isinstance(effect, fx.Answer)] == asked, event

    def _check_effect(self, effect: fx.Effect) -> None:
        match effect:
            case fx.ExpireLearner(learner, incarnation):
                record = self.syncer.membership.learners[learner]
                if record.incarnation != incarnation or record.left:
                    self._fenced.add((learner, incarnation))
            case fx.StartMerge():
                names = [learner for learner, _, _ in effect.contributions]
                assert names == sorted(set(names)), "merged in the order of learner ids, each once"
                assert all(weight > 0 for _, _, weight in effect.contributions)
                self._merging[effect.round] = effect
            case fx.CommitRound():
                self._check_commit(effect)
            case fx.PublishFragment(fragment, version):
                known = self._versions.get(fragment)
                assert known is None or version > known, "versions strictly increase"
                self._versions[fragment] = version
            case fx.CloseRound(round=number, committed=True):
                self._check_merged(number)
        if isinstance(effect, TO_ONE_LEARNER):
            assert (effect.learner, effect.incarnation) not in self._fenced, f"{effect} goes to a fenced incarnation"

    def _check_commit(self, effect: fx.CommitRound) -> None:
        policy = self.syncer.policy
        assert effect.members
        assert len(effect.members) >= policy.quorum_minimum or "degraded" in effect.reason
        assert effect.reason
        assert [name for name, _, _ in self._merging[effect.round].contributions] == list(effect.members)
        self._committing[effect.round] = (effect, self.syncer.rounds.under_way[effect.round].complete())

    def _check_merged(self, number: int) -> None:
        effect, answers = self._committing.pop(number)
        self.commits.append(effect)
        for answer in answers:
            key = (answer.learner, answer.incarnation, number)
            assert key not in self.merged, "merged twice"
            self.merged.add(key)
            assert answer.header is not None
            if self.syncer.policy.apply_rule != "blend":  # which keeps a share of merged steps
                self._check_cursor(answer.slot, effect.fragment, answer.header)

    def _check_cursor(self, slot: int, fragment: int, header: ev.ContributionHeader) -> None:
        """No step of a data slot is merged twice into one fragment."""
        first, last = header.cursor - header.step_count, header.cursor
        for other_first, other_last in self._ranges[(slot, fragment)]:
            assert last <= other_first or first >= other_last, f"steps {first} to {last} of slot {slot} merged twice"
        self._ranges[(slot, fragment)].append((first, last))

    def _check_rounds(self) -> None:
        under_way = self.syncer.rounds.in_order()
        fragments = [item.fragment for item in under_way]
        assert len(fragments) == len(set(fragments)), "at most one round of a fragment is under way"
        assert not any(item.state.is_closed for item in under_way)
        if self.syncer.phase is RunPhase.RUNNING:
            left = [item.left_open_at is not None for item in under_way if item.state is not RoundState.ABANDONED]
            assert left == sorted(left, reverse=True), "rounds leave OPEN in order"

    def _check_deadline(self) -> None:
        deadline = self.syncer.next_deadline()
        assert deadline is None or deadline > self.now, "a deadline in the past would spin"

    def check_tokens(self) -> None:
        """Every token of every (slot, fragment) is merged, discarded, open, or reserved for a merge."""
        machine = self.syncer
        for fragment in range(machine.policy.fragment_count):
            records = machine.membership.with_role()
            unsettled = sum(r.seen_token_count - r.accounted_tokens[fragment] for r in records)
            answers = [
                a for item in machine.rounds.in_order() if item.fragment == fragment for a in item.answers.values()
            ]
            reserved = sum(answer.reserved_token_count for answer in answers)
            merged = machine.ledger.merged_tokens[fragment]
            discarded = sum(tokens[fragment] for tokens in machine.ledger.discarded_tokens.values())
            assert machine.ledger.tokens_processed == merged + discarded + unsettled + reserved
        assert all(seconds >= 0.0 for seconds in machine.ledger.activity_seconds.values())
        assert set(machine.ledger.activity_seconds) == {activity.value for activity in Activity}
