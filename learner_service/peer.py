"""PeerService: what other learners may ask of this one. Part of the protocol, not of this release."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import grpc.aio

from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime.channel import SERVER_OPTIONS
from decoupled_diloco.runtime.ports import Address, listen_error
from decoupled_diloco.v1 import peer_pb2
from decoupled_diloco.v1.peer_pb2_grpc import PeerServiceServicer, add_PeerServiceServicer_to_server
from decoupled_diloco.wire import status


class PeerServicer(PeerServiceServicer):
    """Answers that a recovering learner has to do with fresh optimizer state."""

    async def DownloadOptimizerState(  # noqa: N802
        self, request: peer_pb2.DownloadOptimizerStateRequest, context: Any
    ) -> None:
        """Refuses; the reason tells the caller to go on without."""
        text = "this release does not serve optimizer state; the caller starts with fresh state and warms up"
        await status.abort(context, PeerError(Reason.UNIMPLEMENTED, text))


async def start_peer_server(
    address: Address, credentials: grpc.ServerCredentials | None, setting: str
) -> grpc.aio.Server:
    """Serves PeerService in the running event loop.

    Args:
        address: where; port 0 takes any free one.
        credentials: of this end; None for plaintext, which the settings must have allowed.
        setting: name of the setting with the address, for the message.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    _try_port(address, setting)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_PeerServiceServicer_to_server(PeerServicer(), server)
    try:
        if credentials is None:
            server.add_insecure_port(str(address))
        else:
            server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        raise listen_error(address, setting, error) from error
    await server.start()
    return server


def _try_port(address: Address, setting: str) -> None:
    """Listens for a moment, because the system says why that fails and gRPC does not."""
    if address.port == 0:
        return
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise listen_error(address, setting, error) from error
