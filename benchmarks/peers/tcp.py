"""Raw TCP: sends of 1 MiB, received into a buffer that is already there. A limit: nothing is framed or checked."""

from __future__ import annotations

import socket

import numpy as np

from benchmarks.peers.loopback import Vector, accept, dial, listen

SEND_BYTES = 1 << 20


def _send(connection: socket.socket, values: Vector) -> None:
    data = values.view(np.uint8).data
    for offset in range(0, len(data), SEND_BYTES):
        connection.sendall(data[offset : offset + SEND_BYTES])


def _receive(connection: socket.socket, values: Vector) -> None:
    buffer, offset = values.view(np.uint8).data, 0
    while offset < len(buffer):
        count = connection.recv_into(buffer[offset : offset + SEND_BYTES])
        if not count:
            raise EOFError("the other end is gone")
        offset += count


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
