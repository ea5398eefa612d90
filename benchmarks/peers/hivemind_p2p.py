"""hivemind's tensor streaming over libp2p, as its averager shares state: serialized, split, streamed, put together.

Each end has a p2pd daemon, whose work counts. Nothing is compressed.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, AsyncIterator, TypeVar  # noqa: UP035 (hivemind recognises streams by typing's)

import torch
from hivemind.compression import deserialize_torch_tensor, serialize_torch_tensor
from hivemind.p2p import P2P, P2PContext, ServicerBase
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import switch_to_uvloop
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.streaming import combine_from_streaming, split_for_streaming

from benchmarks.peers.loopback import WAIT_SECONDS, Vector

ResultT = TypeVar("ResultT")
NONE = runtime_pb2.CompressionType.NONE


def _parts(tensor: torch.Tensor) -> Iterator[Any]:
    for part in split_for_streaming(serialize_torch_tensor(tensor, NONE)):
        yield averaging_pb2.DownloadData(tensor_part=part)


async def _put_together(stream: AsyncIterator[Any]) -> torch.Tensor:
    parts = [message.tensor_part async for message in stream]
    tensor: torch.Tensor = deserialize_torch_tensor(combine_from_streaming(parts))
    return tensor


class Echo(ServicerBase):  # type: ignore[misc]
    """Takes a tensor and sends it back."""

    async def rpc_echo(
        self, stream: AsyncIterator[averaging_pb2.DownloadData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """The tensor that came, once it has come as a whole."""
        for part in _parts(await _put_together(stream)):
            yield part


class _End:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = switch_to_uvloop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Runs a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)


class Far(_End):
    """Serves the call."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.address = self.run(self._begin())

    async def _begin(self) -> str:
        self._p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], dht_mode="server")
        await Echo().add_p2p_handlers(self._p2p)
        addresses = [str(address) for address in await self._p2p.get_visible_maddrs()]
        return json.dumps([self._p2p.peer_id.to_base58(), addresses])

    def connect(self) -> None:
        """The daemon accepts."""

    def serve(self) -> None:
        """The event loop serves."""


class Near(_End):
    """Makes the call."""

    def __init__(self, address: str, count: int) -> None:
        super().__init__()
        peer, addresses = json.loads(address)
        self.run(self._begin(peer, [Multiaddr(text) for text in addresses]))

    async def _begin(self, peer: str, addresses: list[Any]) -> None:
        self._p2p = await P2P.create(initial_peers=addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        self._stub = Echo.get_stub(self._p2p, PeerID.from_base58(peer))

    def round_trip(self, payload: Vector) -> Vector:
        """One tensor there and back."""
        values: Vector = self.run(self._echo(torch.from_numpy(payload))).numpy()
        return values

    async def _echo(self, tensor: torch.Tensor) -> torch.Tensor:
        async def stream() -> AsyncIterator[Any]:
            for part in _parts(tensor):
                yield part

        return await _put_together(await self._stub.rpc_echo(stream()))
