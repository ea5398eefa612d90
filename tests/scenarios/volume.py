"""What a scenario's syncer has written down: the run's newest state and the rounds that were committed."""

from __future__ import annotations

import json

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core.plain import from_plain, to_plain
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine


class Volume:
    """The text of the newest state, and the rows of all committed rounds."""

    def __init__(self) -> None:
        self._text = ""
        self._rows: list[fx.CommitRound] = []
        self._proposed: dict[int, fx.CommitRound] = {}
        self._checkpoint = ""

    def save(self, state: RunState) -> None:
        """Before an answer that must hold, and with every commit."""
        self._text = json.dumps(to_plain(state))

    def propose(self, row: fx.CommitRound) -> None:
        """A round is being made durable."""
        self._proposed[row.round] = row

    def commit(self, number: int, state: RunState) -> None:
        """Its transaction is written: its row, with the state of before."""
        if number in self._proposed:
            self._rows.append(self._proposed.pop(number))
            self.save(state)

    def checkpoint(self, state: RunState) -> None:
        """Keeps a state to go back to."""
        self._checkpoint = json.dumps(to_plain(state))

    def cut(self) -> RunState:
        """The state of the checkpoint."""
        return from_plain(RunState, json.loads(self._checkpoint))

    def restart(self, policy: Policy, now: float) -> tuple[SyncerMachine, list[fx.Effect]]:
        """A new machine that has taken up what is written down."""
        machine = SyncerMachine(policy)
        return machine, machine.restore(from_plain(RunState, json.loads(self._text)), self._rows, now)
