"""torchft's PGTransport over its gloo process group, received in place, the faster of its two ways."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.checkpointing.pg_transport import PGTransport
from torchft.process_group import ProcessGroupGloo

from benchmarks.peers.loopback import LOOPBACK, WAIT_SECONDS, Vector

TIMEOUT = timedelta(seconds=WAIT_SECONDS)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class _End:
    """A transport; the state that it receives lies in `state`."""

    def __init__(self, count: int) -> None:
        self.state: dict[str, Any] = {"fragment": torch.zeros(count)}
        self._step = 0

    def join(self, store_address: str, rank: int) -> None:
        """Both ranks meet."""
        group = ProcessGroupGloo(timeout=TIMEOUT)
        group.configure(store_addr=f"{store_address}/bench", replica_id=str(rank), rank=rank, world_size=2)
        self._transport: PGTransport[dict[str, Any]] = PGTransport(
            group, TIMEOUT, torch.device("cpu"), state_dict=lambda: self.state
        )
        self._other = 1 - rank

    def send(self, state: dict[str, Any]) -> None:
        """Sends a state to the other end."""
        self._step += 1
        self._transport.send_checkpoint([self._other], self._step, state, TIMEOUT)

    def receive(self) -> dict[str, Any]:
        """Receives the other end's state; it counts the same steps."""
        self._step += 1
        return self._transport.recv_checkpoint(self._other, "", self._step, TIMEOUT)


class Far(_End):
    """Rank 1."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.address = f"{LOOPBACK}:{self._store.port}"

    def connect(self) -> None:
        """Both ranks meet."""
        self.join(self.address, 1)

    def serve(self) -> None:
        """One state there and back."""
        self.send(self.receive())


class Near(_End):
    """Rank 0."""

    def __init__(self, address: str, count: int) -> None:
        super().__init__(count)
        self.join(address, 0)

    def round_trip(self, payload: Vector) -> Vector:
        """One state there and back."""
        self.send({"fragment": torch.from_numpy(payload)})
        values: Vector = self.receive()["fragment"].numpy()
        return values
