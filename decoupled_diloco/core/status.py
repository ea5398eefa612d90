"""What the machine shows of itself: read-only snapshots for the admin service, the page and the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoupled_diloco.core.ids import LearnerState, Role, RoundState, RunPhase, Version


@dataclass(frozen=True, slots=True)
class GoodputFigures:
    """The four figures that are only ever shown together, with what they are made of. Ratios are 0 to 1."""

    goodput: float = 0.0
    token_goodput: float = 0.0
    participation: float = 0.0
    uptime: float = 0.0
    tokens_processed: int = 0
    steps_redone: int = 0
    tokens_merged: float = 0.0
    tokens_ideal: float = 0.0
    tokens_discarded: dict[str, float] = field(default_factory=dict)
    """By cause: overlap, absent, rejected, died, left, rolled_back."""
    activity_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LearnerStatus:
    """One learner; field meanings as in `Learner` of admin.proto."""

    learner: str
    incarnation: int
    role: Role
    state: LearnerState
    reason: str
    attached: bool
    local_step: int
    token_count: int
    step_seconds: float | None
    tokens_per_second: float
    last_seen_seconds: float
    slot: int
    cursor: int
    loss: float | None
    schedule_step: int
    rounds_behind_count: int
    rounds_merged_count: int
    rounds_merged_by_fragment: tuple[int, ...]
    network_wait_seconds: float
    uploaded_bytes: int
    downloaded_bytes: int


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One contribution of a round."""

    learner: str
    weight_share: float
    token_count: int
    step_count: int


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """One round, open or closed; field meanings as in `Round` of admin.proto. Seconds are 0 while not known."""

    round: int
    fragment: int
    global_step: int
    state: RoundState
    reason: str
    members: tuple[MemberStatus, ...] = ()
    absentees: tuple[tuple[str, str], ...] = ()
    live_count: int = 0
    quorum_seconds: float = 0.0
    grace_seconds: float = 0.0
    last_call_seconds: float = 0.0
    merge_seconds: float = 0.0
    commit_seconds: float = 0.0
    rda_over_avg: float = 0.0
    version: Version | None = None
    opened_at: float = 0.0
    closed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The run as a whole; field meanings as in `Run` of admin.proto."""

    phase: RunPhase
    reason: str
    global_step: int
    total_steps: int
    rounds_committed_count: int
    rounds_abandoned_count: int
    registered_count: int
    live_count: int
    participating_count: int
    goodput: GoodputFigures
    versions: tuple[tuple[int, Version, int], ...]
    """Per fragment: index, newest version, global steps made when its round was due."""
    effective_interval_steps: float
    step_seconds: float | None
    sync_seconds: float | None
    quorum_seconds: float | None
    warnings: tuple[str, ...]
    evaluation: dict[str, float]
    evaluation_global_step: int
    loss: float | None
