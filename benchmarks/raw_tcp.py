"""Bytes over a plain TCP connection: the limit that transports are compared with.

The sender writes blocks of 1 MiB from a buffer, the receiver receives into a buffer that exists already; nobody checks
anything. As a program it is the server: it takes one connection after the other, and from each any number of requests.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Final

BLOCK_BYTES: Final = 1 << 20
"""Written at a time."""

UPLOAD: Final = b"u"
DOWNLOAD: Final = b"d"

_REQUEST = struct.Struct("<cq")
_DONE: Final = b"."


class RawTcp:
    """A connection to the server, as a context.

    Args:
        port: of the server, on the loopback.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> RawTcp:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def upload(self, payload: memoryview) -> None:
        """Sends a payload and waits until the other end has all of it."""
        self._socket.sendall(_REQUEST.pack(UPLOAD, len(payload)))
        send_blocks(self._socket, payload)
        if self._socket.recv(1) != _DONE:
            raise ConnectionError("the server went away")

    def download(self, buffer: memoryview) -> None:
        """Fills a buffer."""
        self._socket.sendall(_REQUEST.pack(DOWNLOAD, len(buffer)))
        receive_into(self._socket, buffer)


def send_blocks(connection: socket.socket, payload: memoryview) -> None:
    """Sends a payload block by block."""
    for start in range(0, len(payload), BLOCK_BYTES):
        connection.sendall(payload[start : start + BLOCK_BYTES])


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills a buffer.

    Raises:
        ConnectionError: the other end went away before.
    """
    at = 0
    while at < len(buffer):
        size = connection.recv_into(buffer[at:])
        if size == 0:
            raise ConnectionError(f"the other end closed after {at} of {len(buffer)} bytes")
        at += size


class _Connection:
    """The server's end of one connection, with a buffer that is made once."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = memoryview(bytearray())

    def serve(self) -> None:
        with self._socket:
            while head := self._socket.recv(_REQUEST.size, socket.MSG_WAITALL):
                kind, size = _REQUEST.unpack(head)
                if size > len(self._buffer):
                    self._buffer = memoryview(bytearray(size))
                if kind == UPLOAD:
                    receive_into(self._socket, self._buffer[:size])
                    self._socket.sendall(_DONE)
                else:
                    send_blocks(self._socket, self._buffer[:size])


def serve() -> None:
    """The server; each connection has a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_Connection(connection).serve, daemon=True).start()


if __name__ == "__main__":
    serve()
