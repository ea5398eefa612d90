"""The inner optimizer's state on the device thread: copied for others, replaced after a recovery.

Nothing here waits: whether the device thread holds for a recovery is up to the session.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from decoupled_diloco.arrays.fragments import Fragmentation
from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments, OptimizerState
from decoupled_diloco.arrays.tree import Params
from decoupled_diloco.core.ids import Version
from learner_service.optimizer_copies import Boundary, OptimizerCopies
from learner_service.optimizer_recovery import Recovered
from learner_service.peer_side import RecoveryOrder
from learner_service.syncer_client import Joined

NOT_SHOWN = "its training loop does not hand over the optimizer's state"


class OptimizerExchange:
    """One session's optimizer, as far as its training loop hands the state over. Used by the device thread.

    Args:
        fragmentation: of the parameters.
        copies: shared with the network thread, which is told here how to wake this one.
        order: has the network thread look for a state.
        wake_device: lets a held device thread look again; called on the network thread.
        serves: whether copies will be asked for.
    """

    def __init__(
        self,
        fragmentation: Fragmentation,
        copies: OptimizerCopies,
        order: Callable[[RecoveryOrder], None],
        wake_device: Callable[[], None],
        serves: bool,
    ) -> None:
        self._fragmentation = fragmentation
        self._copies = copies
        self._order = order
        self._wake_device = copies.wake_device = wake_device
        self._serves = serves
        self._has_joined = False
        self._number = 0
        self._is_waiting = False
        self._found: Recovered | None = None
        self._is_open = False

    def look(self, params: Params, state: OptimizerState | None, joined: Joined) -> None:
        """At a boundary after the join: begins a recovery if this learner joined a run that has begun.

        Args:
            params: the parameters.
            state: the optimizer's; None: it is not handed over.
            joined: what the syncer handed out.
        """
        if state is not None and self._copies.fragments is None:
            fragments = OptimizerFragments(params, self._fragmentation, state)
            if self._serves:
                fragments.warm(state)
            self._copies.fragments = fragments
        if not self._has_joined:
            self._has_joined = True
            if joined.global_step > 0:
                versions = {published.fragment: published.version for published in joined.versions}
                self.recover(state, f"this learner joins a run that is at step {joined.global_step}", versions)

    def recover(self, state: OptimizerState | None, reason: str, versions: Mapping[int, Version]) -> None:
        """The state is worth nothing: looks for another one, if there is one to look for."""
        self._is_open = False
        fragments = self._copies.fragments
        self._copies.refuse(f"it recovers itself: {reason}")
        if state is None or fragments is None or not any(map(fragments.payload_bytes, range(fragments.part_count))):
            return
        self._number += 1
        number, self._found, self._is_waiting = self._number, None, True

        def done(recovered: Recovered) -> None:
            if number == self._number:
                self._found, self._is_waiting = recovered, False
                self._wake_device()

        self._order(RecoveryOrder(reason, fragments, versions, done))

    @property
    def is_waiting(self) -> bool:
        """Whether a recovery is under way."""
        return self._is_waiting

    def settle(self, state: OptimizerState | None) -> tuple[OptimizerState | None, bool]:
        """Before a step: the state to go on with, and whether it was recovered; what it replaces is donated."""
        if state is None:
            if not self._is_open:
                self._is_open = True
                self._copies.refuse(NOT_SHOWN)
            return None, False
        found, self._found = self._found, None
        fragments = self._copies.fragments
        if found is not None and found.payloads and fragments is not None:
            for part, payload in enumerate(found.payloads):
                state = fragments.write(state, fragments.stage(state, part, payload))
        if not self._is_open:
            self._is_open = True
            self._copies.open()
        return state, found is not None and bool(found.payloads)

    def serve(self, state: OptimizerState | None, boundary: Callable[[], Boundary]) -> None:
        """Copies what others wait for, if this state is worth it."""
        if self._is_open and state is not None and self._copies.has_waiting:
            self._copies.serve(state, boundary)
