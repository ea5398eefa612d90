"""Raw TCP: sends of 1 MiB, received into a buffer that is already there. A limit: nothing is framed or checked."""

from __future__ import annotations

import socket

import numpy as np

from benchmarks.peers.loopback import Vector, accept, dial, listen
from benchmarks.raw_tcp import receive_into, send_blocks


def _send(connection: socket.socket, values: Vector) -> None:
    send_blocks(connection, values.view(np.uint8).data)


def _receive(connection: socket.socket, values: Vector) -> None:
    receive_into(connection, values.view(np.uint8).data)


class Far:
    """Receives everything, then sends it back."""

    def __init__(self, count: int) -> None:
        self._listener, self.address = listen()
        self._values: Vector = np.zeros(count, np.float32)

    def connect(self) -> None:
        """Waits for the connection."""
        self._connection = accept(self._listener)

    def serve(self) -> None:
        """One payload there and back."""
        _receive(self._connection, self._values)
        _send(self._connection, self._values)


class Near:
    """Sends everything, then receives it into another buffer."""

    def __init__(self, address: str, count: int) -> None:
        self._connection = dial(address)
        self._values: Vector = np.zeros(count, np.float32)

    def round_trip(self, payload: Vector) -> Vector:
        """One payload there and back."""
        _send(self._connection, payload)
        _receive(self._connection, self._values)
        return self._values
