"""What must hold in every run, one rule per class. A rule sees facts and raises `BrokenRuleError` where one breaks it.

Rules are pure: they keep what they have seen and look at nothing else.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity, Role, RunPhase, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from simulator import facts
from simulator.history import History
from simulator.machine_checkers import AnsweredOnce, Fenced, RoundsInOrder, TimerAhead
from simulator.rule import Rule


class MergedOnce(Rule):
    """No contribution, and no batch of a data slot, is merged twice into one fragment of a surviving history."""

    name = "merged once"

    def __init__(self, policy: Policy, history: History) -> None:
        super().__init__(policy, history)
        self._branch = -1
        self._merged: set[tuple[int, str, int, int]] = set()
        self._rounds: set[int] = set()
        self._spans: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def durable(self, fact: facts.Durable) -> None:
        """A round was committed: it is compared with all that its version holds already."""
        row = fact.transaction.row
        if row is None:
            return
        if self._branch != self.history.branch_count:
            self._begin_branch(row)
        else:
            self._add(row)

    def _begin_branch(self, newest: fx.CommitRound) -> None:
        self._branch = self.history.branch_count
        self._merged.clear()
        self._rounds.clear()
        self._spans.clear()
        for fragment, version in enumerate(self.history.newest):
            place = self.history.place(fragment, version)
            assert place is not None
            for row in reversed(list(place.rows())):
                self._add(row)

    def _add(self, row: fx.CommitRound) -> None:
        if row.round in self._rounds:
            self.broken(f"round {row.round} was committed twice")
        self._rounds.add(row.round)
        for member in row.contributions:
            key = (row.fragment, member.learner, member.incarnation, row.round)
            if key in self._merged:
                self.broken(f"{member.learner}/{member.incarnation} was merged twice into round {row.round}")
            self._merged.add(key)
            if self.policy.apply_rule != "blend":  # which keeps a share of merged steps
                self._add_span(row, member)

    def _add_span(self, row: fx.CommitRound, member: fx.MergedContribution) -> None:
        first, last = member.cursor - member.step_count, member.cursor
        spans = self._spans[(member.slot, row.fragment)]
        at = bisect_right(spans, (first, last))
        overlaps = (at > 0 and spans[at - 1][1] > first) or (at < len(spans) and spans[at][0] < last)
        if overlaps:
            who = f"{member.learner}/{member.incarnation}"
            self.broken(
                f"batches {first} to {last} of slot {member.slot} were merged twice into fragment {row.fragment}: "
                f"now by {who} in round {row.round}"
            )
        insort(spans, (first, last))


class StepsAccounted(Rule):
    """processed = merged + discarded + open + reserved, to the token, in every fragment and at every moment.

    After an event one fragment is added up, each in its turn; all are after whatever settles accounts.
    """

    name = "every step accounted for"
    SETTLING = (fx.CloseRound, fx.CommitRound, fx.ExpireLearner, fx.RecoverLearner, fx.EndRun)

    def __init__(self, policy: Policy, history: History) -> None:
        super().__init__(policy, history)
        self._turn = 0

    def started(self, fact: facts.Started) -> None:
        """A restart has booked what it found."""
        self._add_up_all(fact.machine)

    def decided(self, fact: facts.Decided) -> None:
        """An event was booked."""
        if any(isinstance(effect, self.SETTLING) for effect in fact.effects):
            self._add_up_all(fact.machine)
        else:
            self._turn = (self._turn + 1) % self.policy.fragment_count
            self._add_up(fact.machine, self._turn)
        if any(isinstance(effect, fx.EndRun) for effect in fact.effects):
            for record in fact.machine.membership.with_role():
                if any(accounted < record.seen_token_count for accounted in record.accounted_tokens):
                    self.broken(f"the run is over, and of {record.learner} tokens are open: {record.accounted_tokens}")

    def _add_up_all(self, machine: SyncerMachine) -> None:
        for fragment in range(self.policy.fragment_count):
            self._add_up(machine, fragment)
        seconds = machine.ledger.activity_seconds
        if set(seconds) != {activity.value for activity in Activity} or min(seconds.values()) < 0.0:
            self.broken(f"the seconds of activities are {seconds}")

    def _add_up(self, machine: SyncerMachine, fragment: int) -> None:
        open_tokens = reserved = 0
        for record in machine.membership.learners.values():
            if record.role is Role.LEARNER:
                open_tokens += record.seen_token_count - record.accounted_tokens[fragment]
        for item in machine.rounds.under_way.values():
            if item.fragment == fragment:
                for answer in item.answers.values():
                    reserved += answer.reserved_token_count
        ledger = machine.ledger
        merged = ledger.merged_tokens[fragment]
        discarded = 0
        for tokens in ledger.discarded_tokens.values():
            discarded += tokens[fragment]
        if ledger.tokens_processed != merged + discarded + open_tokens + reserved:
            self.broken(
                f"fragment {fragment}: {ledger.tokens_processed} tokens processed, but {merged} merged, {discarded} "
                f"discarded, {open_tokens} open, {reserved} reserved"
            )


class BooksMatchRounds(Rule):
    """What is booked as merged is what the rounds hold that the run's versions come from."""

    name = "books match rounds"

    def started(self, fact: facts.Started) -> None:
        """A restart has booked what it found."""
        for fragment in range(len(fact.machine.versions)):
            self._compare(fact.machine, fragment)

    def decided(self, fact: facts.Decided) -> None:
        """A round was booked."""
        for effect in fact.effects:
            if isinstance(effect, fx.PublishFragment):
                self._compare(fact.machine, effect.fragment)

    def _compare(self, machine: SyncerMachine, fragment: int) -> None:
        place = self.history.place(fragment, machine.versions[fragment])
        if place is None:
            return  # another rule's business
        booked, held = machine.ledger.merged_tokens[fragment], place.token_count
        # The other rules let a learner keep merged tokens, which are not merged, and so not booked, again.
        if booked > held or (booked != held and self.policy.apply_rule == "overwrite"):
            self.broken(f"fragment {fragment}: {booked} tokens booked as merged, its rounds hold {held}")


class VersionsGrow(Rule):
    """Within a timeline numbers grow by one, no name has two values, and nobody goes back."""

    name = "versions grow"

    def __init__(self, policy: Policy, history: History) -> None:
        super().__init__(policy, history)
        self._digests: dict[tuple[int, int, int], str] = {}
        self._newest: dict[int, Version] = {}
        self._held: dict[tuple[str, int, int], Version] = {}

    def started(self, fact: facts.Started) -> None:
        """A new timeline names its versions."""
        for fragment, version in enumerate(fact.machine.versions):
            self._name(fragment, version)

    def durable(self, fact: facts.Durable) -> None:
        """A round, or a roll-back, names versions."""
        row = fact.transaction.row
        if row is not None:
            before = self._newest.get(row.fragment)
            self._name(row.fragment, row.version)
            wanted = None if before is None else (before.timeline, before.number + 1)
            if wanted is not None and (row.version.timeline, row.version.number) != wanted:
                self.broken(f"fragment {row.fragment}: version {row.version} came after {before}")
        for fragment, version in enumerate(fact.transaction.named):
            self._name(fragment, version)

    def _name(self, fragment: int, version: Version) -> None:
        digest = self._digests.setdefault((fragment, version.timeline, version.number), version.digest)
        if digest != version.digest:
            self.broken(f"fragment {fragment}: {version} names {digest} and {version.digest}")
        before = self._newest.get(fragment)
        if before is not None and (version.timeline, version.number) < (before.timeline, before.number):
            self.broken(f"fragment {fragment}: version {version} came after {before}")
        self._newest[fragment] = version

    def held(self, fact: facts.Held) -> None:
        """A learner got a version."""
        key = (fact.learner, fact.incarnation, fact.fragment)
        before = self._held.get(key)
        if before is not None and (fact.version.timeline, fact.version.number) <= (before.timeline, before.number):
            self.broken(f"{fact.learner}/{fact.incarnation} went from {before} to {fact.version}")
        self._held[key] = fact.version


class DurableFirst(Rule):
    """Nothing is served, and nobody holds anything, that the volume does not hold."""

    name = "durable before published"

    def published(self, fact: facts.Published) -> None:
        """A syncer serves a version."""
        if self.history.place(fact.fragment, fact.version) is None:
            self.broken(f"fragment {fact.fragment} is served at {fact.version}, which is not durable")

    def held(self, fact: facts.Held) -> None:
        """A learner got a version."""
        if self.history.place(fact.fragment, fact.version) is None:
            self.broken(f"{fact.learner} holds fragment {fact.fragment} at {fact.version}, which the syncer does not")


class CommittedSurvives(Rule):
    """A restart has every committed round, and says of a damaged one that it is lost."""

    name = "committed survives"

    def started(self, fact: facts.Started) -> None:
        """A syncer took up what the volume holds."""
        if self.history.newest and fact.restored is None:
            self.broken("a volume with versions was taken for an empty one")
        if fact.restored is not None and fact.restored.lost and not fact.was_rotten:
            self.broken(f"rounds {[row.round for row in fact.restored.lost]} are lost, and no record was damaged")
        versions = list(fact.machine.versions)
        if versions != self.history.newest:
            self.broken(f"the newest durable versions are {self.history.newest}, the restart has {versions}")


class Incarnations(Rule):
    """No incarnation is handed out twice, or before it is durable."""

    name = "incarnations"

    def __init__(self, policy: Policy, history: History) -> None:
        super().__init__(policy, history)
        self._handed_out: set[int] = set()

    def handed_out(self, fact: facts.HandedOut) -> None:
        """A join was answered."""
        state = self.history.state
        if fact.incarnation in self._handed_out:
            self.broken(f"incarnation {fact.incarnation} was handed out twice, now to {fact.learner}")
        if state is None or state.newest_incarnation < fact.incarnation:
            self.broken(f"incarnation {fact.incarnation} of {fact.learner} was handed out before it was durable")
        self._handed_out.add(fact.incarnation)


class AnswersHold(Rule):
    """What an operator was told is done is in the durable state."""

    name = "answers hold"

    def answered(self, fact: facts.Answered) -> None:
        """A command was answered."""
        state, event = self.history.state, fact.event
        holds = state is not None
        if state is None:
            pass
        elif isinstance(event, ev.PauseRequested):
            holds = state.pause_reason is not None
        elif isinstance(event, ev.ResumeRequested):
            holds = state.pause_reason is None
        elif isinstance(event, ev.FinishRequested):
            holds = state.phase in (RunPhase.FINISHING, RunPhase.FINISHED)
        elif isinstance(event, ev.EvictRequested):
            holds = event.learner in state.evicted
        elif isinstance(event, ev.ReadmitRequested):
            holds = event.learner not in state.evicted
        if not holds:
            self.broken(f"{event} was answered, and the durable state does not have it")


class Quorum(Rule):
    """Nothing is merged below the quorum, unless the policy lets it degrade; and every merge has its reason."""

    name = "quorum"

    def durable(self, fact: facts.Durable) -> None:
        """A round was committed."""
        row = fact.transaction.row
        if row is None:
            return
        members = len(row.contributions)
        allowed = self.policy.below_quorum == "degrade" and "degraded" in row.reason
        if members < 1 or (members < self.policy.quorum_minimum and not allowed):
            self.broken(f"round {row.round} has {members} of {self.policy.quorum_minimum} members: {row.reason}")
        if not row.reason:
            self.broken(f"round {row.round} does not say why it went on")


class Cursors(Rule):
    """The committed cursor of a slot is that of its newest merged contribution, and goes back with the run alone."""

    name = "cursors"

    def __init__(self, policy: Policy, history: History) -> None:
        super().__init__(policy, history)
        self._sent: dict[int, int] = {}

    def started(self, fact: facts.Started) -> None:
        """A restart credits what is durable."""
        if fact.machine.versions:
            self._compare(fact.machine)

    def decided(self, fact: facts.Decided) -> None:
        """A round was booked; or somebody is told where to begin."""
        learners = fact.machine.membership.learners
        if isinstance(fact.event, ev.ContributionStarted):
            header = fact.event.header
            if header.learner in learners:
                slot = learners[header.learner].slot
                self._sent[slot] = max(self._sent.get(slot, 0), header.cursor)
        for effect in fact.effects:
            if isinstance(effect, fx.Answer) and isinstance(effect.value, fx.Admitted):
                self._check_beginning(fact.machine, effect.value)
        committed = any(isinstance(effect, fx.CloseRound) and effect.committed for effect in fact.effects)
        # Else another round is durable and not booked yet.
        if committed and list(fact.machine.versions) == self.history.newest:
            self._compare(fact.machine)

    def _check_beginning(self, machine: SyncerMachine, admitted: fx.Admitted) -> None:
        """Behind what is merged, but not behind what was never sent: those batches would be left out."""
        if admitted.slot < 0:
            return
        committed = machine.membership.slot_cursors.get(admitted.slot, 0)
        farthest = max(committed, self._sent.get(admitted.slot, 0))
        if not committed <= admitted.cursor <= farthest:
            self.broken(
                f"{admitted.learner} begins slot {admitted.slot} at {admitted.cursor}; committed is {committed}, "
                f"sent {farthest}"
            )

    def _compare(self, machine: SyncerMachine) -> None:
        found = {slot: cursor for slot, cursor in machine.membership.slot_cursors.items() if cursor}
        if found != self.history.cursors:
            self.broken(f"the slots stand at {found}; by the committed rounds at {self.history.cursors}")


RULES: tuple[type[Rule], ...] = (
    MergedOnce,
    StepsAccounted,
    BooksMatchRounds,
    VersionsGrow,
    DurableFirst,
    CommittedSurvives,
    Incarnations,
    AnswersHold,
    Quorum,
    Cursors,
    TimerAhead,
    AnsweredOnce,
    RoundsInOrder,
    Fenced,
)
"""All rules that hold at every moment; `walk` has those that hold once a run has healed."""
