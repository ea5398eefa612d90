"""Commands that drive a LearnerMachine.

learner P= H= tau= apply= ...   a machine with this policy; it holds nothing yet
begin                           it downloads and applies version 1.1 of every fragment
ask 1 due= [base=] [ratio=] [in_flight=]   last_call 1   closed 1 [abandoned]
published 0 1.2 [steps=]        downloaded 0 1.2 [steps=]      failed 0 1.2
step [count] [tokens=]          that many inner steps, each with its boundary; shows the last one
boundary                        once more, as while a hold lasts
pause   resume   drain   recover   initial   detached   attached   ended   drained
show                            counters and versions
"""

from __future__ import annotations

from collections.abc import Callable

from decoupled_diloco.core import learner_events as ev
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.schedule import fragment_of, global_step_of
from tests.scenarios.policies import policy_of
from tests.scenarios.scenario_file import Command
from tests.scenarios.words import boundary_words, learner_effect_words, versions


class LearnerDriver:
    """One machine."""

    def __init__(self, options: dict[str, str]) -> None:
        self.machine = LearnerMachine(policy_of(options))
        self._commands: dict[str, Callable[[Command], list[str]]] = {
            "begin": self._begin,
            "step": self._step,
            "boundary": lambda _: boundary_words(self.machine.at_boundary()),
            "drained": lambda _: [learner_effect_words(effect) for effect in self.machine.drained()],
            "show": self._show,
        }

    def execute(self, command: Command) -> list[str]:
        """Carries out one command; returns what the machine wants done, in words."""
        known = self._commands.get(command.name)
        if known is not None:
            return known(command)
        return [learner_effect_words(effect) for effect in self.machine.handle(self._event(command))]

    def _begin(self, command: Command) -> list[str]:
        for fragment in range(self.machine.policy.fragment_count):
            self.machine.handle(ev.Published(fragment, Version(1, 1), 0))
            self.machine.handle(ev.Downloaded(fragment, Version(1, 1), 0))
        return boundary_words(self.machine.at_boundary())

    def _step(self, command: Command) -> list[str]:
        lines = []
        for _ in range(int(command.words[0]) if command.words else 1):
            self.machine.step_finished(command.count("tokens", 10))
            lines = boundary_words(self.machine.at_boundary())
        return lines

    def _show(self, command: Command) -> list[str]:
        machine = self.machine
        counters = f"local step {machine.local_step}, {machine.token_count} tokens, cursor {machine.cursor}"
        return [
            f"{counters}, schedule step {machine.schedule_step}",
            f"applied: {versions(machine.applied_versions)}",
        ]

    def _event(self, command: Command) -> ev.LearnerEvent:
        match command.name:
            case "ask":
                return self._ask(int(command.words[0]), command)
            case "last_call":
                return ev.LastCalled(int(command.words[0]))
            case "closed":
                number, policy = int(command.words[0]), self.machine.policy
                committed = not command.flag("abandoned")
                return ev.RoundEnded(number, fragment_of(number, policy), committed, (), global_step_of(number, policy))
            case "published" | "downloaded" | "failed":
                return self._version_event(command)
        return {
            "pause": ev.PauseAsked("maintenance"),
            "resume": ev.ResumeAsked(),
            "drain": ev.DrainAsked("it was asked to stop"),
            "recover": ev.RecoverAsked("values that are not finite"),
            "initial": ev.InitialAsked(),
            "detached": ev.DetachedTooLong(),
            "attached": ev.AttachedAgain(),
            "ended": ev.Ended("all steps are made"),
        }[command.name]

    def _ask(self, number: int, command: Command) -> ev.Asked:
        policy = self.machine.policy
        base = _version(command.options.get("base", "1.1"))
        return ev.Asked(
            number,
            fragment_of(number, policy),
            base,
            global_step_of(number, policy),
            command.count("due", 1),
            command.number("ratio", 1.0),
            command.count("in_flight", 1),
        )

    def _version_event(self, command: Command) -> ev.LearnerEvent:
        fragment, version = int(command.words[0]), _version(command.words[1])
        steps = command.count("steps", 0)
        match command.name:
            case "published":
                return ev.Published(fragment, version, steps)
            case "downloaded":
                return ev.Downloaded(fragment, version, steps)
        return ev.DownloadFailed(fragment, version)


def _version(text: str) -> Version:
    timeline, number = text.split(".")
    return Version(int(timeline), int(number))
