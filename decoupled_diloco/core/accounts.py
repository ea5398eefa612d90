"""Books what learners report into the goodput ledger: seconds by activity, tokens by fate.

For every (learner, fragment) the tokens of the incarnation are settled from the left: `accounted_tokens` is the point
up to which their fate is known. A commit settles a member's tokens up to its copy as merged; the next apply settles
what lies between as discarded (or leaves it open where `carry` or `blend` kept it); the end of an incarnation settles
the rest.
"""

from __future__ import annotations

from decoupled_diloco.core.events import ContributionHeader, FragmentApplied, Progress
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.ids import Activity, Role
from decoupled_diloco.core.membership import LearnerRecord


def book_progress(ledger: GoodputLedger, record: LearnerRecord, progress: Progress) -> None:
    """Books a report's spans and tokens. Time in which nobody heard of the learner is lost, whatever it says of it."""
    if record.role is not Role.LEARNER:
        return
    away, record.gap_seconds = record.gap_seconds, 0.0
    reported = sum(seconds for _, seconds in progress.spans)
    startup = sum(seconds for activity, seconds in progress.spans if activity is Activity.STARTUP)
    # A new process starts while the old one counts as away; a stopped one reports the stop as one long step.
    ledger.spend(Activity.LOST, away - startup)
    believed = max(0.0, 1.0 - away / reported) if reported > 0.0 and not startup else 1.0
    for activity, seconds in progress.spans:
        ledger.spend(activity, seconds * believed)
    ledger.process(progress.token_count - record.progress.token_count)


def settle_applied(ledger: GoodputLedger, record: LearnerRecord, event: FragmentApplied, cause: str) -> None:
    """An apply overwrote the tokens since the last settled one, but for those it kept."""
    settled = event.token_count - event.kept_token_count
    ledger.discard(event.fragment, settled - record.accounted_tokens[event.fragment], cause)
    record.accounted_tokens[event.fragment] = max(settled, record.accounted_tokens[event.fragment])


def settle_merged(ledger: GoodputLedger, record: LearnerRecord | None, header: ContributionHeader) -> None:
    """A commit contained this contribution. `record`: None if its incarnation has been replaced since."""
    ledger.merge(header.fragment, header.token_count)
    if record is not None:
        record.accounted_tokens[header.fragment] = header.total_token_count


def settle_gone(ledger: GoodputLedger, record: LearnerRecord, merging: dict[int, int], cause: str) -> None:
    """An incarnation is over; its open tokens are lost, except those in a merge under way.

    `merging` gives, by fragment, the incarnation's tokens at the copy that is being merged.
    """
    for fragment, accounted in enumerate(record.accounted_tokens):
        settled = max(accounted, merging.get(fragment, 0))
        ledger.discard(fragment, record.progress.token_count - settled, cause)
        record.accounted_tokens[fragment] = max(settled, record.progress.token_count)
