"""NVFlare's cells: a request whose payload is a dict of NumPy arrays, streamed, and a reply of the same kind.

Two root cells over its gRPC driver, without TLS; serialization, chunking and downloads are the ones of its jobs.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from nvflare.app_common.decomposers import numpy_decomposers
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message

from benchmarks.peers.loopback import WAIT_SECONDS, Vector, listen

SERVER, CLIENT = "server", "site-1"
CHANNEL, TOPIC = "benchmark", "echo"


def _cell(name: str, url: str) -> Any:
    numpy_decomposers.register()
    return Cell(fqcn=name, root_url=url, secure=False, credentials={})


class Far:
    """The server's cell."""

    def __init__(self, count: int) -> None:
        listener, address = listen()
        listener.close()
        self.address = f"grpc://{address}"
        self._cell = _cell(SERVER, self.address)
        self._is_connected = threading.Event()
        self._cell.core_cell.set_cell_connected_cb(lambda other: self._is_connected.set())
        self._cell.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=self._echo)
        self._cell.start()

    def _echo(self, request: Any) -> Any:
        return make_reply(ReturnCode.OK, body=request.payload)

    def connect(self) -> None:
        """Waits for the client's cell."""
        if not self._is_connected.wait(WAIT_SECONDS):
            raise TimeoutError("the client's cell has not connected")

    def serve(self) -> None:
        """The cell's threads serve."""


class Near:
    """A client's cell."""

    def __init__(self, address: str, count: int) -> None:
        self._cell = _cell(CLIENT, address)
        is_connected = threading.Event()
        self._cell.core_cell.set_cell_connected_cb(lambda other: is_connected.set())
        self._cell.start()
        if not is_connected.wait(WAIT_SECONDS):
            raise TimeoutError("the server's cell has not connected")

    def round_trip(self, payload: Vector) -> Vector:
        """A request and its reply."""
        request = new_cell_message({}, {"fragment": payload})
        reply = self._cell.send_request(
            channel=CHANNEL, topic=TOPIC, target=SERVER, request=request, timeout=WAIT_SECONDS
        )
        code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        if code != ReturnCode.OK:
            raise RuntimeError(f"the reply says {code}")
        values: Vector = np.asarray(reply.payload["fragment"])
        return values
