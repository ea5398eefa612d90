"""Every step accounted for: the syncer's ledger, computed again from the learners' own journals.

Only what a learner itself has written down counts: its steps, and the copies that it handed over. A process that was
killed may have lost its last lines; whatever lies beyond them cannot be checked, and is passed over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from chaos.evidence import Contribution, Evidence, Incarnation, Ledger
from decoupled_diloco.core.effects import CommitRound, MergedContribution
from decoupled_diloco.core.ids import Role

STEPS_LOST_MAX: Final = 2
"""Steps that the journal of a killed process may lack, although the syncer has heard of them."""


def steps_accounted(evidence: Evidence) -> Iterator[str]:
    """Steps, copies, ledger rows and sums agree, to the token."""
    for incarnation in evidence.incarnations:
        if incarnation.dropped_count:
            yield f"{_who(incarnation)}: its journal lost {incarnation.dropped_count} lines; it proves nothing"
        yield from _steps_in_a_row(incarnation)
        for contribution in incarnation.contributions:
            yield from _copy_agrees_with_steps(incarnation, contribution)
    for row in evidence.ledger.rounds:
        for member in row.contributions:
            yield from _row_agrees_with_copy(evidence, row, member)
    yield from _cursors_continue(evidence)
    yield from _sums_agree(evidence)


def _who(incarnation: Incarnation) -> str:
    return f"{incarnation.learner}/{incarnation.number}"


def _steps_in_a_row(incarnation: Incarnation) -> Iterator[str]:
    """Local steps count from 1, and the cursor goes on from where the incarnation was told to begin."""
    for index, step in enumerate(incarnation.steps, start=1):
        if (step.local_step, step.cursor) != (index, incarnation.cursor + index):
            yield (
                f"{_who(incarnation)}: its step {index} says local step {step.local_step}, next cursor {step.cursor}; "
                f"it began at cursor {incarnation.cursor}"
            )
            return


def _copy_agrees_with_steps(incarnation: Incarnation, copy: Contribution) -> Iterator[str]:
    """A copy holds exactly the tokens of its last steps."""
    if copy.local_step > len(incarnation.steps):
        if incarnation.ends_in_order:
            yield f"{_who(incarnation)}: a copy of step {copy.local_step}, which the journal does not have"
        return
    until = incarnation.steps[copy.local_step - 1]
    start = copy.local_step - copy.step_count
    before = incarnation.steps[start - 1].total_tokens if start > 0 else 0
    made = (until.total_tokens, until.total_tokens - before, until.cursor)
    if start < 0 or made != (copy.total_token_count, copy.token_count, copy.cursor):
        yield (
            f"{_who(incarnation)}, round {copy.round}: the copy says {copy.token_count} tokens of {copy.step_count} "
            f"steps, {copy.total_token_count} in all, cursor {copy.cursor}; the steps say {made}"
        )


def _row_agrees_with_copy(evidence: Evidence, row: CommitRound, member: MergedContribution) -> Iterator[str]:
    """What the ledger says of a member is what the member had handed over."""
    where = f"round {row.round}, {member.learner}/{member.incarnation}"
    incarnation = evidence.of(member.learner, member.incarnation)
    if incarnation is None:
        yield f"{where}: no journal knows this incarnation"
        return
    copies = [copy for copy in incarnation.contributions if copy.round == row.round]
    if not copies:
        lines_may_be_missing = not incarnation.ends_in_order and member.total_token_count >= incarnation.total_tokens
        if not lines_may_be_missing:
            yield f"{where}: merged, but its journal has no contribution to that round"
        return
    counts = (member.step_count, member.token_count, member.total_token_count, member.cursor)
    if not any(
        (copy.fragment, (copy.step_count, copy.token_count, copy.total_token_count, copy.cursor))
        == (row.fragment, counts)
        for copy in copies
    ):
        yield f"{where}: the ledger says {counts} of fragment {row.fragment}, the journal {copies}"
    if member.slot != incarnation.slot:
        yield f"{where}: merged as slot {member.slot}, trained on slot {incarnation.slot}"


def _cursors_continue(evidence: Evidence) -> Iterator[str]:
    """Nobody begins a slot later than the newest batch that anybody made of it: no batch is left out."""
    reached: defaultdict[int, int] = defaultdict(int)
    for row in evidence.ledger.rounds:
        for member in row.contributions:
            reached[member.slot] = max(reached[member.slot], member.cursor)
    for incarnation in evidence.incarnations:
        farthest = reached[incarnation.slot]
        if incarnation.cursor > farthest:
            yield (
                f"{_who(incarnation)} began slot {incarnation.slot} at cursor {incarnation.cursor}; its batches from "
                f"{farthest} on were never trained on"
            )
        reached[incarnation.slot] = max(farthest, incarnation.cursor + len(incarnation.steps))


def _sums_agree(evidence: Evidence) -> Iterator[str]:
    """The goodput ledger: its own books balance, and they are those of the rows and of the journals."""
    state, sums = evidence.ledger.state, evidence.ledger.state.ledger
    seen_tokens = sums.tokens_processed
    merged = merged_tokens(evidence.ledger)
    for fragment, by_rows in enumerate(merged):
        discarded = sum(tokens[fragment] for tokens in sums.discarded_tokens.values())
        open_tokens = sum(
            max(0, account.seen_token_count - account.accounted_tokens[fragment])
            for account in state.learners
            if account.role is Role.LEARNER
        )
        reserved = sum(r.token_count for r in state.reservations if r.fragment == fragment)
        found = sums.merged_tokens[fragment] + discarded + open_tokens + reserved
        if found != seen_tokens:
            yield (
                f"fragment {fragment}: {seen_tokens} tokens were processed, but {sums.merged_tokens[fragment]} merged, "
                f"{discarded} discarded, {open_tokens} open and {reserved} reserved make {found}"
            )
        if sums.merged_tokens[fragment] != by_rows:
            yield (
                f"fragment {fragment}: {sums.merged_tokens[fragment]} tokens are booked as merged, its rounds hold "
                f"{by_rows}"
            )
    yield from _processed_agrees(evidence, seen_tokens)


def _processed_agrees(evidence: Evidence, seen_tokens: int) -> Iterator[str]:
    """The syncer has seen what was made, but for what a process had not reported when it, or its syncer, died."""
    made = sum(incarnation.total_tokens for incarnation in evidence.incarnations)
    certain = sum(surely_seen(evidence.ledger, incarnation) for incarnation in evidence.incarnations)
    step_tokens_max = max((step.tokens for i in evidence.incarnations for step in i.steps), default=0)
    sudden_count = sum(not incarnation.ends_in_order for incarnation in evidence.incarnations)
    missing = STEPS_LOST_MAX * step_tokens_max * sudden_count
    if seen_tokens > made + missing:
        yield (
            f"{seen_tokens} tokens are booked as processed; the journals know {made}, and {sudden_count} of them may "
            f"lack the last lines, at most {missing} tokens"
        )
    if seen_tokens < certain:
        yield f"{seen_tokens} tokens are booked as processed, merged contributions alone show {certain}"


def merged_tokens(ledger: Ledger) -> list[int]:
    """By fragment: tokens of all members of the rounds that count."""
    sums = [0] * ledger.policy.fragment_count
    for row in ledger.kept_rounds():
        sums[row.fragment] += sum(member.token_count for member in row.contributions)
    return sums


def surely_seen(ledger: Ledger, incarnation: Incarnation) -> int:
    """Tokens of an incarnation that the syncer must have seen: those up to its newest merged copy."""
    return max(
        (
            member.total_token_count
            for row in ledger.kept_rounds()
            for member in row.contributions
            if (member.learner, member.incarnation) == (incarnation.learner, incarnation.number)
        ),
        default=0,
    )
