"""Turns a machine's state into what people and metrics see. Reads, never changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoupled_diloco.core.ids import LearnerState, Role, RunPhase
from decoupled_diloco.core.membership import LearnerRecord
from decoupled_diloco.core.status import LearnerStatus, RunStatus

if TYPE_CHECKING:
    from decoupled_diloco.core.syncer import SyncerMachine

INTERVAL_TOLERANCE = 1.1
"""An effective sync interval above this many times its setting is worth a warning."""
NO_SLACK_ROUNDS = 20
"""After this many rounds without slack for the grace window the run says so."""


def run_status(machine: SyncerMachine, now: float) -> RunStatus:
    """The run as a whole."""
    live = machine.membership.live()
    losses = [record.loss for record in live if record.loss is not None]
    lost = sum((now - record.lost_at) for record in machine.membership.with_role() if record.lost and not record.left)
    phase = machine.phase
    if machine.steering.pause_reason is not None and phase is RunPhase.RUNNING:
        phase = RunPhase.PAUSED
    return RunStatus(
        phase=phase,
        reason=_reason(machine, now),
        global_step=machine.global_step,
        total_steps=machine.policy.total_steps,
        rounds_committed_count=machine.rounds.committed_count,
        rounds_abandoned_count=machine.rounds.abandoned_count,
        registered_count=machine.membership.registered_count(),
        live_count=len(live),
        participating_count=machine.participating_count,
        goodput=machine.ledger.figures(lost if phase is not RunPhase.FINISHED else 0.0),
        versions=machine.published(),
        effective_interval_steps=machine.interval_average.get(),
        step_seconds=machine.fastest_step,
        sync_seconds=machine.sync_average.value,
        quorum_seconds=machine.quorum_average.value,
        warnings=_warnings(machine),
        evaluation=dict(machine.evaluation),
        evaluation_global_step=machine.evaluation_global_step,
        loss=sum(losses) / len(losses) if losses else None,
    )


def _reason(machine: SyncerMachine, now: float) -> str:
    if machine.phase in (RunPhase.FINISHING, RunPhase.FINISHED):
        finish, problem = machine.steering.finish_reason or "", machine.steering.storage_problem
        return finish if problem is None else f"{finish}; the syncer cannot write to its store: {problem}"
    if machine.steering.pause_reason is not None:
        return f"paused: {machine.steering.pause_reason}"
    hold = machine.steering.hold(now)
    if hold is not None:
        return hold
    if not machine.membership.live():
        return "waiting for learners to join"
    if machine.phase is RunPhase.INITIALIZING:
        return "waiting for the initial parameters of a learner"
    under_way = machine.rounds.in_order()
    if not under_way:
        return ""
    return f"round {under_way[0].number}: {machine.reason_of(under_way[0], now) or 'just opened'}"


def _warnings(machine: SyncerMachine) -> tuple[str, ...]:
    policy, step, sync = machine.policy, machine.fastest_step, machine.sync_average.value
    effective = machine.interval_average.get()
    warnings = []
    if step and sync and sync > policy.overlap_steps * step:
        warnings.append(
            f"a sync takes {sync / step:.1f} steps, more than tau = {policy.overlap_steps}: raise tau "
            f"(effective H = {effective:.1f})"
        )
    elif effective > INTERVAL_TOLERANCE * policy.interval_steps:
        warnings.append(
            f"fragments are synchronised every {effective:.1f} steps instead of {policy.interval_steps}: the "
            f"{machine.rounds_in_flight_max()} rounds in flight are used up by waiting for a quorum of "
            f"{policy.quorum_minimum}; raise tau, or lower the quorum"
        )
    elif machine.no_slack_rounds >= NO_SLACK_ROUNDS:
        warnings.append(
            f"no slack for the grace window in the last {machine.no_slack_rounds} rounds "
            f"(tau = {policy.overlap_steps} steps are used up by quorum and sync): raise tau "
            f"(effective H = {effective:.1f})"
        )
    live = machine.membership.live()
    if len(live) > 1 and machine.rounds.committed_count and machine.participating_count < 0.5 * len(live):
        warnings.append(f"only {machine.participating_count} of {len(live)} live learners made the newest round")
    return tuple(warnings)


def learner_status(machine: SyncerMachine, record: LearnerRecord, now: float) -> LearnerStatus:
    """One learner or observer."""
    state, reason = record.state(machine.policy, now)
    if record.role is Role.OBSERVER and state is LearnerState.RECOVERING:
        state = LearnerState.LIVE
    progress = record.progress
    return LearnerStatus(
        learner=record.learner,
        incarnation=record.incarnation,
        role=record.role,
        state=state,
        reason=reason,
        attached=record.attached,
        local_step=progress.local_step,
        token_count=progress.token_count,
        step_seconds=progress.step_seconds,
        tokens_per_second=record.tokens_per_second if state is LearnerState.LIVE else 0.0,
        last_seen_seconds=max(0.0, now - record.heard_at),
        slot=record.slot,
        cursor=record.cursor,
        loss=record.loss,
        schedule_step=progress.schedule_step,
        rounds_behind_count=max(0, machine.rounds.newest_closed - record.newest_merged_round),
        rounds_merged_count=sum(record.rounds_merged),
        rounds_merged_by_fragment=tuple(record.rounds_merged),
        network_wait_seconds=progress.network_wait_seconds,
        uploaded_bytes=progress.uploaded_bytes,
        downloaded_bytes=progress.downloaded_bytes,
    )
