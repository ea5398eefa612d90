"""What two ends are, and how they find each other. Runs where NumPy is all there is of our dependencies."""

from __future__ import annotations

import json
import socket
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]

LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 120.0
"""A peer that has not answered after this long will not."""


class Far(Protocol):
    """The end that receives a payload and sends it back.

    Attributes:
        address: what the near end needs to find it; known before `connect`.
    """

    address: str

    def connect(self) -> None:
        """Returns once the near end is there."""

    def serve(self) -> None:
        """Serves one round trip; returns at once if threads of the library do it."""


class Near(Protocol):
    """The end that has a payload."""

    def round_trip(self, payload: Vector) -> Vector:
        """Sends the payload and returns what came back, which may lie in a buffer that the next call overwrites."""


class Line:
    """A side channel of small JSON messages between the two ends, where a library has none: who may fetch what, now."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(WAIT_SECONDS)
        self._file = connection.makefile("rw", encoding="utf-8")

    def say(self, message: Any) -> None:
        """Sends a message."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def hear(self) -> Any:
        """The next message.

        Raises:
            EOFError: the other end is gone.
        """
        if not (line := self._file.readline()):
            raise EOFError("the other end is gone")
        return json.loads(line)


def listen() -> tuple[socket.socket, str]:
    """A listening socket on a free port of the loopback, and its address."""
    listener = socket.create_server((LOOPBACK, 0))
    listener.settimeout(WAIT_SECONDS)
    return listener, f"{LOOPBACK}:{listener.getsockname()[1]}"


def accept(listener: socket.socket) -> socket.socket:
    """The next connection."""
    connection, _ = listener.accept()
    connection.settimeout(WAIT_SECONDS)
    return connection


def dial(address: str) -> socket.socket:
    """A connection to host:port."""
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)
