"""What a run has left behind, read into plain values: the learners' journals, and the syncer's ledger."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """One inner step; `cursor` is that of the batch after it, `total_tokens` those of its incarnation so far."""

    t: float
    local_step: int
    cursor: int
    tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Contribution:
    """A copy that was handed to the uploader."""

    t: float
    round: int
    fragment: int
    base: Version
    local_step: int
    step_count: int
    token_count: int
    total_token_count: int
    cursor: int


@dataclass(frozen=True, slots=True)
class Applied:
    """A version in a learner's parameters; `digest` is of the values, `version.digest` of the name."""

    t: float
    fragment: int
    version: Version
    digest: str
    local_step: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds up to `t` in which the device thread made no step; `hold` says why, None: a plain boundary."""

    t: float
    seconds: float
    hold: str | None


@dataclass(slots=True)
class Incarnation:
    """One incarnation as its own journal tells it."""

    learner: str
    number: int
    slot: int
    cursor: int
    t: float
    is_synchronous: bool = False
    ends_in_order: bool = True
    """False if the process died: the last lines may be missing."""
    dropped_count: int = 0
    steps: list[Step] = field(default_factory=list)
    contributions: list[Contribution] = field(default_factory=list)
    fates: dict[int, list[str]] = field(default_factory=dict)
    applied: list[Applied] = field(default_factory=list)
    waits: list[Pause] = field(default_factory=list)
    boundaries: list[Pause] = field(default_factory=list)
    recovery_count: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of all its steps."""
        return self.steps[-1].total_tokens if self.steps else 0


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the syncer has written down.

    Attributes:
        rounds: all committed rounds, in the order of their commits, also those that a roll-back, or the loss of a disk,
            has undone.
        versions: every version that ever had a name, by fragment, in the order of their commits.
        state: the newest state of the run.
        policy: what the run goes by.
    """

    rounds: tuple[CommitRound, ...]
    versions: tuple[tuple[Version, ...], ...]
    state: RunState
    policy: Policy

    def kept_rounds(self) -> tuple[CommitRound, ...]:
        """The rounds that the newest versions are made of, without those that a new timeline has left out."""
        committed = {(row.fragment, row.version) for row in self.rounds}
        undone: set[tuple[int, Version]] = set()
        for fragment, versions in enumerate(self.versions):
            kept: list[Version] = []
            for version in versions:
                if kept and version.timeline > kept[-1].timeline and (fragment, version) not in committed:
                    # The first version of a new timeline is an old one under a new name.
                    while kept and kept[-1].digest != version.digest:
                        undone.add((fragment, kept.pop()))
                kept.append(version)
        return tuple(row for row in self.rounds if (row.fragment, row.version) not in undone)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All of it.

    Attributes:
        incarnations: of all learners, in the order of their joins.
        ledger: the syncer's.
        disturbed: (learner, from, to): times in which a process was suspended, so that its own clock-watching says
            nothing of the program.
    """

    incarnations: tuple[Incarnation, ...]
    ledger: Ledger
    disturbed: tuple[tuple[str, float, float], ...] = ()

    def of(self, learner: str, number: int) -> Incarnation | None:
        """One incarnation; None if no journal knows it."""
        return next((i for i in self.incarnations if (i.learner, i.number) == (learner, number)), None)


def read_journals(paths: Iterable[Path]) -> tuple[Incarnation, ...]:
    """The incarnations of all journals."""
    found = [incarnation for path in paths for incarnation in read_journal(path)]
    return tuple(sorted(found, key=lambda incarnation: incarnation.t))


def read_journal(path: Path) -> list[Incarnation]:
    """The incarnations of one journal. Lines that were cut off by the end of a process are passed over."""
    found: list[Incarnation] = []
    learner, process = "", dict[int, Incarnation]()
    for line in _lines(path):
        match line["kind"]:
            case "started":
                _end_process(process, in_order=False)
                learner, process = line["learner"], {}
            case "ended":
                _end_process(process, in_order=True)
            case "joined":
                incarnation = Incarnation(
                    learner, line["incarnation"], line["slot"], line["cursor"], line["t"], line["is_synchronous"]
                )
                process[line["generation"]] = incarnation
                found.append(incarnation)
            case "dropped":
                for incarnation in process.values():
                    incarnation.dropped_count += line["count"]
            case _ if (generation := line["generation"]) in process:
                _add(process[generation], line)
    _end_process(process, in_order=False)
    return found


def _end_process(process: dict[int, Incarnation], *, in_order: bool) -> None:
    """An incarnation that was followed by another one of the same process is whole in any case."""
    newest = max(process, default=0)
    if newest and not in_order:
        process[newest].ends_in_order = False
    process.clear()


def _lines(path: Path) -> Iterable[Line]:
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "kind" in line:
            yield line


def _add(incarnation: Incarnation, line: Line) -> None:
    t, kind = line["t"], line["kind"]
    match kind:
        case "step":
            total = incarnation.total_tokens + line["tokens"]
            incarnation.steps.append(Step(t, line["local_step"], line["cursor"], line["tokens"], total))
        case "boundary":
            incarnation.boundaries.append(Pause(t, line["seconds"], line["hold"]))
        case "waited":
            incarnation.waits.append(Pause(t, line["seconds"], line["hold"]))
        case "contribution":
            names = ("local_step", "step_count", "token_count", "total_token_count", "cursor")
            counts = (line[name] for name in names)
            incarnation.contributions.append(
                Contribution(t, line["round"], line["fragment"], Version(*line["base"]), *counts)
            )
        case "fate":
            incarnation.fates.setdefault(line["round"], []).append(line["fate"])
        case "applied":
            incarnation.applied.append(
                Applied(t, line["fragment"], Version(*line["version"]), line["digest"], line["local_step"])
            )
        case "recovery":
            incarnation.recovery_count += 1
