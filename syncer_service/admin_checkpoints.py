"""The part of AdminService that keeps the run and takes it back."""

from __future__ import annotations

from typing import Final

from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.v1 import admin_pb2 as apb
from decoupled_diloco.v1.admin_pb2_grpc import AdminServiceServicer
from decoupled_diloco.wire.admin import checkpoint_to_wire
from syncer_service.admin_calls import REASON_CHARACTERS_MAX, Context, page, page_size, page_start, refuse
from syncer_service.checkpoint_files import Manifest
from syncer_service.checkpoints import Checkpoints
from syncer_service.overview import Overview

CHECKPOINTS_PAGE_DEFAULT: Final = 100

log = get_logger(__name__)


class CheckpointAdmin(AdminServiceServicer):
    """Checkpoints and roll-backs.

    Args:
        overview: What can be seen.
        checkpoints: The run's.
    """

    def __init__(self, overview: Overview, checkpoints: Checkpoints) -> None:
        self._overview = overview
        self._checkpoints = checkpoints

    async def CreateCheckpoint(  # noqa: N802
        self, request: apb.CreateCheckpointRequest, context: Context
    ) -> apb.CreateCheckpointResponse:
        """Makes one."""
        reason = request.reason[:REASON_CHARACTERS_MAX]
        log.info("command", call="CreateCheckpoint", caller=context.peer(), reason=reason)
        try:
            manifest = await self._checkpoints.create(request.checkpoint_id, reason)
        except Exception as error:
            await refuse(context, error, "CreateCheckpoint")
        return apb.CreateCheckpointResponse(checkpoint=_to_wire(manifest))

    async def GetCheckpoint(  # noqa: N802
        self, request: apb.GetCheckpointRequest, context: Context
    ) -> apb.GetCheckpointResponse:
        """Looks at one."""
        try:
            manifest = await self._checkpoints.get(request.checkpoint_id)
        except Exception as error:
            await refuse(context, error, "GetCheckpoint")
        return apb.GetCheckpointResponse(checkpoint=_to_wire(manifest))

    async def ListCheckpoints(  # noqa: N802
        self, request: apb.ListCheckpointsRequest, context: Context
    ) -> apb.ListCheckpointsResponse:
        """All of them, newest first."""
        try:
            size = page_size(request.page_size, CHECKPOINTS_PAGE_DEFAULT)
            start = page_start(request.page_token)
            listing = await self._checkpoints.listing()
        except Exception as error:
            await refuse(context, error, "ListCheckpoints")
        found, following = page(listing.found, start, size)
        return apb.ListCheckpointsResponse(
            checkpoints=[_to_wire(manifest) for manifest in found],
            next_page_token=following,
            unreadable=listing.unreadable,
        )

    async def DeleteCheckpoint(  # noqa: N802
        self, request: apb.DeleteCheckpointRequest, context: Context
    ) -> apb.DeleteCheckpointResponse:
        """Removes one."""
        log.info("command", call="DeleteCheckpoint", caller=context.peer(), checkpoint=request.checkpoint_id)
        try:
            await self._checkpoints.delete(request.checkpoint_id)
        except Exception as error:
            await refuse(context, error, "DeleteCheckpoint")
        return apb.DeleteCheckpointResponse()

    async def RollBackRun(  # noqa: N802
        self, request: apb.RollBackRunRequest, context: Context
    ) -> apb.RollBackRunResponse:
        """Takes the run back to one."""
        reason = request.reason[:REASON_CHARACTERS_MAX]
        checkpoint = request.checkpoint_id
        log.warning("command", call="RollBackRun", caller=context.peer(), checkpoint=checkpoint, reason=reason)
        try:
            await self._checkpoints.roll_back(checkpoint, reason)
        except Exception as error:
            await refuse(context, error, "RollBackRun")
        return apb.RollBackRunResponse(run=self._overview.run())


def _to_wire(manifest: Manifest) -> apb.Checkpoint:
    return checkpoint_to_wire(
        manifest.state,
        checkpoint=manifest.id,
        run_id=manifest.run_id,
        created_at=manifest.created_at,
        reason=manifest.reason,
        automatic=manifest.automatic,
        payload_bytes=manifest.byte_count,
        software_version=manifest.software_version,
    )
