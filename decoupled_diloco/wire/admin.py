"""The run, its learners and its rounds as messages of AdminService, and any message as plain values for JSON.

The status page and `syncerctl --json` show the same plain form: field names as in admin.proto, with seconds instead
of Durations (`step_duration` becomes `step_seconds`), names instead of numbers of enumerations, and null for what is
absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.status import GoodputFigures, LearnerStatus, RoundStatus, RunStatus
from decoupled_diloco.v1 import admin_pb2 as apb
from decoupled_diloco.wire.codec import duration_from_wire, duration_to_wire, fragment_version_to_wire, version_to_wire
from decoupled_diloco.wire.enums import role_to_wire

_PHASES: Final[dict[RunPhase, apb.RunPhase]] = {phase: getattr(apb, f"RUN_PHASE_{phase.name}") for phase in RunPhase}

RunMessage = apb.Run
LearnerMessage = apb.Learner
RoundMessage = apb.Round

Plain = dict[str, object]


def run_to_wire(
    status: RunStatus,
    *,
    run_id: str,
    uptime_seconds: float,
    config_values: Mapping[str, str],
    value_counts: tuple[int, ...],
) -> apb.Run:
    """The run as a whole.

    Args:
        status: What the machine shows.
        run_id: The run.
        uptime_seconds: Time since the syncer started.
        config_values: The run file by dotted name.
        value_counts: Values of each fragment; empty before the run has a model.
    """
    return apb.Run(
        run_id=run_id,
        phase=_PHASES[status.phase],
        # The phase is beside it.
        reason=status.reason.removeprefix(f"{status.phase.value}: "),
        global_step=status.global_step,
        total_steps=status.total_steps,
        rounds_committed_count=status.rounds_committed_count,
        rounds_abandoned_count=status.rounds_abandoned_count,
        learners_registered_count=status.registered_count,
        learners_live_count=status.live_count,
        learners_participating_count=status.participating_count,
        goodput=_goodput_to_wire(status.goodput),
        fragments=[
            fragment_version_to_wire(
                fragment, version, step, value_counts[fragment] if fragment < len(value_counts) else 0
            )
            for fragment, version, step in status.versions
        ],
        effective_interval_steps=status.effective_interval_steps,
        warnings=status.warnings,
        evaluation=status.evaluation,
        evaluation_global_step=status.evaluation_global_step,
        loss=status.loss,
        uptime_duration=duration_to_wire(uptime_seconds),
        config_values=config_values,
    )


def _goodput_to_wire(figures: GoodputFigures) -> apb.GoodputFigures:
    return apb.GoodputFigures(
        goodput=figures.goodput,
        token_goodput=figures.token_goodput,
        participation=figures.participation,
        uptime=figures.uptime,
        tokens_processed=figures.tokens_processed,
        tokens_merged=figures.tokens_merged,
        tokens_discarded=figures.tokens_discarded,
        steps_redone=figures.steps_redone,
        activity_seconds=figures.activity_seconds,
    )


def learner_to_wire(status: LearnerStatus) -> apb.Learner:
    """One learner or observer."""
    message = apb.Learner(
        learner_id=status.learner,
        incarnation=status.incarnation,
        state=status.state.value,
        local_step=status.local_step,
        token_count=status.token_count,
        last_seen_duration=duration_to_wire(status.last_seen_seconds),
        slot=status.slot,
        cursor=status.cursor,
        loss=status.loss,
        rounds_behind_count=status.rounds_behind_count,
        rounds_merged_count=status.rounds_merged_count,
        uploaded_bytes=status.uploaded_bytes,
        downloaded_bytes=status.downloaded_bytes,
        reason=status.reason,
        role=role_to_wire(status.role),
        tokens_per_second=status.tokens_per_second,
        schedule_step=status.schedule_step,
        rounds_merged_by_fragment=status.rounds_merged_by_fragment,
        network_wait_duration=duration_to_wire(status.network_wait_seconds),
    )
    if status.step_seconds is not None:
        message.step_duration.CopyFrom(duration_to_wire(status.step_seconds))
    return message


def round_to_wire(status: RoundStatus) -> apb.Round:
    """One round."""
    message = apb.Round(
        round=status.round,
        fragment=status.fragment,
        global_step=status.global_step,
        state=status.state.value,
        reason=status.reason,
        members=[
            apb.RoundMember(
                learner_id=member.learner,
                weight_share=member.weight_share,
                token_count=member.token_count,
                step_count=member.step_count,
            )
            for member in status.members
        ],
        absentees=[apb.RoundAbsentee(learner_id=learner, reason=reason) for learner, reason in status.absentees],
        quorum_duration=duration_to_wire(status.quorum_seconds),
        grace_duration=duration_to_wire(status.grace_seconds),
        last_call_duration=duration_to_wire(status.last_call_seconds),
        merge_duration=duration_to_wire(status.merge_seconds),
        commit_duration=duration_to_wire(status.commit_seconds),
        rda_over_avg=status.rda_over_avg,
    )
    if status.version is not None:
        message.version.CopyFrom(version_to_wire(status.version))
    return message


def checkpoint_to_wire(
    state: RunState,
    *,
    checkpoint: str,
    run_id: str,
    created_at: str,
    reason: str,
    automatic: bool,
    payload_bytes: int,
    software_version: str,
) -> apb.Checkpoint:
    """A checkpoint of a run's state."""
    return apb.Checkpoint(
        checkpoint_id=checkpoint,
        run_id=run_id,
        created_at=created_at,
        reason=reason,
        automatic=automatic,
        global_step=state.global_step,
        timeline=state.timeline,
        rounds_committed_count=state.committed_count,
        payload_bytes=payload_bytes,
        software_version=software_version,
        versions=[version_to_wire(version) for version in state.versions],
    )


def plain(message: Message) -> Plain:
    """Any message as values that `json` can write; every field is there."""
    return {_plain_name(field): _plain_field(message, field) for field in message.DESCRIPTOR.fields}


def _plain_name(field: Any) -> str:
    if field.message_type is not None and field.message_type.full_name == Duration.DESCRIPTOR.full_name:
        return str(field.name).removesuffix("_duration") + "_seconds"
    return str(field.name)


def _plain_field(message: Message, field: Any) -> object:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [_plain_value(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _plain_value(field, value)


def _plain_value(field: Any, value: object) -> object:
    if isinstance(value, Duration):
        return duration_from_wire(value)
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no form for it
    if field.enum_type is not None:
        # RUN_PHASE_RUNNING of enum RunPhase -> "running"
        names = field.enum_type.values_by_number
        prefix = _common_prefix(tuple(item.name for item in names.values()))
        known = names.get(value)
        return known.name.removeprefix(prefix).lower() if known is not None else value
    return value


def _common_prefix(names: tuple[str, ...]) -> str:
    """The part up to the last underscore that all names share."""
    first, last = min(names), max(names)
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return first[: first.rfind("_", 0, shared) + 1]
