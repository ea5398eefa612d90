"""Arrow Flight: DoPut and DoGet of float32 batches of 4 MiB, copied into buffers that are already there. A limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight

from benchmarks.peers.loopback import LOOPBACK, Vector

BATCH_COUNT = 1 << 20
"""Values in a batch: 4 MiB."""
SCHEMA = pa.schema([("values", pa.float32())])
DESCRIPTOR = pa.flight.FlightDescriptor.for_path("fragment")
TICKET = pa.flight.Ticket(b"fragment")


def _batches(values: Vector) -> Iterator[Any]:
    whole = pa.array(values)  # shares the memory
    for offset in range(0, len(whole), BATCH_COUNT):
        yield pa.record_batch([whole.slice(offset, BATCH_COUNT)], schema=SCHEMA)


def _receive(reader: Any, values: Vector) -> None:
    offset = 0
    for chunk in reader:
        part = chunk.data.column(0).to_numpy(zero_copy_only=True)
        values[offset : offset + part.size] = part
        offset += part.size
    if offset != values.size:
        raise EOFError(f"{offset} of {values.size} values came")


class _Server(pa.flight.FlightServerBase):
    def __init__(self, count: int) -> None:
        super().__init__(f"grpc://{LOOPBACK}:0")
        self.values: Vector = np.zeros(count, np.float32)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        _receive(reader, self.values)

    def do_get(self, context: Any, ticket: Any) -> Any:
        return pa.flight.GeneratorStream(SCHEMA, _batches(self.values))


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
            for batch in _batches(payload):
                writer.write_batch(batch)
            writer.done_writing()
            answers.read()  # the end of the stream: the server has everything
        _receive(self._client.do_get(TICKET), self._values)
        return self._values
