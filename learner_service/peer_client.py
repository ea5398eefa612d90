"""The call of PeerService as a recovering learner makes it. `optimizer_recovery` repeats it where that helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc.aio
import numpy as np

from decoupled_diloco.arrays.optimizer_fragments import Payload
from decoupled_diloco.runtime.rate_limit import Allowance, RateLimit
from decoupled_diloco.wire.methods import PeerStub
from decoupled_diloco.wire.peer import CopyName, PartHeader, PartRequest, part_header_from_wire, part_request_to_wire
from decoupled_diloco.wire.stream import CHUNK_BYTES, ChunkPart, CorruptPayloadError, PayloadSink
from learner_service.peer_copies import BOUNDARY_SECONDS_MAX
from learner_service.syncer_client import END, Idle, end_of, step_of

CONTACT_SECONDS_MAX: Final = 5.0
"""A donor that has not taken the call by then is not there, or stands still."""
HEADER_SECONDS_MAX: Final = BOUNDARY_SECONDS_MAX + 5.0
"""Then it has this long for its next step boundary."""
CHUNK_SECONDS_MAX: Final = 10.0
"""Once bytes flow, the next ones come within this time."""


class PartReceipt:
    """A part under way; what has arrived survives a broken stream, as long as the donor keeps its copy.

    Args:
        payload_bytes: length of the part.

    Attributes:
        payload: the buffer.
        copy: what the bytes are of; None before the first header.
    """

    def __init__(self, payload_bytes: int) -> None:
        self.payload: Payload = np.empty(payload_bytes, np.uint8)
        self.copy: CopyName | None = None
        self._sink = PayloadSink(self.payload.data)

    @property
    def received_bytes(self) -> int:
        """How much has arrived; the offset to go on at."""
        return self._sink.received_bytes

    def open(self, header: PartHeader) -> None:
        """Takes in a header; what is here of another copy is forgotten.

        Raises:
            CorruptPayloadError: the length is not that of the part.
        """
        if header.payload_bytes != self.payload.size:
            text = f"the header promises {header.payload_bytes} bytes; the part has {self.payload.size}"
            raise CorruptPayloadError(text)
        if header.copy != self.copy:
            self._sink.restart()
            self.copy = header.copy

    def write(self, chunk: ChunkPart) -> None:
        """Takes in a chunk."""
        if self.copy is None:
            raise CorruptPayloadError("a chunk came before the header")
        self._sink.write(chunk)

    def finish(self, digest: str) -> None:
        """Compares all with the digest of the trailer."""
        self._sink.finish(digest)


class PeerClient:
    """Calls to one peer.

    Args:
        channel: closed by its owner.
        limit: how fast bytes may arrive; None: as fast as they come.
    """

    def __init__(self, channel: grpc.aio.Channel, limit: RateLimit | None = None) -> None:
        self._stub = PeerStub(channel)
        self._limit = limit or RateLimit()

    async def download(self, request: PartRequest, receipt: PartReceipt, moved: Callable[[int], None]) -> None:
        """Receives a part into `receipt`, from where it stands to the end.

        Args:
            request: what is wanted; its offset and copy are those of the receipt.
            receipt: new, or that of a broken stream from the same peer.
            moved: told about the bytes that arrived.

        Raises:
            PeerError: the peer refuses.
            UnreachableError: it is not there, the stream broke, or a deadline has passed.
            CorruptPayloadError: the stream does not hold what it promised.
        """
        call = self._stub.DownloadOptimizerState(part_request_to_wire(request))
        try:
            await step_of(call, call.initial_metadata(), Idle(CONTACT_SECONDS_MAX))
            await self._receive(call, receipt, moved)
        finally:
            call.cancel()

    async def _receive(self, call: Any, receipt: PartReceipt, moved: Callable[[int], None]) -> None:
        idle = Idle(HEADER_SECONDS_MAX)
        allowance = Allowance(self._limit, CHUNK_BYTES)
        while True:
            part = await step_of(call, call.read(), idle)
            if part is END:
                raise await end_of(call)
            if isinstance(part, ChunkPart):
                receipt.write(part)
                moved(len(part.data))
            elif part.WhichOneof("part") == "header":
                receipt.open(part_header_from_wire(part.header))
            else:
                receipt.finish(part.trailer.digest)
                return
            await allowance.for_next(receipt.received_bytes, receipt.payload.size)
            idle = Idle(CHUNK_SECONDS_MAX)
