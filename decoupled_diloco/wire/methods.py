"""SyncerService and PeerService with this project's serializers: stubs for callers, registrations for servers.

The generated ones work as well, on either end; these skip the copies of the generated classes for chunks
(see `stream`). Parts of a stream are `ChunkPart` or the generated message when received, and the generated
message or ready bytes when sent.
"""

from __future__ import annotations

from typing import Any

import grpc

from decoupled_diloco.v1 import admin_pb2 as apb
from decoupled_diloco.v1 import peer_pb2 as ppb
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.v1.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server
from decoupled_diloco.v1.peer_pb2_grpc import PeerServiceServicer, PeerServiceStub
from decoupled_diloco.v1.syncer_pb2_grpc import SyncerServiceServicer, SyncerServiceStub
from decoupled_diloco.wire.stream import part_parser, part_serializer

ADMIN_SERVICE = apb.DESCRIPTOR.services_by_name["AdminService"].full_name
PEER_SERVICE = ppb.DESCRIPTOR.services_by_name["PeerService"].full_name
SYNCER_SERVICE = spb.DESCRIPTOR.services_by_name["SyncerService"].full_name


class SyncerStub(SyncerServiceStub):
    """A caller of SyncerService, for `grpc` and `grpc.aio` channels."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)  # type: ignore[no-untyped-call]
        self.UploadContribution = channel.stream_stream(
            f"/{SYNCER_SERVICE}/UploadContribution",
            request_serializer=part_serializer,
            response_deserializer=spb.UploadContributionResponse.FromString,
            _registered_method=True,
        )
        self.UploadInitialFragment = channel.stream_unary(
            f"/{SYNCER_SERVICE}/UploadInitialFragment",
            request_serializer=part_serializer,
            response_deserializer=spb.UploadInitialFragmentResponse.FromString,
            _registered_method=True,
        )
        self.DownloadFragment = channel.unary_stream(
            f"/{SYNCER_SERVICE}/DownloadFragment",
            request_serializer=spb.DownloadFragmentRequest.SerializeToString,
            response_deserializer=part_parser(spb.DownloadFragmentResponse),
            _registered_method=True,
        )


def add_syncer_service(servicer: SyncerServiceServicer, server: Any) -> None:
    """Registers a servicer with a server of `grpc` or `grpc.aio`."""
    handlers = {
        "JoinRun": grpc.unary_unary_rpc_method_handler(
            servicer.JoinRun,
            request_deserializer=spb.JoinRunRequest.FromString,
            response_serializer=spb.JoinRunResponse.SerializeToString,
        ),
        "Attach": grpc.stream_stream_rpc_method_handler(
            servicer.Attach,
            request_deserializer=spb.AttachRequest.FromString,
            response_serializer=spb.AttachResponse.SerializeToString,
        ),
        "UploadContribution": grpc.stream_stream_rpc_method_handler(
            servicer.UploadContribution,
            request_deserializer=part_parser(spb.UploadContributionRequest),
            response_serializer=spb.UploadContributionResponse.SerializeToString,
        ),
        "DownloadFragment": grpc.unary_stream_rpc_method_handler(
            servicer.DownloadFragment,
            request_deserializer=spb.DownloadFragmentRequest.FromString,
            response_serializer=part_serializer,
        ),
        "UploadInitialFragment": grpc.stream_unary_rpc_method_handler(
            servicer.UploadInitialFragment,
            request_deserializer=part_parser(spb.UploadInitialFragmentRequest),
            response_serializer=spb.UploadInitialFragmentResponse.SerializeToString,
        ),
        "LeaveRun": grpc.unary_unary_rpc_method_handler(
            servicer.LeaveRun,
            request_deserializer=spb.LeaveRunRequest.FromString,
            response_serializer=spb.LeaveRunResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SYNCER_SERVICE, handlers),))
    server.add_registered_method_handlers(SYNCER_SERVICE, handlers)


class PeerStub(PeerServiceStub):
    """A caller of PeerService, for `grpc` and `grpc.aio` channels."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)  # type: ignore[no-untyped-call]
        self.DownloadOptimizerState = channel.unary_stream(
            f"/{PEER_SERVICE}/DownloadOptimizerState",
            request_serializer=ppb.DownloadOptimizerStateRequest.SerializeToString,
            response_deserializer=part_parser(ppb.DownloadOptimizerStateResponse),
            _registered_method=True,
        )


def add_peer_service(servicer: PeerServiceServicer, server: Any) -> None:
    """Registers a servicer of PeerService with a server of `grpc` or `grpc.aio`."""
    handlers = {
        "DownloadOptimizerState": grpc.unary_stream_rpc_method_handler(
            servicer.DownloadOptimizerState,
            request_deserializer=ppb.DownloadOptimizerStateRequest.FromString,
            response_serializer=part_serializer,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PEER_SERVICE, handlers),))
    server.add_registered_method_handlers(PEER_SERVICE, handlers)


def add_admin_service(servicer: AdminServiceServicer, server: Any) -> None:
    """Registers a servicer of AdminService; small messages only, so the generated serializers do."""
    add_AdminServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
