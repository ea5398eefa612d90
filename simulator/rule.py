"""What a rule is, and what it says when it is broken."""

from __future__ import annotations

from typing import ClassVar, NoReturn

from decoupled_diloco.core.policy import Policy
from simulator.history import History


class BrokenRuleError(AssertionError):
    """A rule was broken. `rule` is its name."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


class Rule:
    """Something that always holds. A rule has a method for each kind of fact that it looks at.

    Args:
        policy: the run's policy.
        history: what is durable, up to the fact at hand.
    """

    name: ClassVar[str]

    def __init__(self, policy: Policy, history: History) -> None:
        self.policy, self.history = policy, history

    def broken(self, text: str) -> NoReturn:
        """Says so."""
        raise BrokenRuleError(self.name, text)
