"""Arrow Flight: DoPut and DoGet of float32 batches of 4 MiB, copied into buffers that are already there. A limit."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight

from benchmarks.flight import SCHEMA, batches, copy_batches
from benchmarks.peers.loopback import LOOPBACK, Vector

DESCRIPTOR = pa.flight.FlightDescriptor.for_path("fragment")
TICKET = pa.flight.Ticket(b"fragment")


class _Server(pa.flight.FlightServerBase):
    def __init__(self, count: int) -> None:
        super().__init__(f"grpc://{LOOPBACK}:0")
        self.values: Vector = np.zeros(count, np.float32)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        copy_batches(reader, self.values)

    def do_get(self, context: Any, ticket: Any) -> Any:
        return pa.flight.GeneratorStream(SCHEMA, iter(batches(self.values)))


class Far:
    """A Flight server."""

    def __init__(self, count: int) -> None:
        self._server = _Server(count)
        self.address = f"grpc://{LOOPBACK}:{self._server.port}"
        threading.Thread(target=self._server.serve, daemon=True).start()

    def connect(self) -> None:
        """The server's threads accept."""

    def serve(self) -> None:
        """The server's threads serve."""


class Near:
    """A Flight client."""

    def __init__(self, address: str, count: int) -> None:
        self._client = pa.flight.connect(address)
        self._values: Vector = np.zeros(count, np.float32)

    def round_trip(self, payload: Vector) -> Vector:
        """DoPut, then DoGet."""
        writer, answers = self._client.do_put(DESCRIPTOR, SCHEMA)
        with writer:
            for batch in batches(payload):
                writer.write_batch(batch)
            writer.done_writing()
            answers.read()  # the end of the stream: the server has everything
        copy_batches(self._client.do_get(TICKET), self._values)
        return self._values
