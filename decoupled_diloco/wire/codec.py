"""Core types to and from messages: values and headers. Enumerations are in `enums`, Attach in `control`.

`x_to_wire` never fails; `x_from_wire` raises `CodecError` for what a peer should not have sent. Seconds are
floats on this side and Durations on the wire.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from decoupled_diloco.arrays.schema import Schema, SchemaError, TensorSpec
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Deadlines, Policy
from decoupled_diloco.v1 import fragment_pb2 as fpb
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire.enums import (
    CodecError,
    activity_from_wire,
    activity_to_wire,
    encoding_from_wire,
    encoding_to_wire,
    merge_rule_from_wire,
    merge_rule_to_wire,
)

PROTOCOL_VERSION: Final = 1
"""The protocol version that this release speaks."""


# --- values ---


def duration_to_wire(seconds: float) -> Duration:
    """A Duration, rounded to nanoseconds."""
    nanos = round(seconds * 1e9)
    return Duration(seconds=nanos // 10**9, nanos=nanos % 10**9)


def duration_from_wire(duration: Duration) -> float:
    """Seconds."""
    return duration.seconds + duration.nanos / 1e9


def version_to_wire(version: Version) -> fpb.Version:
    """A version with its digest."""
    return fpb.Version(timeline=version.timeline, number=version.number, digest=version.digest)


def version_from_wire(message: fpb.Version) -> Version:
    """A version with its digest."""
    return Version(message.timeline, message.number, message.digest)


def fragment_version_to_wire(
    fragment: int, version: Version, global_step: int, value_count: int
) -> fpb.FragmentVersion:
    """A published version."""
    return fpb.FragmentVersion(
        fragment=fragment, version=version_to_wire(version), global_step=global_step, value_count=value_count
    )


def fragment_version_from_wire(message: fpb.FragmentVersion) -> lev.Published:
    """A published version, as a learner's machine takes it."""
    return lev.Published(message.fragment, version_from_wire(message.version), message.global_step)


def schema_to_wire(schema: Schema) -> fpb.Schema:
    """All tensors and the digest."""
    tensors = (
        fpb.TensorSpec(
            name=spec.name,
            shape=spec.shape,
            dtype=spec.dtype,
            rule=merge_rule_to_wire(spec.rule),
            stack_axis=spec.stack_axis,
        )
        for spec in schema.tensors
    )
    return fpb.Schema(tensors=tensors, digest=schema.digest)


def schema_from_wire(message: fpb.Schema) -> Schema:
    """The schema.

    Raises:
        CodecError: The tensors are not usable, or the digest is not theirs.
    """
    try:
        schema = Schema(
            TensorSpec.from_dict(
                {
                    "name": spec.name,
                    "shape": tuple(spec.shape),
                    "dtype": spec.dtype or "float32",
                    "rule": merge_rule_from_wire(spec.rule, f"schema.tensors[{spec.name}].rule"),
                    "stack_axis": spec.stack_axis if spec.HasField("stack_axis") else None,
                }
            )
            for spec in message.tensors
        )
    except SchemaError as error:
        raise CodecError(f"schema: {error}") from error
    if schema.digest != message.digest:
        raise CodecError(
            f"schema.digest = {message.digest!r}: the tensors that came with it have {schema.digest!r}; "
            "the two ends disagree about the canonical form, so run the same release on both"
        )
    return schema


def deadlines_to_wire(deadlines: Deadlines) -> spb.DeadlineTable:
    """What a learner needs of the table of deadlines."""
    return spb.DeadlineTable(
        heartbeat_duration=duration_to_wire(deadlines.heartbeat_seconds),
        lease_duration=duration_to_wire(deadlines.lease_seconds),
        upload_idle_duration=duration_to_wire(deadlines.upload_idle_seconds),
        upload_minimum_duration=duration_to_wire(deadlines.upload_seconds_min),
        initial_parameters_duration=duration_to_wire(deadlines.initial_parameters_seconds),
        drain_duration=duration_to_wire(deadlines.drain_seconds_max),
        rpc_duration=duration_to_wire(deadlines.rpc_seconds),
        attach_idle_duration=duration_to_wire(deadlines.attach_idle_seconds),
    )


def deadlines_from_wire(message: spb.DeadlineTable) -> Deadlines:
    """The table as the syncer handed it out; what it does not hand out has its default."""
    return Deadlines(
        heartbeat_seconds=duration_from_wire(message.heartbeat_duration),
        lease_seconds=duration_from_wire(message.lease_duration),
        upload_idle_seconds=duration_from_wire(message.upload_idle_duration),
        upload_seconds_min=duration_from_wire(message.upload_minimum_duration),
        initial_parameters_seconds=duration_from_wire(message.initial_parameters_duration),
        drain_seconds_max=duration_from_wire(message.drain_duration),
        rpc_seconds=duration_from_wire(message.rpc_duration),
        attach_idle_seconds=duration_from_wire(message.attach_idle_duration),
    )


def peers_to_wire(peers: Iterable[tuple[str, str]]) -> list[spb.Peer]:
    """Learners that can be reached: id and address, in this order."""
    return [spb.Peer(learner_id=learner, address=address) for learner, address in peers]


def peers_from_wire(messages: Iterable[spb.Peer]) -> tuple[tuple[str, str], ...]:
    """Learners that can be reached: id and address, in this order."""
    return tuple((peer.learner_id, peer.address) for peer in messages)


def policy_to_wire(policy: Policy) -> spb.LearnerPolicy:
    """What a learner acts by."""
    return spb.LearnerPolicy(
        fragment_count=policy.fragment_count,
        interval_steps=policy.interval_steps,
        overlap_steps=policy.overlap_steps,
        total_steps=policy.total_steps,
        upload_encoding=encoding_to_wire(policy.upload_encoding),
        last_call=policy.last_call,
        barrier=policy.barrier,
    )


def policy_from_wire(message: spb.LearnerPolicy, base: Policy) -> Policy:
    """`base` (from the learner's own run file) with the values that the syncer has in force.

    Raises:
        CodecError: An encoding that this release does not know.
    """
    return base.changed(
        fragment_count=message.fragment_count,
        interval_steps=message.interval_steps,
        overlap_steps=message.overlap_steps,
        total_steps=message.total_steps,
        upload_encoding=encoding_from_wire(message.upload_encoding, "policy.upload_encoding"),
        last_call=message.last_call,
        barrier=message.barrier,
    )


# --- learner to syncer ---


def progress_to_wire(progress: ev.Progress) -> spb.Progress:
    """A report."""
    message = spb.Progress(
        local_step=progress.local_step,
        token_count=progress.token_count,
        activity=activity_to_wire(progress.activity),
        spans=[
            spb.ActivitySpan(activity=activity_to_wire(activity), duration=duration_to_wire(seconds))
            for activity, seconds in progress.spans
        ],
        loss=progress.loss,
        schedule_step=progress.schedule_step,
        network_wait_duration=duration_to_wire(progress.network_wait_seconds),
        uploaded_bytes=progress.uploaded_bytes,
        downloaded_bytes=progress.downloaded_bytes,
    )
    if progress.step_seconds is not None:
        message.step_duration.CopyFrom(duration_to_wire(progress.step_seconds))
    if progress.running_step_seconds is not None:
        message.running_step_duration.CopyFrom(duration_to_wire(progress.running_step_seconds))
    return message


def progress_from_wire(message: spb.Progress) -> ev.Progress:
    """A report.

    Raises:
        CodecError: A count or a duration is negative, or an activity unknown.
    """
    _not_negative(message, "local_step", "token_count", "schedule_step", "uploaded_bytes", "downloaded_bytes")
    loss = message.loss if message.HasField("loss") and math.isfinite(message.loss) else None
    return ev.Progress(
        local_step=message.local_step,
        token_count=message.token_count,
        activity=activity_from_wire(message.activity),
        step_seconds=_optional_seconds(message, "step_duration"),
        running_step_seconds=_optional_seconds(message, "running_step_duration"),
        spans=tuple(
            (activity_from_wire(span.activity), max(0.0, duration_from_wire(span.duration))) for span in message.spans
        ),
        loss=loss,
        schedule_step=message.schedule_step,
        network_wait_seconds=max(0.0, duration_from_wire(message.network_wait_duration)),
        uploaded_bytes=message.uploaded_bytes,
        downloaded_bytes=message.downloaded_bytes,
    )


def contribution_header_to_wire(
    header: ev.ContributionHeader, encoding: str, schema_digest: str, resume: bool
) -> spb.ContributionHeader:
    """The header of an upload."""
    return spb.ContributionHeader(
        learner_id=header.learner,
        incarnation=header.incarnation,
        round=header.round,
        fragment=header.fragment,
        base=version_to_wire(header.base),
        local_step=header.local_step,
        token_count=header.total_token_count,
        step_count_since_base=header.step_count,
        token_count_since_base=header.token_count,
        cursor=header.cursor,
        encoding=encoding_to_wire(encoding),
        payload_bytes=header.payload_bytes,
        schema_digest=schema_digest,
        resume=resume,
    )


def contribution_header_from_wire(message: spb.ContributionHeader, schema_digest: str) -> ev.ContributionHeader:
    """The header of an upload to a run of the given schema.

    Raises:
        CodecError: A count is negative.
    """
    counts = (
        "local_step",
        "token_count",
        "step_count_since_base",
        "token_count_since_base",
        "cursor",
        "payload_bytes",
    )
    _not_negative(message, "round", "fragment", *counts)
    return ev.ContributionHeader(
        learner=message.learner_id,
        incarnation=message.incarnation,
        round=message.round,
        fragment=message.fragment,
        base=version_from_wire(message.base),
        local_step=message.local_step,
        total_token_count=message.token_count,
        step_count=message.step_count_since_base,
        token_count=message.token_count_since_base,
        cursor=message.cursor,
        payload_bytes=message.payload_bytes,
        schema_matches=message.schema_digest == schema_digest,
    )


def _not_negative(message: Message, *fields: str) -> None:
    for field in fields:
        if (value := getattr(message, field)) < 0:
            raise CodecError(f"{message.DESCRIPTOR.name}.{field} = {value}: must be at least 0")


def _optional_seconds(message: Message, field: str) -> float | None:
    """Seconds of a Duration that may be absent.

    Raises:
        CodecError: It is negative.
    """
    if not message.HasField(field):
        return None
    seconds = duration_from_wire(getattr(message, field))
    if seconds < 0:
        raise CodecError(f"{message.DESCRIPTOR.name}.{field} = {seconds} s: must be at least 0")
    return seconds
