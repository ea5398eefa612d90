"""Rounds that have ended, as the ledger has them, in the form in which the machine lists them."""

from __future__ import annotations

from decoupled_diloco.core.ids import RoundState
from decoupled_diloco.core.status import MemberStatus, RoundStatus
from syncer_service.store.rows import LedgerRound


def round_status(row: LedgerRound) -> RoundStatus:
    """What can be told of a round of an earlier start of the syncer; durations are not kept."""
    members = [c for c in row.contributions if c.is_merged]
    weight = sum(c.weight or 0.0 for c in members) or 1.0
    lost = "its version was lost later; " if row.outcome == "lost" else ""
    return RoundStatus(
        round=row.round,
        fragment=row.fragment,
        global_step=row.global_step,
        state=RoundState.ABANDONED if row.outcome == "abandoned" else RoundState.COMMITTED,
        reason=lost + row.reason,
        members=tuple(
            MemberStatus(c.learner, (c.weight or 0.0) / weight, c.token_count or 0, c.step_count or 0) for c in members
        ),
        absentees=tuple((c.learner, c.reason) for c in row.contributions if not c.is_merged),
        live_count=row.live_count or 0,
        version=row.version,
    )
