"""What a committed round changes in the books of its run: the same for a round just committed and for a restart.

`propose` writes down all that will be booked, before the round is durable; `book` books it, after.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from decoupled_diloco.core import accounts
from decoupled_diloco.core.effects import Absentee, CommitRound, MergedContribution
from decoupled_diloco.core.ids import Fate, Version
from decoupled_diloco.core.round import Round

if TYPE_CHECKING:
    from decoupled_diloco.core.syncer import SyncerMachine


def propose(item: Round, version: Version, absentees: tuple[Absentee, ...], live_count: int) -> CommitRound:
    """The ledger row of a round whose merge is done."""
    contributions = []
    for answer in item.complete():
        header = answer.header
        assert header is not None
        contributions.append(
            MergedContribution(
                answer.learner,
                answer.incarnation,
                answer.slot,
                answer.weight,
                header.step_count,
                header.token_count,
                header.total_token_count,
                header.cursor,
            )
        )
    return CommitRound(
        item.number,
        item.fragment,
        version,
        item.global_step,
        tuple(contributions),
        absentees,
        live_count,
        item.final,
        item.reason,
    )


def book(machine: SyncerMachine, commit: CommitRound, reserved_token_counts: Mapping[str, int]) -> int:
    """Makes a durable round the run's newest of its fragment; returns the global steps made.

    Args:
        machine: Whose books.
        commit: The round.
        reserved_token_counts: Tokens that members had reserved, by learner (`accounts`).
    """
    fragment, total = commit.fragment, machine.policy.total_steps
    step = min(commit.global_step + 1, total) if total else commit.global_step + 1
    machine.versions[fragment] = commit.version
    machine.version_steps[fragment] = step
    machine.global_step = max(machine.global_step, step)
    machine.participating_count = len(commit.contributions)
    results = {a.learner: "rejected" for a in commit.absentees if a.fate not in (None, Fate.LATE)}
    machine.newest_results[fragment] = results | dict.fromkeys(commit.members, "overlap")
    for contribution in commit.contributions:
        record = machine.membership.get(contribution.learner, contribution.incarnation)
        reserved = reserved_token_counts.get(contribution.learner, 0)
        accounts.settle_merged(machine.ledger, record, contribution, fragment, reserved)
        _credit(machine, contribution, commit)
    if not commit.final:
        machine.ledger.close_round(len(commit.contributions), commit.live_count)
    return step


def _credit(machine: SyncerMachine, contribution: MergedContribution, commit: CommitRound) -> None:
    """Moves the committed cursor of the contribution's slot."""
    membership, slot, cursor = machine.membership, contribution.slot, contribution.cursor
    membership.slot_cursors[slot] = max(membership.slot_cursors.get(slot, 0), cursor)
    record = membership.learners.get(contribution.learner)
    if record is None:
        return
    record.rounds_merged[commit.fragment] += 1
    record.newest_merged_round = max(record.newest_merged_round, commit.round)
    if record.slot == slot:
        record.cursor = max(record.cursor, cursor)
