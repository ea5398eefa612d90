"""From a machine to its `RunState` and back: restarts, and going on from an older version.

A restart keeps versions, incarnations and accounts; what learners are in the middle of is asked for again. When
committed versions are lost (roll-back, damage, a mirror that lags) the run goes on in a *new timeline*: every fragment
gets a version name that was never used, and every incarnation has to join again, so that nothing based on what is lost
can be merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from decoupled_diloco.core import commits
from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.events import Progress
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.ids import Activity, Role, RunPhase, Version
from decoupled_diloco.core.membership import LearnerRecord, Membership
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.round import Round
from decoupled_diloco.core.rounds import Rounds
from decoupled_diloco.core.run_state import Averages, LearnerAccount, OpenRound, Reservation, RunState

if TYPE_CHECKING:
    from decoupled_diloco.core.syncer import SyncerMachine

INCARNATIONS_SKIPPED = 1000
"""In a new timeline incarnations are numbered from this far on: those handed out since what is restored was written
down are not known, and must not be handed out twice."""
INCARNATIONS_SKIPPED_BY_COPY = 1_000_000
TIMELINES_SKIPPED_BY_COPY = 1000
"""The same where a copy stands in for a volume: that one may have opened new timelines itself, unknown to the copy."""

ATTACH_STALLS = 2
"""After a restart no round leaves OPEN for so many times the deadline of a stall, or until everybody who was live has
attached again: who comes back a second later than the others would lose all steps that it made meanwhile."""


def run_state(machine: SyncerMachine) -> RunState:
    """What must survive of a machine, now."""
    rounds, membership = machine.rounds, machine.membership
    return RunState(
        phase=machine.phase,
        timeline=machine.timeline,
        global_step=machine.global_step,
        versions=tuple(machine.versions),
        version_steps=tuple(machine.version_steps),
        newest_opened=rounds.newest_opened,
        newest_closed=rounds.newest_closed,
        newest_closed_step=rounds.newest_closed_step,
        round_offset=rounds.offset,
        committed_count=rounds.committed_count,
        abandoned_count=rounds.abandoned_count,
        open_rounds=tuple(OpenRound(r.number, r.fragment, r.global_step, r.final) for r in rounds.in_order()),
        newest_incarnation=membership.newest_incarnation,
        learners=tuple(_account(record) for record in membership.everybody()),
        slot_cursors=dict(membership.slot_cursors),
        ledger=machine.ledger.copy(),
        reservations=tuple(_reservations(rounds)),
        newest_results=tuple(dict(results) for results in machine.newest_results),
        averages=Averages(
            machine.quorum_average.value,
            machine.sync_average.value,
            machine.download_average.value,
            machine.interval_average.value,
            tuple(average.value for average in machine.norm_averages),
        ),
        slot_reached=dict(membership.slot_reached),
        evicted=dict(membership.evicted),
        participating_count=machine.participating_count,
        pause_reason=machine.steering.pause_reason,
        finish_reason=machine.steering.finish_reason,
        evaluation=dict(machine.evaluation),
        evaluation_global_step=machine.evaluation_global_step,
    )


def _account(record: LearnerRecord) -> LearnerAccount:
    return LearnerAccount(
        learner=record.learner,
        incarnation=record.incarnation,
        role=record.role,
        slot=record.slot,
        cursor=record.cursor,
        local_step=record.progress.local_step,
        seen_token_count=record.seen_token_count,
        accounted_tokens=tuple(record.accounted_tokens),
        rounds_merged=tuple(record.rounds_merged),
        newest_merged_round=record.newest_merged_round,
        step_seconds=record.step_seconds(),
        upload_seconds=tuple(record.upload_seconds),
        peer_address=record.peer_address,
        software_version=record.software_version,
        lost=record.lost,
        left=record.left,
        left_reason=record.left_reason,
        draining=record.draining,
        drain_reason=record.drain_reason,
        must_join_again=record.must_join_again,
        first_cursor=record.first_cursor,
    )


def _reservations(rounds: Rounds) -> Iterable[Reservation]:
    for item in rounds.in_order():
        for answer in item.answers.values():
            if answer.reserved_token_count:
                yield Reservation(
                    item.number, item.fragment, answer.learner, answer.reserved_token_count, answer.reserved_cause
                )


def load(machine: SyncerMachine, state: RunState, now: float) -> None:
    """Puts a state in place of a machine's; rounds that were open are open again and empty."""
    machine.phase = state.phase
    machine.timeline = state.timeline
    machine.global_step = state.global_step
    machine.versions = list(state.versions)
    machine.version_steps = list(state.version_steps)
    machine.ledger = state.ledger.copy()
    count = machine.policy.fragment_count
    machine.newest_results = [dict(results) for results in state.newest_results] or [{} for _ in range(count)]
    machine.participating_count = state.participating_count
    machine.steering.pause_reason, machine.steering.finish_reason = state.pause_reason, state.finish_reason
    finishing = state.phase is RunPhase.FINISHING
    machine.steering.finish_until = now + machine.policy.deadlines.drain_seconds_max if finishing else math.inf
    machine.evaluation = dict(state.evaluation)
    machine.evaluation_global_step = state.evaluation_global_step
    machine.quorum_average.value = state.averages.quorum_seconds
    machine.sync_average.value = state.averages.sync_seconds
    machine.download_average.value = state.averages.download_seconds
    machine.interval_average.value = state.averages.interval_steps
    for average, value in zip(machine.norm_averages, state.averages.norms, strict=False):
        average.value = value
    _load_membership(machine.membership, state, now)
    _load_rounds(machine, state, now)
    machine.presence.touch()


def _load_membership(membership: Membership, state: RunState, now: float) -> None:
    membership.newest_incarnation = state.newest_incarnation
    membership.slot_cursors = dict(state.slot_cursors)
    membership.slot_reached = dict(state.slot_reached)
    membership.evicted = dict(state.evicted)
    membership.put([_record(account, now) for account in state.learners])


def _record(account: LearnerAccount, now: float) -> LearnerRecord:
    """A learner as it stands after a restart: nobody has been silent, nobody is attached."""
    record = LearnerRecord(account.learner, account.incarnation, account.role, account.slot, now, account.cursor)
    record.progress = Progress(
        account.local_step, account.seen_token_count, Activity.RECOVER, step_seconds=account.step_seconds
    )
    record.progress_at = now
    record.first_cursor = account.first_cursor
    record.seen_token_count = account.seen_token_count
    record.accounted_tokens = list(account.accounted_tokens)
    record.rounds_merged = list(account.rounds_merged)
    record.newest_merged_round = account.newest_merged_round
    record.upload_seconds = list(account.upload_seconds)
    record.peer_address, record.software_version = account.peer_address, account.software_version
    record.awaited = account.role is Role.LEARNER
    record.lost, record.lost_at = account.lost or bool(account.must_join_again), now
    record.left, record.left_reason = account.left, account.left_reason
    record.draining, record.drain_reason = account.draining, account.drain_reason
    record.must_join_again = account.must_join_again
    return record


def _load_rounds(machine: SyncerMachine, state: RunState, now: float) -> None:
    """Closed rounds that can be listed stay in the memory of a machine that rolls back."""
    rounds = machine.rounds
    rounds.offset = state.round_offset
    rounds.newest_opened = state.newest_opened
    rounds.newest_closed, rounds.newest_closed_step = state.newest_closed, state.newest_closed_step
    rounds.committed_count, rounds.abandoned_count = state.committed_count, state.abandoned_count
    rounds.pace_target, rounds.pace_step = None, -1
    rounds.fates.clear()
    rounds.under_way = {
        r.number: Round(r.number, r.fragment, machine.versions[r.fragment], r.global_step, now, r.final)
        for r in state.open_rounds
    }


def restore(machine: SyncerMachine, state: RunState, newer: Iterable[CommitRound], now: float) -> None:
    """Restarts: a state, and the durable rounds that it counts as open or does not know.

    Args:
        machine: A new one.
        state: The newest that was written down.
        newer: Committed rounds, in the order of their commits; those that the state knows are left out.
        now: The instant.
    """
    load(machine, state, now)
    machine.steering.attach_until = now + ATTACH_STALLS * machine.policy.deadlines.stall_seconds
    reserved = {(r.round, r.learner): r for r in state.reservations}
    for commit in newer:
        if commit.version <= machine.versions[commit.fragment]:
            continue
        booked = {
            c.learner: reserved.pop((commit.round, c.learner)).token_count
            for c in commit.contributions
            if (commit.round, c.learner) in reserved
        }
        commits.book(machine, commit, booked)
        _close(machine.rounds, commit)
    for reservation in reserved.values():
        machine.ledger.discard(reservation.fragment, reservation.token_count, reservation.cause)
    for item in machine.rounds.under_way.values():
        item.base = machine.versions[item.fragment]


def _close(rounds: Rounds, commit: CommitRound) -> None:
    rounds.under_way.pop(commit.round, None)
    rounds.newest_opened = max(rounds.newest_opened, commit.round)
    rounds.committed_count += 1
    if commit.round > rounds.newest_closed:
        rounds.newest_closed, rounds.newest_closed_step = commit.round, commit.global_step


def without(state: RunState, lost: Iterable[CommitRound], intact: tuple[tuple[Version, int], ...]) -> RunState:
    """A state as if the newest versions of some fragments had never been committed: their payloads are damaged.

    Args:
        state: The newest state.
        lost: The rounds that had committed them.
        intact: Per fragment: the newest version that is whole, and the global steps made when its round was due.
    """
    merged = list(state.ledger.merged_tokens)
    for commit in lost:
        merged[commit.fragment] -= sum(contribution.token_count for contribution in commit.contributions)
    ledger = state.ledger.copy()
    ledger.unmerge([max(0, count) for count in merged])
    return replace(
        state,
        versions=tuple(version for version, _ in intact),
        version_steps=tuple(step for _, step in intact),
        ledger=ledger,
    )


def in_new_timeline(cut: RunState, newest: RunState | None, policy: Policy, reason: str) -> RunState:
    """The state of a run that goes on from an older one.

    Args:
        cut: Where it goes on: versions (under new names), schedule, cursors, averages.
        newest: The newest state of the run: round numbers, incarnations, timelines and the time spent go on from there.
            None: the cut is a copy, and what came after it is not known; what that may have used is left out.
        policy: The run's policy.
        reason: In words, for learners that have to join again.
    """
    is_copy = newest is None
    newest = cut if newest is None else newest
    timeline = max(newest.timeline, cut.timeline) + (TIMELINES_SKIPPED_BY_COPY if is_copy else 1)
    skipped = INCARNATIONS_SKIPPED_BY_COPY if is_copy else INCARNATIONS_SKIPPED
    # Round numbers are never used twice, and the schedule of fragments and steps goes on where the cut stood: so all
    # its numbers move by whole cycles of the fragments, until the first one that is open or new is beyond all used.
    first = min([r.number for r in cut.open_rounds] or [cut.newest_opened + 1])
    used = max(cut.newest_opened, newest.newest_opened)
    jump = -(-(used + 1 - first) // policy.fragment_count) * policy.fragment_count
    ledger = newest.ledger.copy()
    for account in newest.learners:
        _settle(ledger, account)
    for reservation in newest.reservations:
        ledger.discard(reservation.fragment, reservation.token_count, reservation.cause)
    ledger.unmerge(cut.ledger.merged_tokens)
    then = {account.learner: account for account in cut.learners}
    return replace(
        cut,
        timeline=timeline,
        versions=tuple(
            Version(timeline, max(old.number, new.number) + 1, old.digest)
            for old, new in zip(cut.versions, newest.versions or cut.versions, strict=True)
        ),
        newest_opened=cut.newest_opened + jump,
        newest_closed=cut.newest_closed + jump,
        round_offset=cut.round_offset + jump,
        committed_count=newest.committed_count,
        abandoned_count=newest.abandoned_count + len(newest.open_rounds),
        open_rounds=tuple(replace(r, number=r.number + jump) for r in cut.open_rounds),
        newest_incarnation=max(cut.newest_incarnation, newest.newest_incarnation) + skipped,
        learners=tuple(_again(account, then.get(account.learner), cut, reason) for account in newest.learners),
        ledger=ledger,
        reservations=(),
        newest_results=tuple({} for _ in cut.versions),
        slot_reached=dict(newest.slot_reached),
        evicted=dict(newest.evicted),
        pause_reason=newest.pause_reason,
    )


def _settle(ledger: GoodputLedger, account: LearnerAccount) -> None:
    """What an incarnation had not settled is lost with its values."""
    if account.role is not Role.LEARNER or account.left:
        return
    for fragment, accounted in enumerate(account.accounted_tokens):
        ledger.discard(fragment, max(0, account.seen_token_count - accounted), "rolled_back")


def _again(account: LearnerAccount, then: LearnerAccount | None, cut: RunState, reason: str) -> LearnerAccount:
    """A learner that has to join again; the data of its slot goes on where the cut stood."""
    return replace(
        account,
        cursor=cut.slot_cursors.get(account.slot, 0),
        accounted_tokens=tuple(max(account.seen_token_count, tokens) for tokens in account.accounted_tokens),
        rounds_merged=then.rounds_merged if then is not None else (0,) * len(account.rounds_merged),
        newest_merged_round=then.newest_merged_round if then is not None else 0,
        must_join_again="" if account.left else reason,
    )
