"""Books what learners report into the goodput ledger: seconds by activity, tokens by fate.

For every (learner, fragment) the tokens of the incarnation are settled from the left: `accounted_tokens` is the point
up to which their fate is known. A commit settles a member's tokens up to its copy as merged; the next apply settles
what lies between as discarded (or leaves it open where `carry` or `blend` kept it); the end of an incarnation settles
the rest. What a whole contribution holds when its learner's account is closed early is *reserved*: merged if its round
commits, discarded if not. So at every moment and for every fragment, to the token:

    processed = merged + discarded + open + reserved
"""

from __future__ import annotations

from decoupled_diloco.core.effects import MergedContribution
from decoupled_diloco.core.events import FragmentApplied, Progress
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.ids import Activity, Role
from decoupled_diloco.core.membership import LearnerRecord
from decoupled_diloco.core.round import RoundAnswer


def book_progress(
    ledger: GoodputLedger, record: LearnerRecord, progress: Progress, run_age_seconds: float = float("inf")
) -> None:
    """Books a report's spans and tokens.

    Of a time in which nobody heard of the learner as many seconds are believed as its steps account for: one that was
    cut off has computed, one that was suspended reports the suspension as one long step. What a learner did before
    there was a run, `run_age_seconds` ago, is not the run's.
    """
    if record.role is not Role.LEARNER:
        return
    away, record.gap_seconds = record.gap_seconds, 0.0
    reported = sum(seconds for _, seconds in progress.spans)
    startup = sum(seconds for activity, seconds in progress.spans if activity is Activity.STARTUP)
    believed = 1.0
    if startup:  # a new process starts while the old one counts as away
        ledger.spend(Activity.LOST, away - startup)
        believed = min(1.0, run_age_seconds / reported)
    elif away > 0.0:
        made = max(0, progress.local_step - record.progress.local_step) * (record.step_seconds() or 0.0)
        lost = min(away, max(0.0, max(reported, away) - made))
        ledger.spend(Activity.LOST, lost)
        believed = max(0.0, 1.0 - lost / reported) if reported > 0.0 else 0.0
    for activity, seconds in progress.spans:
        ledger.spend(activity, seconds * believed)
    see_tokens(ledger, record, progress.token_count)


def see_tokens(ledger: GoodputLedger, record: LearnerRecord, token_count: int) -> None:
    """Books tokens as soon as any message shows that they were made."""
    if token_count > record.seen_token_count:
        ledger.process(token_count - record.seen_token_count)
        record.seen_token_count = token_count


def settle_applied(
    ledger: GoodputLedger, record: LearnerRecord, event: FragmentApplied, cause: str, pending: RoundAnswer | None
) -> None:
    """An apply overwrote the tokens since the last settled one, but for those it kept.

    `pending`: the incarnation's whole contribution of that fragment to a round under way, if there is one.
    """
    see_tokens(ledger, record, event.token_count)
    _settle(ledger, record, event.fragment, event.token_count - event.kept_token_count, cause, pending)


def settle_gone(ledger: GoodputLedger, record: LearnerRecord, pending: dict[int, RoundAnswer], cause: str) -> None:
    """An incarnation is over; its open tokens are lost, except those that may still be merged.

    `pending` gives, by fragment, its whole contributions to rounds under way.
    """
    for fragment in range(len(record.accounted_tokens)):
        _settle(ledger, record, fragment, record.seen_token_count, cause, pending.get(fragment))


def _settle(
    ledger: GoodputLedger, record: LearnerRecord, fragment: int, until: int, cause: str, pending: RoundAnswer | None
) -> None:
    accounted = record.accounted_tokens[fragment]
    if until <= accounted:
        return
    reserved = 0
    if pending is not None and pending.header is not None:
        header = pending.header
        start = max(accounted, header.total_token_count - header.token_count)
        reserved = max(0, min(until, header.total_token_count) - start)
        if reserved:
            pending.reserved_token_count, pending.reserved_cause = reserved, cause
    ledger.discard(fragment, until - accounted - reserved, cause)
    record.accounted_tokens[fragment] = until


def settle_merged(
    ledger: GoodputLedger,
    record: LearnerRecord | None,
    contribution: MergedContribution,
    fragment: int,
    reserved_token_count: int,
) -> None:
    """A commit contained this contribution.

    `record`: None if its incarnation is over; what that one had not settled was reserved.
    """
    if reserved_token_count or record is None:
        ledger.merge(fragment, reserved_token_count)
        return
    accounted, until = record.accounted_tokens[fragment], contribution.total_token_count
    if until <= accounted:
        return
    start = max(accounted, until - contribution.token_count)
    # Tokens before the start were overwritten by an apply whose report is still on its way, or was lost.
    ledger.discard(fragment, start - accounted, "overlap")
    ledger.merge(fragment, until - start)
    record.accounted_tokens[fragment] = until


def settle_unmerged(ledger: GoodputLedger, answer: RoundAnswer, fragment: int) -> None:
    """A contribution will not be merged after all; what it had reserved is lost."""
    if answer.reserved_token_count:
        ledger.discard(fragment, answer.reserved_token_count, answer.reserved_cause)
        answer.reserved_token_count = 0
