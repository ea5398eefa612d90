"""Whatever a peer says, and in whatever order, the machine answers once, arms a sane timer, and goes on."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity, Decline, Fate, Role, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine

NAMES = st.sampled_from(["a", "b", "c"])
SMALL = st.integers(-2, 6)
COUNTS = st.one_of(st.integers(-1, 40), st.sampled_from([0, 2**62]))
SECONDS = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1.0, 60.0]))
VERSIONS = st.builds(Version, st.integers(0, 2), st.integers(0, 4), st.sampled_from(["", "d0", "d1"]))
PROGRESS = st.builds(
    ev.Progress,
    local_step=COUNTS,
    token_count=COUNTS,
    activity=st.sampled_from(Activity),
    step_seconds=SECONDS,
    running_step_seconds=SECONDS,
    spans=st.lists(st.tuples(st.sampled_from(Activity), st.floats()), max_size=3).map(tuple),
    loss=st.one_of(st.none(), st.floats()),
)
HEADERS = st.builds(
    ev.ContributionHeader,
    learner=NAMES,
    incarnation=SMALL,
    round=SMALL,
    fragment=SMALL,
    base=VERSIONS,
    local_step=COUNTS,
    total_token_count=COUNTS,
    step_count=COUNTS,
    token_count=COUNTS,
    cursor=COUNTS,
    schema_matches=st.booleans(),
)
REQUEST = st.just(0)
"""Replaced by a fresh token when the event is handed over."""
FROM_PEERS = st.one_of(
    st.builds(ev.JoinRequested, REQUEST, NAMES, st.sampled_from(Role)),
    st.builds(ev.LearnerAttached, NAMES, SMALL, st.lists(st.tuples(SMALL, VERSIONS), max_size=3).map(tuple), PROGRESS),
    st.builds(ev.LearnerDetached, NAMES, SMALL),
    st.builds(ev.ProgressReported, NAMES, SMALL, PROGRESS),
    st.builds(ev.BytesMoved, NAMES, SMALL, st.one_of(st.none(), SMALL)),
    st.builds(ev.FragmentApplied, NAMES, SMALL, SMALL, VERSIONS, COUNTS, COUNTS, COUNTS, SECONDS),
    st.builds(ev.ContributionStarted, REQUEST, HEADERS),
    st.builds(ev.ContributionReceived, REQUEST, NAMES, SMALL, SMALL, st.booleans(), st.floats()),
    st.builds(ev.ContributionFailed, NAMES, SMALL, SMALL, st.sampled_from([Fate.ABORTED, Fate.CORRUPT]), st.just("")),
    st.builds(ev.ContributionDeclined, NAMES, SMALL, SMALL, st.sampled_from(Decline)),
    st.builds(ev.InitialFragmentReceived, REQUEST, NAMES, SMALL, SMALL, st.just("d")),
    st.builds(ev.LeavingAnnounced, NAMES, SMALL, st.just("")),
    st.builds(ev.LearnerLeft, REQUEST, NAMES, SMALL, st.just("")),
    st.builds(ev.EvaluationReported, NAMES, SMALL, SMALL),
    st.builds(ev.PauseRequested, REQUEST, st.just("")),
    st.builds(ev.ResumeRequested, REQUEST),
    st.just(ev.TimerFired()),
)


class Shell:
    """Hands events over, carries merges and commits out at once, and checks what must hold."""

    def __init__(self) -> None:
        self.machine = SyncerMachine(Policy(fragment_count=2, interval_steps=4, overlap_steps=1))
        self.now = 0.0
        self.requests = 0

    def tell(self, event: ev.Event) -> None:
        if hasattr(event, "request"):
            self.requests += 1
            values = {name: getattr(event, name) for name in type(event).__dataclass_fields__}
            event = type(event)(**{**values, "request": self.requests})
        effects = self.machine.handle(event, self.now)
        answers = [effect.request for effect in effects if isinstance(effect, fx.Answer)]
        assert answers == ([self.requests] if hasattr(event, "request") else [])
        deadline = self.machine.next_deadline()
        assert deadline is None or self.now < deadline < math.inf
        self.machine.status(self.now)
        self.machine.learners(self.now)
        self.machine.list_rounds(10, now=self.now)
        for effect in effects:
            match effect:
                case fx.StartMerge(round=number):
                    self.tell(ev.MergeFinished(number, f"d{number}", True, 0.0))
                case fx.CommitRound(round=number):
                    self.tell(ev.CommitFinished(number, 0.0))
                case fx.CommitInitialParameters():
                    self.tell(ev.InitialParametersCommitted(("d0", "d1")))

    def wait(self, seconds: float) -> None:
        """Lets time pass with all timers."""
        until = self.now + seconds
        while (deadline := self.machine.next_deadline()) is not None and deadline <= until:
            self.now = deadline
            self.tell(ev.TimerFired())
        self.now = until


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.3, 2.0]), FROM_PEERS), max_size=40))
def test_nothing_that_a_peer_says_upsets_the_machine(steps: list[tuple[float, ev.Event]]) -> None:
    shell = Shell()
    shell.tell(ev.JoinRequested(0, "a"))
    shell.tell(ev.LearnerAttached("a", 1, (), ev.Progress(0, 0)))
    for fragment in (0, 1):
        shell.tell(ev.InitialFragmentReceived(0, "a", 1, fragment, f"d{fragment}"))
    shell.tell(ev.JoinRequested(0, "b"))
    held = tuple(enumerate(shell.machine.versions))
    shell.tell(ev.LearnerAttached("b", 2, held, ev.Progress(0, 0, Activity.COMPUTE, 1.0)))
    for seconds, event in steps:
        shell.wait(seconds)
        shell.tell(event)
    shell.wait(60.0)
