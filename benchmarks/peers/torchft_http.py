"""torchft's HTTPTransport, as its manager uses it: one end serves its state, the other fetches it; then vice versa.

Who may fetch comes to a torchft replica with the answer of its quorum; here a line says it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torchft.checkpointing import HTTPTransport

from benchmarks.peers.loopback import WAIT_SECONDS, Line, Vector, accept, dial, listen

TIMEOUT = timedelta(seconds=WAIT_SECONDS)


class _End:
    """A transport with the line to the other one's."""

    line: Line

    def __init__(self) -> None:
        self._transport: HTTPTransport[dict[str, Any]] = HTTPTransport(TIMEOUT, num_chunks=0)
        self._step = 0

    def offer(self, state: dict[str, Any]) -> None:
        """Serves a state until the other end has it."""
        self._step += 1
        self._transport.send_checkpoint([1], self._step, state, TIMEOUT)
        self.line.say([self._transport.metadata(), self._step])
        self.line.hear()
        self._transport.disallow_checkpoint()

    def fetch(self) -> dict[str, Any]:
        """The state that the other end serves."""
        metadata, step = self.line.hear()
        state = self._transport.recv_checkpoint(0, metadata, step, TIMEOUT)
        self.line.say("fetched")
        return state


class Far(_End):
    """Fetches, then serves what it has fetched."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._listener, self.address = listen()

    def connect(self) -> None:
        """Waits for the line."""
        self.line = Line(accept(self._listener))

    def serve(self) -> None:
        """One state there and back."""
        self.offer(self.fetch())


class Near(_End):
    """Serves, then fetches."""

    def __init__(self, address: str, count: int) -> None:
        super().__init__()
        self.line = Line(dial(address))

    def round_trip(self, payload: Vector) -> Vector:
        """One state there and back."""
        self.offer({"fragment": torch.from_numpy(payload)})
        values: Vector = self.fetch()["fragment"].numpy()
        return values
