"""Where the time and the tokens went: the figures that are only ever shown together.

Every second of a learner falls into one activity and every token of a (slot, fragment) ends as merged or discarded by
cause. A token counts by the share of the parameters whose merge contained it, so both sums are weighted by fragment
sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from decoupled_diloco.core.ids import Activity
from decoupled_diloco.core.status import GoodputFigures

DISCARD_CAUSES = ("overlap", "absent", "rejected", "died", "left", "rolled_back")
"""overlap: steps between a merged copy and the arrival; absent: the round closed without the learner; rejected: its
contribution was refused; died: the incarnation was replaced; left: the learner went away or the run ended; rolled_back:
the run went on from an older version, so that what had been merged since is lost."""


@dataclass(slots=True)
class GoodputLedger:
    """Sums over all learners since the run began. Plain data; the syncer's machine is its only writer."""

    fragment_shares: tuple[float, ...]
    """Share of the parameters in each fragment; sums to 1."""
    tokens_processed: int = 0
    redone_step_count: int = 0
    """Inner steps that were made again on the same data, because no committed round held their effect."""
    merged_tokens: list[int] = field(default_factory=list)
    """By fragment."""
    discarded_tokens: dict[str, list[int]] = field(default_factory=dict)
    """By cause and fragment."""
    activity_seconds: dict[str, float] = field(default_factory=lambda: {a.value: 0.0 for a in Activity})
    participation_sum: float = 0.0
    participation_rounds: int = 0
    advancing_seconds: float = 0.0
    observed_seconds: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.fragment_shares)
        self.merged_tokens = self.merged_tokens or [0] * count
        self.discarded_tokens = {cause: [0] * count for cause in DISCARD_CAUSES} | self.discarded_tokens

    def copy(self) -> GoodputLedger:
        """The sums of now, which later bookings leave alone."""
        return replace(
            self,
            merged_tokens=list(self.merged_tokens),
            discarded_tokens={cause: list(tokens) for cause, tokens in self.discarded_tokens.items()},
            activity_seconds=dict(self.activity_seconds),
        )

    def unmerge(self, merged_tokens: list[int]) -> None:
        """Only so much was merged after all, by fragment; the rest was rolled back."""
        for fragment, kept in enumerate(merged_tokens):
            self.discard(fragment, self.merged_tokens[fragment] - kept, "rolled_back")
            self.merged_tokens[fragment] = kept

    def spend(self, activity: Activity, seconds: float) -> None:
        """Books learner-seconds."""
        self.activity_seconds[activity.value] += max(0.0, seconds)

    def process(self, token_count: int) -> None:
        """Books tokens of inner steps."""
        self.tokens_processed += max(0, token_count)

    def merge(self, fragment: int, token_count: int) -> None:
        """Books tokens whose effect a committed merge of the fragment contained."""
        self.merged_tokens[fragment] += token_count

    def discard(self, fragment: int, token_count: int, cause: str) -> None:
        """Books tokens whose effect on the fragment is lost."""
        self.discarded_tokens[cause][fragment] += token_count

    def weighted(self, tokens: list[int]) -> float:
        """Tokens by fragment, each fragment by its share of the parameters."""
        return sum(share * count for share, count in zip(self.fragment_shares, tokens, strict=True))

    def close_round(self, member_count: int, live_count: int) -> None:
        """Books one committed round's participation."""
        if live_count > 0:
            self.participation_sum += min(1.0, member_count / live_count)
            self.participation_rounds += 1

    def observe(self, seconds: float, advancing: bool) -> None:
        """Books wall time, and whether at least one learner advanced in it."""
        self.observed_seconds += seconds
        if advancing:
            self.advancing_seconds += seconds

    def figures(self, lost_seconds_running: float = 0.0) -> GoodputFigures:
        """The figures now. `lost_seconds_running`: learner-seconds of losses that have not ended yet."""
        seconds = dict(self.activity_seconds)
        seconds[Activity.LOST.value] += lost_seconds_running
        allocated = sum(seconds.values())
        compute = seconds[Activity.COMPUTE.value]
        # With no failure and no sync a cluster would compute in every allocated second, at the speed seen computing.
        merged = self.weighted(self.merged_tokens)
        ideal = self.tokens_processed * allocated / compute if compute else 0.0
        return GoodputFigures(
            goodput=compute / allocated if allocated else 0.0,
            token_goodput=min(1.0, merged / ideal) if ideal else 0.0,
            participation=self.participation_sum / self.participation_rounds if self.participation_rounds else 0.0,
            uptime=self.advancing_seconds / self.observed_seconds if self.observed_seconds else 0.0,
            tokens_processed=self.tokens_processed,
            steps_redone=self.redone_step_count,
            tokens_merged=merged,
            tokens_ideal=ideal,
            tokens_discarded={cause: self.weighted(tokens) for cause, tokens in self.discarded_tokens.items()},
            activity_seconds=seconds,
        )


@dataclass(slots=True)
class ActivityClock:
    """A learner's own stop-watch: every second since `since` falls into exactly one activity."""

    activity: Activity
    since: float
    spans: dict[Activity, float] = field(default_factory=dict)

    def switch(self, activity: Activity, now: float) -> None:
        """From `now` on the time goes to another activity."""
        self.spans[self.activity] = self.spans.get(self.activity, 0.0) + max(0.0, now - self.since)
        self.activity, self.since = activity, now

    def take(self, now: float) -> tuple[tuple[Activity, float], ...]:
        """The spans since the last call, the running one included; they start again at zero."""
        self.switch(self.activity, now)
        spans, self.spans = tuple(self.spans.items()), {}
        return spans
