"""torch.distributed's gloo: send and recv of one tensor into tensors that are already there. A limit, not a peer."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.peers.loopback import LOOPBACK, WAIT_SECONDS, Vector

TIMEOUT = timedelta(seconds=WAIT_SECONDS)
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class Far:
    """Rank 1."""

    def __init__(self, count: int) -> None:
        self._store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.address = f"{LOOPBACK}:{self._store.port}"
        self._tensor = torch.zeros(count)

    def connect(self) -> None:
        """Both ranks meet."""
        dist.init_process_group("gloo", store=self._store, rank=1, world_size=2, timeout=TIMEOUT)

    def serve(self) -> None:
        """One tensor there and back."""
        dist.recv(self._tensor, 0)
        dist.send(self._tensor, 0)


class Near:
    """Rank 0."""

    def __init__(self, address: str, count: int) -> None:
        port = int(address.rsplit(":", 1)[1])
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=TIMEOUT)
        self._tensor = torch.zeros(count)

    def round_trip(self, payload: Vector) -> Vector:
        """One tensor there and back."""
        dist.send(torch.from_numpy(payload), 1)
        dist.recv(self._tensor, 1)
        values: Vector = self._tensor.numpy()
        return values
