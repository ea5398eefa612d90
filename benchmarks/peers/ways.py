"""The ways from one process to another that are compared, and what each does for its time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).resolve().parents[2]
Kind = Literal["ours", "limit", "peer"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way.

    Attributes:
        name: as people know it.
        module: below benchmarks.peers; it runs in the environment.
        kind: a limit moves bytes and leaves framing, checks and faults to its user; a peer moves tensors between
            replicas that train.
        work: what it does beside moving bytes, in words.
        environment: folder of the environment; "": this one.
        is_by_request: slow and in an environment of its own; only if it is named.
        has_far: whether the far end is a process that `pairs.py` starts; ours brings its syncer.
    """

    name: str
    module: str
    kind: Kind
    work: str
    environment: str = ""
    is_by_request: bool = False
    has_far: bool = True

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return ROOT / self.environment / "bin" / "python" if self.environment else Path(sys.executable)

    @property
    def request(self) -> str:
        """What to ask for it by, and for its environment; "" if nobody has to."""
        return self.environment.removeprefix(".venv-bench-") if self.is_by_request else ""

    @property
    def absence(self) -> str:
        """Why it cannot be measured here; "" if it can."""
        if self.python.exists():
            return ""
        return f"{self.environment} is not there: make {self.environment.replace('.venv-bench', 'bench-env')}"


WAYS: Final[tuple[Way, ...]] = (
    Way(
        "ours",
        "ours",
        "ours",
        "checksum of every chunk and digest of the whole on both sides; resumable; rounds, fencing; nothing durable; "
        "its memory is that of a syncer, with parameters, momentum and a merge between the transfers",
        has_far=False,
    ),
    Way("raw TCP", "tcp", "limit", "none; 1 MiB sends into a buffer that is there"),
    Way("gloo", "gloo", "limit", "none; into a tensor that is there", ".venv-bench"),
    Way("Arrow Flight", "flight", "limit", "framing; copied into a buffer that is there"),
    Way("safetensors file", "file", "limit", "a file written and read, in shared memory; nothing durable"),
    Way("torchft, HTTP", "torchft_http", "peer", "pickled structure, raw tensors; not checked", ".venv-bench"),
    Way("torchft, process group", "torchft_pg", "peer", "pickled structure, in place; not checked", ".venv-bench"),
    Way(
        "Flower",
        "flower",
        "peer",
        "objects hashed and stored by SuperLink and SuperNode; a process for each message",
        ".venv-bench-flower",
        is_by_request=True,
        has_far=False,
    ),
    Way(
        "hivemind",
        "hivemind_p2p",
        "peer",
        "libp2p with TLS through a daemon at each end; serialized, split into 64 KiB; not compressed",
        ".venv-bench-hivemind",
        is_by_request=True,
    ),
    Way(
        "NVFlare",
        "nvflare_cells",
        "peer",
        "arrays serialized, fetched in chunks through its cells over gRPC; acknowledged",
        ".venv-bench-nvflare",
        is_by_request=True,
    ),
)
"""In the order of the table."""


def chosen(by_request: str) -> list[Way]:
    """The ways to compare.

    Args:
        by_request: Slow peers to add, separated by commas.

    Raises:
        ValueError: there is no such peer.
    """
    wanted = {name.strip() for name in by_request.split(",")} - {""}
    known = [way.request for way in WAYS if way.is_by_request]
    if unknown := sorted(wanted - set(known)):
        raise ValueError(f"--peers {','.join(unknown)}: there is no such peer by request; there are {', '.join(known)}")
    return [way for way in WAYS if not way.is_by_request or way.request in wanted]
