"""Whatever arrives and in whatever order, a learner's contributions say what is true of them.

The oracle is deliberately simple: a list of what every step made, and for every fragment the step since which its
parameters hold the newest applied version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.core import learner_events as ev
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.learner_effects import Copy, Hold, LearnerEffect, Upload
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.schedule import fragment_of, global_step_of

FRAGMENTS = 3
ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 50)),
    st.tuples(st.just("ask"), st.integers(0, 4)),
    st.tuples(st.just("last call"), st.integers(0, 4)),
    st.tuples(st.just("commit"), st.integers(0, 4)),
    st.tuples(st.just("abandon"), st.integers(0, 4)),
    st.tuples(st.just("arrive"), st.integers(0, FRAGMENTS - 1)),
    st.tuples(st.just("attach"), st.just(0)),
    st.tuples(st.just("recover"), st.just(0)),
)


@dataclass
class Oracle:
    """What is true, kept in the simplest way."""

    tokens: list[int] = field(default_factory=list)
    applied: dict[int, tuple[Version, int]] = field(default_factory=dict)
    """By fragment: the version that the parameters hold, and the local step at which it was applied."""
    bases: dict[int, Version] = field(default_factory=dict)
    """By round: the base that the newest ask named."""
    answered: set[int] = field(default_factory=set)

    def check_copy(self, copy: Copy) -> None:
        version, since = self.applied[copy.fragment]
        assert copy.base == version
        assert since < copy.local_step <= len(self.tokens)
        assert copy.step_count == copy.local_step - since
        assert copy.token_count == sum(self.tokens[since : copy.local_step])
        assert copy.total_token_count == sum(self.tokens[: copy.local_step])
        assert copy.cursor == copy.local_step

    def check_upload(self, upload: Upload) -> None:
        self.check_copy(upload.copy)
        assert upload.copy.fragment == (upload.round - 1) % FRAGMENTS
        assert upload.copy.base == self.bases[upload.round]
        assert upload.round not in self.answered, "one answer to a round"
        self.answered.add(upload.round)


class Run:
    """A learner and a syncer that says anything, at any time, but nothing that contradicts itself."""

    def __init__(self, last_call: bool) -> None:
        self.policy = Policy(fragment_count=FRAGMENTS, interval_steps=6, overlap_steps=1, last_call=last_call)
        self.machine = LearnerMachine(self.policy)
        self.oracle = Oracle()
        self.newest = [Version(1, 1)] * FRAGMENTS
        self.round = 1
        self.schedule_step = 0
        for fragment in range(FRAGMENTS):
            self._publish(fragment)
            self.do("arrive", fragment)
        self.boundary()

    def do(self, action: str, number: int) -> None:
        fragment = fragment_of(self.round, self.policy)
        match action:
            case "step":
                self.oracle.tokens.append(number)
                self.machine.step_finished(number)
                self.boundary()
            case "ask":
                self.oracle.bases[self.round] = self.newest[fragment]
                step, due = global_step_of(self.round, self.policy), self.machine.local_step + number
                self.tell(ev.Asked(self.round, fragment, self.newest[fragment], step, due))
            case "last call":
                self.tell(ev.LastCalled(self.round))
            case "commit" | "abandon":
                if action == "commit":
                    self.newest[fragment] = Version(1, self.newest[fragment].number + 1)
                    self._publish(fragment)
                step = global_step_of(self.round, self.policy)
                self.tell(ev.RoundEnded(self.round, fragment, action == "commit", (), step))
                self.round += 1
            case "arrive":
                self.tell(ev.Downloaded(number, self.newest[number], self.round))
            case "attach":
                self.tell(ev.AttachedAgain())
            case "recover":
                self.tell(ev.RecoverAsked())

    def _publish(self, fragment: int) -> None:
        self.tell(ev.Published(fragment, self.newest[fragment], self.round))

    def tell(self, event: ev.LearnerEvent) -> None:
        effects: list[LearnerEffect] = self.machine.handle(event)
        if isinstance(event, ev.RecoverAsked):
            self.oracle.answered.discard(self.round)  # what was answered is taken back and may be asked for again
        for effect in effects:
            if isinstance(effect, Upload):
                self.oracle.check_upload(effect)

    def boundary(self) -> None:
        plan = self.machine.at_boundary()
        for apply in plan.applies:
            self.oracle.applied[apply.fragment] = (apply.version, len(self.oracle.tokens))
        for copy in plan.copies:
            self.oracle.check_copy(copy)
        for upload in plan.uploads:
            self.oracle.check_upload(upload)
            assert upload.copy in plan.copies, "what is due is copied at this very boundary"
        assert plan.hold in (None, Hold.RECOVERING)
        assert plan.schedule_step >= self.schedule_step, "the schedule never goes back"
        self.schedule_step = plan.schedule_step


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.booleans(), st.lists(ACTIONS, max_size=80))
def test_contributions_are_what_they_say(last_call: bool, actions: list[tuple[str, int]]) -> None:
    run = Run(last_call)
    for action, number in actions:
        run.do(action, number)
