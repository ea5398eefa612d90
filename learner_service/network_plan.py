"""What the network thread of a learner is built from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.fragments import Fragmentation
from decoupled_diloco.runtime.channel import Channels, open_channel
from decoupled_diloco.runtime.ports import Address, parse_address
from decoupled_diloco.runtime.rate_limit import RateLimit, TransferLimits, read_ahead_bytes
from decoupled_diloco.runtime.tls import TlsFiles, channel_credentials, server_credentials
from learner_service.config import LearnerSettings
from learner_service.optimizer_snapshot import snapshot_path
from learner_service.syncer_client import JoinRequest


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """How learners help each other to recover.

    Attributes:
        listen: where this one serves others; None: nowhere.
        advertise: where they are told to reach it; empty: `listen`.
        credentials: of the serving end; None for plaintext, which the settings must have allowed.
        dial: opens a connection to a peer; ValueError for an address that must not be dialled.
        recovery_seconds_max: peers have this long in all; 0: they are not asked.
        snapshot_path: the file that the optimizer's state is kept in; None: none.
        snapshot_seconds: time between two snapshots.
        limits: shared with the transfers to and from the syncer.
    """

    listen: Address | None
    advertise: str
    credentials: grpc.ServerCredentials | None
    dial: Callable[[str], grpc.aio.Channel]
    recovery_seconds_max: float
    snapshot_path: Path | None
    snapshot_seconds: float
    limits: TransferLimits

    @property
    def serves(self) -> bool:
        """Whether the optimizer's state will be copied, for peers or for a snapshot."""
        return self.listen is not None or self.snapshot_path is not None


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """What the network thread is built from.

    Attributes:
        addresses: where the syncer may be.
        open_channels: opens the connections to an address, in the running event loop.
        join: what to join with.
        fragmentation: of the learner's schema.
        device: where versions are staged.
        max_detached_seconds: the learner pauses after this long without the syncer; 0: never.
        error_feedback: what an encoding drops of a merged contribution goes with the next one.
        drain_seconds: a learner that was told to leave does so after this long at the latest.
        limits: how fast bytes may move.
        peers: how learners help each other.
    """

    addresses: Sequence[Address]
    open_channels: Callable[[Address], Channels]
    join: JoinRequest
    fragmentation: Fragmentation
    device: DeviceFragments
    max_detached_seconds: float
    error_feedback: bool
    drain_seconds: float
    limits: TransferLimits
    peers: PeerPlan


def limits_of(settings: LearnerSettings) -> TransferLimits:
    """The rate limits of a learner with these settings, to be shared by all that it moves."""
    return TransferLimits(
        RateLimit(settings.upload_bytes_per_second_max), RateLimit(settings.download_bytes_per_second_max)
    )


def peer_plan_of(settings: LearnerSettings, limits: TransferLimits) -> PeerPlan:
    """How a learner with these settings helps others and is helped, within its rate limits.

    Raises:
        ConfigError: the TLS files cannot be used.
    """
    files = settings.tls_files("learner")
    read_ahead = read_ahead_bytes(settings.download_bytes_per_second_max)
    credentials = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        credentials = server_credentials(TlsFiles(settings.tls_certificate, settings.tls_key, section="learner"))

    def dial(text: str) -> grpc.aio.Channel:
        address = parse_address(text)
        if files is None and not settings.insecure and not address.is_loopback:
            raise ValueError("it is not on this machine, and there is no TLS here (tls_ca) nor leave to do without it")
        # Each learner has a certificate of its own name: the setting for the syncer's says nothing of them.
        credentials = channel_credentials(files) if files is not None else None
        return open_channel(address, credentials, read_ahead_bytes=read_ahead)

    folder = settings.snapshot_dir
    return PeerPlan(
        listen=parse_address(settings.peer_listen) if settings.peer_listen else None,
        advertise=settings.peer_advertise,
        credentials=credentials,
        dial=dial,
        recovery_seconds_max=settings.peer_recovery_seconds,
        snapshot_path=snapshot_path(folder, settings.learner_id) if folder is not None else None,
        snapshot_seconds=settings.snapshot_seconds,
        limits=limits,
    )
