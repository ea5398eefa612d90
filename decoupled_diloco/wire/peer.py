"""The calls between learners as messages: what a recovering learner asks for, and the copy that it gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decoupled_diloco.arrays.state_entry import StateEntry
from decoupled_diloco.core.ids import Version
from decoupled_diloco.v1 import fragment_pb2 as fpb
from decoupled_diloco.v1 import peer_pb2 as ppb
from decoupled_diloco.wire.codec import version_from_wire, version_to_wire
from decoupled_diloco.wire.enums import CodecError

ENTRIES_MAX = 20_000
"""Most entries of a part in a request; that many still fit into one message."""


@dataclass(frozen=True, slots=True)
class CopyName:
    """Names one copy of one part at its donor."""

    incarnation: int
    local_step: int


@dataclass(frozen=True, slots=True)
class PartRequest:
    """What a recovering learner asks of a peer: see DownloadOptimizerStateRequest in peer.proto.

    Attributes:
        learner: the caller.
        run_id: its run.
        part: a fragment, or P for the rest.
        schema_digest: of its parameters.
        entries: what its own part consists of.
        version: that it begins with; None: none in particular.
        offset: first byte wanted.
        copy: what an earlier stream was of; None: there was none.
    """

    learner: str
    run_id: str
    part: int
    schema_digest: str
    entries: tuple[StateEntry, ...]
    version: Version | None = None
    offset: int = 0
    copy: CopyName | None = None


@dataclass(frozen=True, slots=True)
class PartHeader:
    """What a donor says of a copy. `version`: of the fragment, when the copy was made."""

    copy: CopyName
    payload_bytes: int
    version: Version | None = None


def part_request_to_wire(request: PartRequest) -> ppb.DownloadOptimizerStateRequest:
    """A request."""
    copy = request.copy or CopyName(0, 0)
    return ppb.DownloadOptimizerStateRequest(
        learner_id=request.learner,
        run_id=request.run_id,
        fragment=request.part,
        version=version_to_wire(request.version) if request.version is not None else None,
        offset=request.offset,
        schema_digest=request.schema_digest,
        entries=[ppb.OptimizerEntry(name=e.name, dtype=e.dtype, shape=e.shape) for e in request.entries],
        copy_incarnation=copy.incarnation,
        copy_step=copy.local_step,
    )


def part_request_from_wire(message: ppb.DownloadOptimizerStateRequest) -> PartRequest:
    """A request.

    Raises:
        CodecError: a number is negative, or there are too many entries.
    """
    for field, value in (("fragment", message.fragment), ("offset", message.offset)):
        if value < 0:
            raise CodecError(f"DownloadOptimizerStateRequest.{field} = {value}: must be at least 0")
    if len(message.entries) > ENTRIES_MAX:
        raise CodecError(
            f"DownloadOptimizerStateRequest.entries holds {len(message.entries)}: at most {ENTRIES_MAX} are allowed"
        )
    copy = CopyName(message.copy_incarnation, message.copy_step)
    return PartRequest(
        learner=message.learner_id,
        run_id=message.run_id,
        part=message.fragment,
        schema_digest=message.schema_digest,
        entries=_entries(message.entries),
        version=version_from_wire(message.version) if message.HasField("version") else None,
        offset=message.offset,
        copy=copy if message.offset else None,
    )


def part_header_to_wire(part: int, header: PartHeader) -> ppb.DownloadOptimizerStateResponse:
    """The first message of a stream."""
    message = ppb.OptimizerStateHeader(
        optimizer_step=header.copy.local_step,
        payload_bytes=header.payload_bytes,
        incarnation=header.copy.incarnation,
    )
    if header.version is not None:
        message.version.CopyFrom(fpb.FragmentVersion(fragment=part, version=version_to_wire(header.version)))
    return ppb.DownloadOptimizerStateResponse(header=message)


def part_header_from_wire(message: ppb.OptimizerStateHeader) -> PartHeader:
    """The first message of a stream."""
    version = version_from_wire(message.version.version) if message.HasField("version") else None
    return PartHeader(CopyName(message.incarnation, message.optimizer_step), message.payload_bytes, version)


def _entries(messages: Iterable[ppb.OptimizerEntry]) -> tuple[StateEntry, ...]:
    return tuple(StateEntry(entry.name, entry.dtype, tuple(entry.shape)) for entry in messages)
