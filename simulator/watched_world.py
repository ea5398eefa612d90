"""A world whose every fact is checked against what must always hold; with a tape, and a trace for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from simulator import facts
from simulator.checkers import RULES
from simulator.history import History
from simulator.rule import BrokenRuleError, Rule
from simulator.store import UnreadableError
from simulator.syncer_process import SyncerProcess
from simulator.transfers import Faults
from simulator.world import World

_METHODS = {
    facts.Started: "started",
    facts.Decided: "decided",
    facts.Durable: "durable",
    facts.Published: "published",
    facts.HandedOut: "handed_out",
    facts.Held: "held",
    facts.Answered: "answered",
}


class WatchedWorld(World):
    """A world that fails at the first fact that breaks a rule.

    Args:
        keeps_tape: whether every syncer's events and effects are kept, for `check_replays`.
        trace: told of everything that happens, in words.
        rules: the rules.

    Attributes:
        commits: the rounds that were committed, in order.
        tape: the events of every syncer, with their instants and effects.
    """

    def __init__(
        self,
        policy: Policy,
        seed: int = 0,
        faults: Faults | None = None,
        *,
        keeps_tape: bool = False,
        trace: Callable[[str], None] | None = None,
        rules: Iterable[type[Rule]] = RULES,
        **seconds: float,
    ) -> None:
        self.history = History()
        self.commits: list[fx.CommitRound] = []
        self.tape: dict[int, list[tuple[float, ev.Event, Sequence[fx.Effect]]]] = {}
        self.event_count = 0
        self._starts: dict[int, facts.Started] = {}
        self._keeps_tape, self._trace = keeps_tape, trace
        made = [rule(policy, self.history) for rule in rules]
        self._watchers: dict[type, list[Callable[[Any], None]]] = {
            kind: [getattr(rule, method) for rule in made if hasattr(rule, method)] for kind, method in _METHODS.items()
        }
        super().__init__(policy, seed=seed, faults=faults, **seconds)  # type: ignore[arg-type]
        self.keep_effects = False

    @property
    def start_count(self) -> int:
        """How many syncers were started."""
        return len(self._starts)

    def start_syncer(self) -> None:
        """Starts a syncer on the volume; what it cannot read is lost."""
        try:
            super().start_syncer()
        except UnreadableError as error:
            raise BrokenRuleError("committed survives", str(error)) from error

    def note(self, fact: facts.Fact) -> None:
        """Checks a fact."""
        kind = type(fact)
        if kind is facts.Durable:
            self.history.durable(fact)  # type: ignore[arg-type]
            row = fact.transaction.row  # type: ignore[union-attr]
            if row is not None:
                self.commits.append(row)
        elif kind is facts.Started:
            self.history.started(fact)  # type: ignore[arg-type]
            self._starts[fact.process] = fact  # type: ignore[union-attr, assignment]
        if self._trace is not None and kind is not facts.Decided:
            self.say(_words(fact))
        for watcher in self._watchers[kind]:
            watcher(fact)

    def say(self, text: str) -> None:
        """One line of the trace."""
        if self._trace is not None:
            self._trace(f"{self.now:10.3f}  {text}")

    def count(self, kind: str) -> None:
        """One more of a kind."""
        super().count(kind)
        self.say(f"** {kind}")

    def after_event(self, process: SyncerProcess, event: ev.Event, effects: Sequence[fx.Effect]) -> None:
        """Checks a decision."""
        super().after_event(process, event, effects)
        self.event_count += 1
        if self._keeps_tape:
            self.tape.setdefault(process.number, []).append((self.now, event, effects))
        if self._trace is not None:
            self.say(f"syncer {process.number} <- {event}")
            for effect in effects:
                self.say(f"        -> {effect}")
        self.note(facts.Decided(self.now, process.number, process.machine, event, effects))

    def check_replays(self, machine_class: type[SyncerMachine] = SyncerMachine) -> None:
        """Every syncer's tape gives the same effects when a new machine gets the same events at the same instants."""
        for number, tape in self.tape.items():
            start, machine = self._starts[number], machine_class(self.policy)
            if start.restored is not None:
                machine.restore(start.restored.state, start.restored.newer, start.now)
            for now, event, effects in tape:
                again = machine.handle(event, now)
                if again != effects:
                    raise BrokenRuleError(
                        "replay", f"syncer {number} at {now} s: {event} gave {effects}, and now {again}"
                    )


def _words(fact: facts.Fact) -> str:
    match fact:
        case facts.Started(_, process, machine, restored, from_mirror):
            origin = "a new run" if restored is None else "from the mirror" if from_mirror else "from its volume"
            return f"** syncer {process} starts: {origin}, timeline {machine.timeline}, step {machine.global_step}"
        case facts.Durable(transaction=item):
            what = f"round {item.row.round} at {item.row.version}" if item.row else f"versions {item.named}"
            return f"   durable: {what if item.row or item.named else 'the state'}"
    return f"   {fact}"
