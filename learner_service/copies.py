"""The copies that contributions are made of, between the thread that orders them and the one that reads them."""

from __future__ import annotations

import threading

from decoupled_diloco.arrays.device import DeviceCopy
from decoupled_diloco.core.learner_effects import Copy


class CopySlot:
    """A copy that the machine has ordered; the device thread fills it a moment later."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self._filled = threading.Event()
        self._arrays: DeviceCopy | None = None

    def fill(self, arrays: DeviceCopy) -> None:
        """The device thread has enqueued the copy."""
        self._arrays = arrays
        self._filled.set()

    def arrays(self) -> DeviceCopy:
        """The copy; waits for the rest of the boundary at which it was ordered. Not for an event loop."""
        self._filled.wait()
        assert self._arrays is not None
        return self._arrays
