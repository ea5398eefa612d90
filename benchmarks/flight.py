"""Bytes over Arrow Flight, what transports of columns are compared with: DoPut and DoGet of one float32 column.

Record batches of 4 MiB, malloc tuned as in our own processes. Nobody checks anything. As a program it is the server:
it copies each batch that is put to its place in a buffer that exists already, as a syncer does, and sends from one.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.runtime.malloc import tune_malloc

BATCH_ELEMENTS: Final = 1 << 20
"""Elements of a record batch: 4 MiB."""

SCHEMA: Final = pa.schema([("values", pa.float32())])


class Flight:
    """A connection to the server, as a context.

    Args:
        port: of the server, on the loopback.
    """

    def __init__(self, port: int) -> None:
        self._client = fl.connect(f"grpc://127.0.0.1:{port}")

    def __enter__(self) -> Flight:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def upload(self, values: FloatVector) -> None:
        """Puts a vector and waits until the other end has all of it."""
        descriptor = fl.FlightDescriptor.for_path(str(values.size))
        writer, metadata = self._client.do_put(descriptor, SCHEMA)
        for batch in batches(values):
            writer.write_batch(batch)
        writer.done_writing()
        metadata.read()
        writer.close()

    def download(self, out: FloatVector) -> None:
        """Fills a vector."""
        copy_batches(self._client.do_get(fl.Ticket(str(out.size))), out)


def batches(values: FloatVector) -> list[Any]:
    """A vector as record batches that share its memory."""
    return [
        pa.record_batch([pa.array(values[start : start + BATCH_ELEMENTS])], schema=SCHEMA)
        for start in range(0, values.size, BATCH_ELEMENTS)
    ]


def copy_batches(reader: Any, out: FloatVector) -> None:
    """Copies what arrives to its place.

    Raises:
        ValueError: it was less or more than the vector holds.
    """
    at = 0
    for chunk in reader:
        column = chunk.data.column(0).to_numpy(zero_copy_only=True)
        out[at : at + column.size] = column
        at += column.size
    if at != out.size:
        raise ValueError(f"{at} values came where {out.size} were due")


class _Server(fl.FlightServerBase):
    """Keeps one vector of each size."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._vectors: dict[int, FloatVector] = {}

    def _vector(self, size: int) -> FloatVector:
        return self._vectors.setdefault(size, np.zeros(size, np.float32))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Takes a vector."""
        copy_batches(reader, self._vector(int(descriptor.path[0])))
        writer.write(b".")

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Sends a vector."""
        return fl.RecordBatchStream(
            pa.RecordBatchReader.from_batches(SCHEMA, batches(self._vector(int(ticket.ticket))))
        )


if __name__ == "__main__":
    tune_malloc()
    server = _Server()
    print(server.port, flush=True)
    server.serve()
