"""What of a run must survive its syncer: everything but payloads, as plain data.

A `RunState` is written in the transaction of every commit and before every answer that must hold (a join, a pause). A
restart takes the newest one and books the committed rounds that it does not know yet (`restoring`). Instants are not
part of it: they are of a clock that ends with the process. What the fields mean is said where the machine keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.ids import Role, RunPhase, Version


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round that was opened and has neither been committed nor abandoned."""

    number: int
    fragment: int
    global_step: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens that are merged if a round commits and discarded if not (`RoundAnswer.reserved_token_count`)."""

    round: int
    fragment: int
    learner: str
    token_count: int
    cause: str


@dataclass(frozen=True, slots=True)
class LearnerAccount:
    """A learner (or observer) and its newest incarnation (see `LearnerRecord`)."""

    learner: str
    incarnation: int
    role: Role
    slot: int
    cursor: int
    local_step: int
    seen_token_count: int
    accounted_tokens: tuple[int, ...]
    rounds_merged: tuple[int, ...]
    newest_merged_round: int = 0
    step_seconds: float | None = None
    upload_seconds: tuple[float, ...] = ()
    peer_address: str = ""
    software_version: str = ""
    lost: bool = False
    left: bool = False
    left_reason: str = ""
    draining: bool = False
    drain_reason: str = ""
    must_join_again: str = ""
    first_cursor: int = 0


@dataclass(frozen=True, slots=True)
class Averages:
    """The moving averages; None before the first sample. Seconds, but for the interval (steps) and the norms."""

    quorum_seconds: float | None = None
    sync_seconds: float | None = None
    download_seconds: float | None = None
    interval_steps: float | None = None
    norms: tuple[float | None, ...] = ()
    """By fragment."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A run between two events."""

    phase: RunPhase
    timeline: int
    """The newest timeline that any version was named in."""
    global_step: int
    versions: tuple[Version, ...]
    """By fragment; empty before the run has parameters."""
    version_steps: tuple[int, ...]
    newest_opened: int
    newest_closed: int
    newest_closed_step: int
    round_offset: int
    committed_count: int
    abandoned_count: int
    open_rounds: tuple[OpenRound, ...]
    newest_incarnation: int
    learners: tuple[LearnerAccount, ...]
    slot_cursors: dict[int, int]
    ledger: GoodputLedger
    reservations: tuple[Reservation, ...] = ()
    newest_results: tuple[dict[str, str], ...] = ()
    averages: Averages = field(default_factory=Averages)
    slot_reached: dict[int, int] = field(default_factory=dict)
    """By slot, as in `Membership`."""
    evicted: dict[str, str] = field(default_factory=dict)
    """Learners that may not join, with the reason."""
    participating_count: int = 0
    pause_reason: str | None = None
    finish_reason: str | None = None
    evaluation: dict[str, float] = field(default_factory=dict)
    evaluation_global_step: int = 0
