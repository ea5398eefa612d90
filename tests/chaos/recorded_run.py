"""A small run that went well, as its journals and its ledger tell it; tests change one thing in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos.evidence import Applied, Contribution, Evidence, Incarnation, Ledger, Pause, Step
from decoupled_diloco.core.effects import CommitRound, MergedContribution
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.ids import Role, RunPhase, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import LearnerAccount, RunState

FRAGMENTS = 2
TOKENS = 10


def version_of(number: int, timeline: int = 1, *, fragment: int) -> Version:
    return Version(timeline, number, f"digest-{fragment}-{timeline}-{number}")


@dataclass
class RecordedRun:
    """Learners in lockstep: some steps, then a round of the next fragment that all of them are members of."""

    names: tuple[str, ...] = ("alpha", "beta")
    incarnations: list[Incarnation] = field(default_factory=list)
    rows: list[CommitRound] = field(default_factory=list)
    versions: list[list[Version]] = field(default_factory=list)
    quorum_minimum: int = 2
    timeline: int = 1

    def __post_init__(self) -> None:
        self.versions = [[version_of(1, fragment=p)] for p in range(FRAGMENTS)]
        self.ledger = GoodputLedger((0.5, 0.5))
        self.t = 0.0
        self.current: dict[str, Incarnation] = {}
        self.synced: dict[str, list[int]] = {}
        """Local step at which each fragment was applied."""
        self.accounted: dict[str, list[int]] = {}
        for slot, name in enumerate(self.names):
            self.join(name, slot, 0)

    def join(self, name: str, slot: int, cursor: int) -> None:
        if name in self.current:
            old = self.current[name]
            for fragment in range(FRAGMENTS):
                self.ledger.discard(fragment, old.total_tokens - self.accounted[name][fragment], "died")
            old.ends_in_order = False
        self.current[name] = Incarnation(name, len(self.incarnations) + 1, slot, cursor, self.t)
        self.incarnations.append(self.current[name])
        self.synced[name], self.accounted[name] = [0] * FRAGMENTS, [0] * FRAGMENTS
        for fragment in range(FRAGMENTS):
            self.apply(name, fragment)

    def apply(self, name: str, fragment: int) -> None:
        incarnation, version = self.current[name], self.versions[fragment][-1]
        made = len(incarnation.steps)
        incarnation.applied.append(Applied(self.t, fragment, version, version.digest, made))
        self.ledger.discard(fragment, incarnation.total_tokens - self.accounted[name][fragment], "overlap")
        self.accounted[name][fragment] = incarnation.total_tokens
        self.synced[name][fragment] = made

    def step(self, name: str) -> None:
        self.t += 0.1
        incarnation = self.current[name]
        made = len(incarnation.steps) + 1
        total = incarnation.total_tokens + TOKENS
        incarnation.steps.append(Step(self.t, made, incarnation.cursor + made, TOKENS, total))
        incarnation.boundaries.append(Pause(self.t + 0.01, 0.01, None))
        self.ledger.process(TOKENS)

    def round(self, steps: int = 3, late_steps: int = 1) -> None:
        """Everybody makes steps, hands over a copy, makes some more, and applies what came of it."""
        number = len(self.rows) + 1
        fragment = (number - 1) % FRAGMENTS
        base = self.versions[fragment][-1]
        members = []
        for name in self.names:
            for _ in range(steps):
                self.step(name)
            members.append(self._hand_over(name, number, fragment, base))
            for _ in range(late_steps):
                self.step(name)
        version = version_of(base.number + 1, self.timeline, fragment=fragment)
        self.versions[fragment].append(version)
        self.rows.append(
            CommitRound(number, fragment, version, number, tuple(members), (), len(members), False, "everybody")
        )
        for name in self.names:
            self.apply(name, fragment)

    def _hand_over(self, name: str, number: int, fragment: int, base: Version) -> MergedContribution:
        incarnation = self.current[name]
        made, total = len(incarnation.steps), incarnation.total_tokens
        count = made - self.synced[name][fragment]
        copy = Contribution(
            self.t, number, fragment, base, made, count, count * TOKENS, total, incarnation.cursor + made
        )
        incarnation.contributions.append(copy)
        incarnation.fates[number] = ["accepted"]
        self.ledger.merge(fragment, count * TOKENS)
        self.accounted[name][fragment] = total
        return MergedContribution(
            name, incarnation.number, incarnation.slot, 1.0, count, copy.token_count, total, copy.cursor
        )

    def evidence(self, **changes: object) -> Evidence:
        accounts = tuple(
            LearnerAccount(
                name,
                incarnation.number,
                Role.LEARNER,
                incarnation.slot,
                0,
                len(incarnation.steps),
                incarnation.total_tokens,
                tuple(self.accounted[name]),
                (0,) * FRAGMENTS,
            )
            for name, incarnation in self.current.items()
        )
        newest = tuple(versions[-1] for versions in self.versions)
        count = len(self.rows)
        state = RunState(
            phase=RunPhase.RUNNING,
            timeline=self.timeline,
            global_step=count,
            versions=newest,
            version_steps=(count,) * FRAGMENTS,
            newest_opened=count,
            newest_closed=count,
            newest_closed_step=count,
            round_offset=0,
            committed_count=count,
            abandoned_count=0,
            open_rounds=(),
            newest_incarnation=len(self.incarnations),
            learners=accounts,
            slot_cursors={},
            ledger=self.ledger,
        )
        policy = Policy(fragment_count=FRAGMENTS, interval_steps=4, quorum_minimum=self.quorum_minimum)
        ledger = Ledger(tuple(self.rows), tuple(map(tuple, self.versions)), state, policy)
        return Evidence(tuple(self.incarnations), ledger, **changes)
