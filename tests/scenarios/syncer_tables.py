"""What a SyncerMachine shows of itself, as lines of text."""

from __future__ import annotations

from decoupled_diloco.core.ids import LearnerState
from decoupled_diloco.core.syncer import SyncerMachine
from tests.scenarios.words import seconds, share


def status_lines(machine: SyncerMachine, now: float) -> list[str]:
    status = machine.status(now)
    lines = [
        f"{status.phase} at global step {status.global_step}: {status.reason or 'nothing under way'}",
        f"registered {status.registered_count}, live {status.live_count}, participating {status.participating_count}",
        f"rounds committed {status.rounds_committed_count}, abandoned {status.rounds_abandoned_count}",
    ]
    return lines + [f"warning: {warning}" for warning in status.warnings]


def round_lines(machine: SyncerMachine, now: float) -> list[str]:
    lines = []
    for item in machine.list_rounds(100, now=now):
        lines.append(f"round {item.round} {item.state}: {item.reason or 'just opened'}")
        members = ", ".join(
            f"{member.learner} {share(member.weight_share)} ({member.token_count} tokens in {member.step_count} steps)"
            for member in item.members
        )
        if members:
            lines.append(f"  contributions: {members}")
        lines += [f"  without {learner}: {reason}" for learner, reason in item.absentees]
    return lines


def learner_lines(machine: SyncerMachine, now: float) -> list[str]:
    lines = []
    for item in machine.learners(now):
        place = f"slot {item.slot}, cursor {item.cursor}" if item.slot >= 0 else "observer"
        reason = f" ({item.reason})" if item.reason else ""
        reason += "" if item.attached or item.state in (LearnerState.LOST, LearnerState.LEFT) else ", not attached"
        lines.append(
            f"{item.learner}/{item.incarnation} {item.state}{reason}: local step {item.local_step}, {place}, "
            f"merged {list(item.rounds_merged_by_fragment)}"
        )
    return lines


def goodput_lines(machine: SyncerMachine, now: float) -> list[str]:
    figures = machine.status(now).goodput
    discarded = ", ".join(f"{cause} {seconds(count)}" for cause, count in figures.tokens_discarded.items() if count)
    spent = ", ".join(f"{name} {seconds(value)} s" for name, value in figures.activity_seconds.items() if value)
    ratios = f"goodput {share(figures.goodput)}, token goodput {share(figures.token_goodput)}"
    tokens = f"tokens processed {figures.tokens_processed}, merged {seconds(figures.tokens_merged)}"
    return [
        f"{ratios}, participation {share(figures.participation)}, uptime {share(figures.uptime)}",
        f"{tokens}, discarded: {discarded or 'none'}",
        f"time: {spent or 'none'}",
    ]
