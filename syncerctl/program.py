"""All commands of syncerctl together: importing a module of commands registers them."""

from __future__ import annotations

from syncerctl import checkpoint_commands, commands, learner_commands

app = commands.app

__all__ = ["app", "checkpoint_commands", "learner_commands"]
