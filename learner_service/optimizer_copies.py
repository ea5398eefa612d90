"""Copies of the inner optimizer's state that the device thread makes at a step boundary, when somebody waits for them.

The network thread asks for a part; the device thread looks at each boundary whether anybody asked, which costs it the
reading of one attribute, and enqueues a copy on the devices. Neither waits for the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments, OptimizerState, PartCopy
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Version
from decoupled_diloco.wire.peer import CopyName

BOUNDARY_BYTES_MAX: Final = 64 << 20
"""Most bytes that are copied at one boundary, but always one part: the devices hold no second copy of a large state."""
NOT_READY_RETRY_SECONDS: Final = 1.0
"""What a caller is told to wait whom this learner cannot serve yet."""


@dataclass(frozen=True, slots=True)
class BoundaryCopy:
    """A part as it was at one boundary; `version` is what the parameters of the fragment began with."""

    name: CopyName
    version: Version | None
    arrays: PartCopy


@dataclass(frozen=True, slots=True)
class Boundary:
    """Which boundary it is: the learner's incarnation, its steps, and the versions that it holds, by fragment."""

    name: CopyName
    versions: Mapping[int, Version]


class OptimizerCopies:
    """Where a part is asked for and where it is delivered.

    Attributes:
        fragments: how the state is cut; None until the device thread has shown it.
        has_waiting: whether the device thread has something to do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[BoundaryCopy]] = {}
        self._refusal: str | None = "it has not begun to train yet"
        self.fragments: OptimizerFragments | None = None
        self.has_waiting = False
        self.wake_device: Callable[[], None] = lambda: None
        """Lets a device thread that holds look; must not wait."""

    # ---- the network thread ------------------------------------------------------------------------------------------

    def ask(self, part: int) -> Future[BoundaryCopy]:
        """Asks for a copy of a part; whoever asks for the same one meanwhile gets the same.

        The future fails with a `PeerError` NOT_READY, should the state become worthless before it is copied.

        Raises:
            PeerError: there is no state worth copying now.
        """
        with self._lock:
            if self._refusal is not None:
                raise _not_ready(self._refusal)
            waiting = self._waiting.setdefault(part, Future())
            self.has_waiting = True
        self.wake_device()
        return waiting

    def check(self) -> None:
        """Raises what `ask` would."""
        with self._lock:
            if self._refusal is not None:
                raise _not_ready(self._refusal)

    # ---- the device thread -------------------------------------------------------------------------------------------

    def open(self) -> None:
        """The state is that of a learner that trains."""
        with self._lock:
            self._refusal = None

    def refuse(self, reason: str) -> None:
        """The state is worth nothing until it is opened again, for this reason; who waits is told."""
        with self._lock:
            self._refusal = reason
            waiting, self._waiting = self._waiting, {}
            self.has_waiting = False
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(_not_ready(reason))

    def serve(self, state: OptimizerState, boundary: Callable[[], Boundary]) -> None:
        """Copies what somebody waits for, as much as one boundary allows; never waits.

        Args:
            state: the optimizer's, at a step boundary.
            boundary: which one; called only if something is copied.
        """
        if not self.has_waiting or self.fragments is None:
            return
        for part, future in self._next():
            if not future.set_running_or_notify_cancel():
                continue
            where = boundary()
            arrays = self.fragments.copy(state, part)
            future.set_result(BoundaryCopy(where.name, where.versions.get(part), arrays))

    def _next(self) -> list[tuple[int, Future[BoundaryCopy]]]:
        assert self.fragments is not None
        chosen: list[tuple[int, Future[BoundaryCopy]]] = []
        copied_bytes = 0
        with self._lock:
            for part in list(self._waiting):
                copied_bytes += self.fragments.payload_bytes(part)
                if chosen and copied_bytes > BOUNDARY_BYTES_MAX:
                    break
                chosen.append((part, self._waiting.pop(part)))
            self.has_waiting = bool(self._waiting)
        return chosen


def _not_ready(reason: str) -> PeerError:
    return PeerError(Reason.NOT_READY, f"this learner has no state to give: {reason}", None, NOT_READY_RETRY_SECONDS)
