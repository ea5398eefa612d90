"""What the checkers see of a world: plain facts, in the order in which they came to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decoupled_diloco.core.effects import Effect
from decoupled_diloco.core.events import Event
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine
from simulator.store import Restored, Transaction


@dataclass(frozen=True, slots=True)
class Started:
    """A syncer was started. `restored`: what it took up; None: a new run. `process` numbers the syncers of a world.

    `was_rotten`: a synced record had been damaged, so that something may be lost.
    """

    now: float
    process: int
    machine: SyncerMachine
    restored: Restored | None
    from_mirror: bool = False
    was_rotten: bool = False


@dataclass(frozen=True, slots=True)
class Decided:
    """A machine has handled an event. `effects` are what it wants done, none of it done yet."""

    now: float
    process: int
    machine: SyncerMachine
    event: Event
    effects: Sequence[Effect]


@dataclass(frozen=True, slots=True)
class Durable:
    """A transaction was written. `cut`: the versions that a roll-back went back to, under their old names."""

    now: float
    process: int
    transaction: Transaction
    cut: tuple[Version, ...] = ()


@dataclass(frozen=True, slots=True)
class Published:
    """A syncer serves a version from now on."""

    now: float
    process: int
    fragment: int
    version: Version


@dataclass(frozen=True, slots=True)
class HandedOut:
    """A join was answered with an incarnation."""

    now: float
    process: int
    learner: str
    incarnation: int
    slot: int


@dataclass(frozen=True, slots=True)
class Held:
    """A version lies at a learner."""

    now: float
    learner: str
    incarnation: int
    fragment: int
    version: Version


@dataclass(frozen=True, slots=True)
class Answered:
    """An operator's command was answered: it was granted, and holds."""

    now: float
    process: int
    event: Event
    state: RunState


Fact = Started | Decided | Durable | Published | HandedOut | Held | Answered
