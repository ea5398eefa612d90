"""The benchmarks that `python -m benchmarks` runs, each in a process of its own, and what comes of them.

A member is a module below `benchmarks` that takes `--quick` and `--json PATH` (see `figures.run`); two older ones
report in a form of their own, which `older.py` translates. Members run one after the other, so that none measures
another's work, and the failure of one is kept as text while the rest goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks import older
from benchmarks.figures import Figure, Section, machine

ROOT: Final = Path(__file__).resolve().parents[1]

OUTPUT_LINES_KEPT: Final = 15
"""Last lines of a member that failed."""

DISTRIBUTIONS: Final = ("grpcio", "protobuf", "numpy", "ml_dtypes", "jax", "jaxlib", "xxhash", "pyarrow", "safetensors")
"""Whose versions stand beside the figures."""

FORMAT: Final = 1
"""Of the file of results; goes up when a reader of an older one would misread it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A benchmark of the suite.

    Attributes:
        name: its module below `benchmarks`.
        about: what it measures, in a few words.
        seconds_max: it is ended after so long; a full run takes half of it or less on two quiet cores.
        seconds_max_quick: the same of a quick run.
        report: name of the file that an older one writes below its `--output`; "": it takes `--json`.
        arguments: further arguments of a full run.
        arguments_quick: of a quick one; None: too slow for it, left out.
        translate: turns an older one's report into a section.
    """

    name: str
    about: str
    seconds_max: float = 300.0
    seconds_max_quick: float = 90.0
    report: str = ""
    arguments: tuple[str, ...] = ()
    arguments_quick: tuple[str, ...] | None = ()
    translate: Callable[[dict[str, Any]], Section] | None = None

    def command(self, is_quick: bool, folder: Path, more: Sequence[str] = ()) -> list[str]:
        """Its command line; what it writes goes below `folder`."""
        start = [sys.executable, "-m", f"benchmarks.{self.name}"]
        chosen = [*((self.arguments_quick or ()) if is_quick else self.arguments), *more]
        if self.report:
            return [*start, "--output", str(folder), *chosen]
        return [*start, *(["--quick"] if is_quick else []), "--json", str(folder / "section.json"), *chosen]

    def section(self, folder: Path) -> Section:
        """What it has written below `folder`.

        Raises:
            OSError, ValueError, KeyError, TypeError: it is not there, or not what a member writes.
        """
        data = json.loads((folder / (self.report or "section.json")).read_text(encoding="utf-8"))
        if self.translate is not None:
            return self.translate(data)
        data.pop("machine", None)
        return Section.from_json(data)


MEMBERS: Final[tuple[Member, ...]] = (
    Member("peers", "the same payload by our calls, by limits and by others' transports", seconds_max=900.0),
    Member("wire", "fragments up and down beside raw TCP and Arrow Flight, and beside merges"),
    Member("arithmetic", "merge, outer step and encodings beside memcpy and plain NumPy"),
    Member("overlap", "what a learner's device thread loses to its exchange"),
    Member("latency", "from grace closed to the learners' hand-over slots, by stage, and decisions"),
    Member("memory", "the syncer's memory above what the run itself is"),
    Member("profile", "where our time goes, on both ends"),
    Member("shaped", "what an encoding gains on a link of 1 Gbit/s, and the bytes on it"),
    Member("wide_area", "what several connections gain over a long distance", arguments_quick=None),
    Member("scale", "64 learners on one syncer: rounds, processor time, decisions"),
    Member("capacity", "the largest model that one syncer sustains", arguments_quick=None),
    Member("quality", "what an encoding costs in loss", seconds_max=600.0, arguments_quick=None),
    Member(
        "start",
        "a killed learner is back: from its start to its first step",
        report="summary.json",
        arguments=("--kills", "3"),
        arguments_quick=None,
        translate=older.start_section,
    ),
    Member(
        "durability",
        "a durable commit, and a restart",
        report="durability-1000000.json",
        arguments_quick=("--rounds", "15"),
        translate=older.durability_section,
    ),
)
"""In the order in which they run."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A member that came to nothing.

    Attributes:
        name: the member's.
        reason: in words.
        output: its last lines.
    """

    name: str
    reason: str
    output: str


@dataclass(slots=True)
class Results:
    """What a run of the suite found out.

    Attributes:
        is_quick: fewer and smaller repetitions.
        taken_at: when it began, UTC, ISO 8601.
        machine: what it ran on.
        versions: of what the figures depend on, by distribution.
        sections: of the members that succeeded.
        seconds: how long each member took, by name.
        failures: the other members.
        left_out: members that were not asked for.
    """

    is_quick: bool
    taken_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=lambda: versions())
    sections: list[Section] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def missed(self) -> list[tuple[Section, Figure]]:
        """Figures that miss their targets."""
        return [(section, figure) for section in self.sections for figure in section.figures if figure.is_met is False]

    @property
    def met_count(self) -> int:
        """Figures that reach their targets."""
        return sum(figure.is_met is True for section in self.sections for figure in section.figures)

    def to_json(self) -> dict[str, Any]:
        """All of it in types of JSON, with "is_met" beside every figure; `from_json` reads it back."""
        sections = []
        for section in self.sections:
            data = section.to_json()
            for entry, figure in zip(data["figures"], section.figures, strict=True):
                entry["is_met"] = figure.is_met
            sections.append(data)
        return {
            "format": FORMAT,
            "is_quick": self.is_quick,
            "taken_at": self.taken_at,
            "machine": self.machine,
            "versions": self.versions,
            "targets_met": self.met_count,
            "targets_missed": len(self.missed),
            "seconds": self.seconds,
            "failures": [asdict(failure) for failure in self.failures],
            "left_out": self.left_out,
            "sections": sections,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Results:
        """What `to_json` wrote.

        Raises:
            ValueError: it has another format.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"format = {data.get('format')!r}: this program reads {FORMAT}")
        sections = []
        for entry in data["sections"]:
            figures = [{key: value for key, value in item.items() if key != "is_met"} for item in entry["figures"]]
            sections.append(Section.from_json({**entry, "figures": figures}))
        return cls(
            is_quick=data["is_quick"],
            taken_at=data["taken_at"],
            machine=data["machine"],
            versions=data["versions"],
            sections=sections,
            seconds=data["seconds"],
            failures=[Failure(**entry) for entry in data["failures"]],
            left_out=data["left_out"],
        )


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, as far as it is installed."""
    found = {}
    for name in ("decoupled-diloco", *DISTRIBUTIONS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def run_member(member: Member, is_quick: bool, folder: Path, more: Sequence[str] = ()) -> Section | Failure:
    """Runs one member in a process of its own and reads what it has written.

    Args:
        member: Which.
        is_quick: Fewer and smaller repetitions.
        folder: For what it writes; exists.
        more: Further arguments for it.
    """
    limit = member.seconds_max_quick if is_quick else member.seconds_max
    with (folder / "output.txt").open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            member.command(is_quick, folder, more),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reason = ""
        try:
            status = process.wait(timeout=limit)
            reason = f"it ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            reason = f"it was ended after {limit:g} seconds"
        finally:
            _end_group(process)
        if not reason:
            try:
                return member.section(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = f"its report cannot be read: {error!r}"
        output.seek(0)
        return Failure(member.name, reason, "".join(output.readlines()[-OUTPUT_LINES_KEPT:]))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what a member may have left running with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_members(
    members: Sequence[Member],
    results: Results,
    folder: Path,
    more: Mapping[str, Sequence[str]],
    told: Callable[[Member, Section | Failure | None], None],
) -> None:
    """Runs members one after the other and adds what comes of them to the results.

    Args:
        members: Which, in order.
        results: Grow.
        folder: For what the members write.
        more: Further arguments by member's name.
        told: Hears before each member (None) and after it.
    """
    for member in members:
        told(member, None)
        own = folder / member.name
        own.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        outcome = run_member(member, results.is_quick, own, more.get(member.name, ()))
        results.seconds[member.name] = round(time.monotonic() - started, 1)
        if isinstance(outcome, Failure):
            results.failures.append(outcome)
        else:
            results.sections.append(outcome)
        told(member, outcome)
