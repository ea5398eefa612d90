"""All rounds of a run: those under way, the pace between them, and the memory of how earlier ones ended.

This is the cross-fragment Schedule: which round is the newest, when it may leave OPEN, which terminal answers are
remembered. A round's own life is in `round.py`; what becomes of one contribution is decided here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from decoupled_diloco.core.effects import Admission
from decoupled_diloco.core.events import ContributionHeader, ContributionReceived
from decoupled_diloco.core.ids import Fate, RoundState, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.round import AnswerState, Round, RoundAnswer
from decoupled_diloco.core.schedule import PACE_DEPTH_STEPS, fragment_of, global_step_of
from decoupled_diloco.core.status import RoundStatus
from decoupled_diloco.core.weights import contribution_weight, is_safe

CLOSED_ROUNDS_KEPT = 1000
"""Closed rounds that can still be listed."""
FATES_KEPT_ROUNDS = 200
"""Terminal answers are remembered for this many rounds; a contribution to an older round is LATE."""


@dataclass(slots=True)
class Rounds:
    """The rounds of one run."""

    under_way: dict[int, Round] = field(default_factory=dict)
    offset: int = 0
    """By how much round numbers are ahead of the schedule, a multiple of P: a roll-back uses no number twice."""
    newest_opened: int = 0
    newest_closed: int = 0
    newest_closed_step: int = -1
    newest_left_open: int = 0
    pace_target: float | None = None
    """When the newest round that left OPEN should have left it, by its pace."""
    pace_step: int = -1
    """t(r) of that round."""
    left_open_at: float = 0.0
    committed_count: int = 0
    abandoned_count: int = 0
    closed: deque[RoundStatus] = field(default_factory=lambda: deque(maxlen=CLOSED_ROUNDS_KEPT))
    fates: dict[tuple[str, int, int], Fate] = field(default_factory=dict)
    """Terminal answers by (learner, incarnation, round)."""

    def busy_fragments(self) -> set[int]:
        """Fragments that have a round under way."""
        return {item.fragment for item in self.under_way.values()}

    def in_order(self) -> list[Round]:
        """Rounds under way, oldest first."""
        return [self.under_way[number] for number in sorted(self.under_way)]

    def open_next(self, policy: Policy, base: Version, now: float, final_step: int | None = None) -> Round:
        """Opens the next round of the schedule; `final_step` stands in for t(r) in the last rounds of a run."""
        number = self.newest_opened + 1
        self.newest_opened = number
        step = global_step_of(number - self.offset, policy) if final_step is None else final_step
        item = Round(number, fragment_of(number, policy), base, step, now, final=final_step is not None)
        self.under_way[number] = item
        return item

    # ---- pace --------------------------------------------------------------------------------------------------------

    def pace_at(self, item: Round, step_seconds: float | None) -> float:
        """The instant before which a round stays OPEN: (t(r) - t(q)) * xi_step after q, the one before it, left OPEN.

        A round that went back to OPEN has kept its pace already.
        """
        if step_seconds is None or self.pace_target is None or item.left_open_at is not None:
            return 0.0
        return self.pace_target + (item.global_step - self.pace_step) * step_seconds

    def leave_open(self, item: Round, target: float, step_seconds: float | None, now: float) -> None:
        """Notes that a round left OPEN for the first time."""
        depth = PACE_DEPTH_STEPS * (step_seconds or 0.0) if self.pace_target is not None else 0.0
        self.pace_target, self.pace_step = max(target, now - depth), item.global_step
        self.newest_left_open = max(self.newest_left_open, item.number)
        self.left_open_at = now
        item.left_open_at = now

    def previous_left(self, item: Round) -> bool:
        """Whether every older round has left OPEN at least once."""
        return all(other.left_open_at is not None for other in self.under_way.values() if other.number < item.number)

    # ---- contributions -----------------------------------------------------------------------------------------------

    def admit(self, header: ContributionHeader, slot: int, upload_seconds_max: float, now: float) -> Admission:
        """Decides on a header; on ACCEPTED the contribution counts as started.

        Args:
            header: the contribution.
            slot: data slot of its learner.
            upload_seconds_max: how long the whole upload may take.
            now: the instant.
        """
        key = (header.learner, header.incarnation, header.round)
        if key in self.fates:
            return Admission(self.fates[key], "answered before", known=True)
        item = self.under_way.get(header.round)
        known = item.answers.get(header.learner) if item else None
        if known is not None and known.state is AnswerState.COMPLETE:
            if known.incarnation == header.incarnation:
                return Admission(Fate.ACCEPTED, "it lies complete already", known=True)
            return Admission(Fate.LATE, "a contribution of an earlier incarnation lies complete")
        if known is not None and known.incarnation != header.incarnation:
            known = None
        refusal = self._refusal(item, known, header, now)
        if refusal is not None:
            if refusal.fate.is_terminal and item is not None:
                self.refuse(item, header.learner, header.incarnation, refusal.fate, refusal.text)
            return refusal
        assert item is not None
        answer = RoundAnswer(header.learner, header.incarnation, AnswerState.STARTED, header=header, slot=slot)
        answer.started_at = answer.moved_at = now
        answer.until = now + upload_seconds_max
        if known is not None and known.header is not None and item.state is not RoundState.OPEN:
            answer.until = known.until  # a stream that begins again holds the round up no longer than the first one
        item.answers[header.learner] = answer
        return Admission(Fate.ACCEPTED)

    def _refusal(
        self, item: Round | None, known: RoundAnswer | None, header: ContributionHeader, now: float
    ) -> Admission | None:
        if not header.schema_matches:
            return Admission(Fate.SCHEMA, "the contribution is of another model")
        if item is None:
            return Admission(Fate.LATE, f"round {header.round} is closed; the newest is {self.newest_opened}")
        if not item.takes_contributions(now) and not self._goes_on(item, known, now):
            text = f"round {header.round} is {item.state} and takes no more contributions"
            if item.state is RoundState.LAST_CALL:
                return Admission(Fate.ABORTED, f"{text}, unless it has to open again")
            return Admission(Fate.LATE, text)
        if header.fragment != item.fragment or header.base != item.base:
            return Admission(
                Fate.STALE_BASE, f"round {header.round} is based on version {item.base}, not {header.base}"
            )
        if header.step_count < 1 or header.token_count < 1:
            return Admission(Fate.ZERO_STEPS, "no steps were made since the fragment was received")
        if not is_safe(contribution_weight(header.token_count, header.step_count)):
            return Admission(Fate.NONFINITE, f"a weight of {header.token_count} tokens is beyond float32's safe range")
        return None

    def _goes_on(self, item: Round, known: RoundAnswer | None, now: float) -> bool:
        """Whether a contribution that started in time may start again: while the round waits for uploads."""
        return (
            item.state is RoundState.LAST_CALL and known is not None and known.header is not None and now < known.until
        )

    def refuse(self, item: Round, learner: str, incarnation: int, fate: Fate, text: str) -> None:
        """Remembers a terminal refusal."""
        self.fates[(learner, incarnation, item.number)] = fate
        known = item.answers.get(learner)
        if known is None or not known.counts or known.incarnation == incarnation:
            item.answers[learner] = RoundAnswer(learner, incarnation, AnswerState.REJECTED, text, fate=fate)

    def receive(self, event: ContributionReceived, norm_limit: float, now: float) -> Fate:
        """Decides on a whole contribution. `norm_limit`: largest norm that is not an outlier; 0 = no limit."""
        key = (event.learner, event.incarnation, event.round)
        if key in self.fates:
            return self.fates[key]
        item = self.under_way.get(event.round)
        answer = item.answers.get(event.learner) if item else None
        if item is None or answer is None or answer.incarnation != event.incarnation or not answer.counts:
            return Fate.LATE
        if answer.state is AnswerState.COMPLETE:
            return Fate.ACCEPTED
        if not event.finite or not is_safe(event.norm):
            text = event.problem or "its values are not finite"
            self.refuse(item, event.learner, event.incarnation, Fate.NONFINITE, text)
            return Fate.NONFINITE
        if norm_limit and event.norm > norm_limit:
            text = f"its norm {event.norm:.3g} is above the limit {norm_limit:.3g}"
            self.refuse(item, event.learner, event.incarnation, Fate.NORM_OUTLIER, text)
            return Fate.NORM_OUTLIER
        answer.state, answer.received_at, answer.moved_at, answer.norm = AnswerState.COMPLETE, now, now, event.norm
        return Fate.ACCEPTED

    def drop_incarnation(
        self, learner: str, incarnation: int, keep_complete: bool, text: str
    ) -> list[tuple[Round, RoundAnswer]]:
        """Takes an incarnation's contributions off the rounds that are not merging yet; returns them.

        A learner that died keeps its whole contributions (`keep_complete`); one that was replaced does not, because
        its successor repeats the steps.
        """
        dropped = []
        for item in self.in_order():
            answer = item.answers.get(learner)
            if answer is None or answer.incarnation != incarnation or item.state is RoundState.MERGING:
                continue
            if answer.state is AnswerState.STARTED or (answer.state is AnswerState.COMPLETE and not keep_complete):
                answer.state, answer.text = AnswerState.FAILED, text
                dropped.append((item, answer))
        return dropped

    def pending(self, learner: str, incarnation: int) -> dict[int, RoundAnswer]:
        """By fragment, an incarnation's whole contributions that may still be merged."""
        found = {}
        for item in self.under_way.values():
            answer = item.answers.get(learner)
            if answer and answer.incarnation == incarnation and answer.state is AnswerState.COMPLETE:
                found[item.fragment] = answer
        return found

    def pending_cursor(self, slot: int) -> int:
        """Newest cursor of a data slot in whole contributions that may still be merged; 0 if there are none."""
        answers = [answer for item in self.under_way.values() for answer in item.complete() if answer.slot == slot]
        return max((answer.header.cursor for answer in answers if answer.header), default=0)

    # ---- the end of a round ------------------------------------------------------------------------------------------

    def close(self, item: Round, now: float) -> None:
        """Moves a closed round to the memory."""
        del self.under_way[item.number]
        item.closed_at = now
        if item.state is RoundState.COMMITTED:
            self.committed_count += 1
            for answer in item.complete():
                self.fates[(answer.learner, answer.incarnation, item.number)] = Fate.ACCEPTED
        else:
            self.abandoned_count += 1
        if item.number > self.newest_closed:
            self.newest_closed, self.newest_closed_step = item.number, item.global_step
        self.closed.append(item.status(now))
        if item.number % FATES_KEPT_ROUNDS == 0:
            oldest = item.number - FATES_KEPT_ROUNDS
            self.fates = {key: fate for key, fate in self.fates.items() if key[2] > oldest}
