"""Which faults, where and when: a list that follows from the seed alone, so that a run of it can be had again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.runtime import failpoints

SYNCER: Final = "syncer"
"""The victim that is no learner."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: as on the command line.
        sentence: what is done.
        victim: "learner", "syncer", or "rogue" (a participant of its own, that comes for this and goes again).
        seconds: shortest and longest duration; for kills: until the victim is started again.
        weight: how often it is drawn, against the others.
        at_least: how many there are in every run of it that has the time.
        choices: what the fault is drawn from besides; empty: nothing.
    """

    name: str
    sentence: str
    victim: str
    seconds: tuple[float, float]
    weight: float = 1.0
    at_least: int = 0
    choices: tuple[str, ...] = ()


LEARNER_POINTS: Final = tuple(
    p for p in failpoints.POINTS if p.startswith(("join.", "contribution.", "download.", "recovery."))
)
SYNCER_POINTS: Final = tuple(p for p in failpoints.POINTS if p not in LEARNER_POINTS)
"""Failpoints at which processes are killed."""

KINDS: Final[dict[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind("kill-learner", "SIGKILL, started again with its id alone", "learner", (0.2, 4.0), 3.0, 3),
        Kind(
            "kill-learner-at",
            "SIGKILL at a failpoint, started again",
            "learner",
            (0.2, 2.0),
            1.0,
            1,
            LEARNER_POINTS,
        ),
        Kind("kill-syncer", "SIGKILL, started again", "syncer", (0.2, 3.0), 1.5, 1),
        Kind("kill-syncer-at", "SIGKILL at a failpoint, started again", "syncer", (0.2, 1.0), 2.0, 2, SYNCER_POINTS),
        Kind("suspend-learner", "SIGSTOP, then SIGCONT", "learner", (1.0, 6.0), 1.0, 1),
        Kind("suspend-syncer", "SIGSTOP, then SIGCONT", "syncer", (1.0, 4.0), 0.5),
        Kind("partition", "no bytes either way, connections die", "learner", (1.0, 8.0), 1.0, 1),
        Kind("deaf", "no bytes in one direction", "learner", (1.0, 6.0), 0.7, 0, ("up", "down")),
        Kind("throttle", "a slow link", "learner", (3.0, 8.0), 0.7, 0, ("20000", "60000", "200000")),
        Kind("latency", "a long link", "learner", (3.0, 8.0), 0.7, 0, ("0.1", "0.3", "0.8")),
        Kind("stall", "bytes are held back, then go on", "learner", (0.5, 4.0), 0.7),
        Kind("reset", "every connection ends by RST", "learner", (0.0, 0.0), 1.0, 1),
        Kind("cut", "connections end in the middle of a stream", "learner", (2.0, 6.0), 0.7, 1, ("20000", "100000")),
        Kind("corrupt", "bits flip on the way", "learner", (2.0, 6.0), 1.0, 1, ("50000", "200000")),
        Kind("duplicate", "a participant sends everything twice", "rogue", (5.0, 8.0), 0.7, 1),
        Kind("nan", "a participant contributes NaN", "rogue", (5.0, 8.0), 0.7, 1),
        Kind("huge", "a participant contributes 1e38", "rogue", (5.0, 8.0), 0.7, 1),
        Kind("disk-full", "the syncer's disk takes nothing", "syncer", (1.0, 5.0), 0.7, 1),
        Kind(
            "disk-lost",
            "the mirror takes nothing (for seconds), the disk is gone; the syncer starts elsewhere from the mirror",
            "syncer",
            (0.2, 1.0),
            0.4,
            1,
            ("0", "2", "5"),
        ),
        Kind(
            "wrong-clock",
            "one host's wall clock is off (by seconds)",
            "either",
            (0.2, 0.5),
            0.4,
            1,
            ("-86400", "3600", "31536000"),
        ),
    )
}
"""All kinds of faults."""

CALM_SECONDS: Final = 6.0
"""Time before the first fault and after the last one, so that the run stands and can heal."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: begins at `at_seconds` after the run stands and is undone `seconds` later."""

    at_seconds: float
    kind: str
    victim: str
    seconds: float
    choice: str = ""

    def __str__(self) -> str:
        choice = f" {self.choice}" if self.choice else ""
        return f"{self.at_seconds:7.2f} s  {self.kind:<16} {self.victim}{choice}, for {self.seconds:.2f} s"


def draw(
    seed: int, seconds: float, learners: Sequence[str], kinds: Sequence[str], mean_gap_seconds: float = 5.0
) -> tuple[Fault, ...]:
    """The schedule of a seed: first what every run has at least, then by weight, in a random order and at random times.

    Args:
        seed: any number.
        seconds: length of the run; the faults lie within it, `CALM_SECONDS` from either end.
        learners: ids.
        kinds: names of `KINDS`.
        mean_gap_seconds: between the beginnings of two faults; they may overlap.
    """
    source = random.Random(f"chaos {seed}")
    times, at = [], CALM_SECONDS
    while at < seconds - CALM_SECONDS:
        times.append(at)
        at += source.uniform(0.2, 1.8) * mean_gap_seconds
    chosen = [KINDS[name] for name in kinds]
    wanted = [kind for kind in chosen for _ in range(kind.at_least)]
    source.shuffle(wanted)
    # A schedule that is too short for everything has kills before anything else.
    wanted.sort(key=lambda kind: not kind.name.startswith("kill"))
    wanted = wanted[: len(times)]
    wanted += source.choices(chosen, [kind.weight for kind in chosen], k=len(times) - len(wanted))
    source.shuffle(wanted)
    return tuple(_fault(source, kind, at, learners) for kind, at in zip(wanted, times, strict=True))


def _fault(source: random.Random, kind: Kind, at: float, learners: Sequence[str]) -> Fault:
    victims = {"learner": tuple(learners), "syncer": (SYNCER,), "either": (SYNCER, *learners), "rogue": ("rogue",)}
    return Fault(
        at_seconds=round(at, 2),
        kind=kind.name,
        victim=source.choice(victims[kind.victim]),
        seconds=round(source.uniform(*kind.seconds), 2),
        choice=source.choice(kind.choices) if kind.choices else "",
    )
