"""What runs of the suite found out, as it is kept: `benchmarks/results/latest.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, Section, machine

DISTRIBUTIONS: Final = ("grpcio", "protobuf", "numpy", "ml_dtypes", "jax", "jaxlib", "xxhash", "pyarrow", "safetensors")
"""Whose versions stand beside the figures."""

FORMAT: Final = 2
"""Of the file of results; goes up when a reader of an older one would misread it."""


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


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of what the figures depend on, as far as it is installed."""
    found = {}
    for name in ("decoupled-diloco", *DISTRIBUTIONS):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Origin:
    """Under what a section was measured.

    Attributes:
        taken_at: when its member had ended, UTC, ISO 8601.
        machine: what it ran on.
        versions: of what the figures depend on, by distribution.
    """

    taken_at: str
    machine: dict[str, Any]
    versions: dict[str, str]


@dataclass(slots=True)
class Results:
    """What a run of the suite found out, and what it has left standing of earlier ones.

    Attributes:
        is_quick: fewer and smaller repetitions, in every section; targets are not for them.
        taken_at: when the newest run began, UTC, ISO 8601.
        machine: what it ran on.
        versions: of what the figures depend on, by distribution.
        sections: of the members that succeeded.
        origins: of the sections, by name.
        seconds: how long each member took, by name.
        failures: members that came to nothing in the newest run.
        left_out: members that have no section and have not failed.
    """

    is_quick: bool
    taken_at: str = field(default_factory=now)
    machine: dict[str, Any] = field(default_factory=machine)
    versions: dict[str, str] = field(default_factory=lambda: versions())
    sections: list[Section] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, section: Section) -> None:
        """Takes what a member has just measured."""
        self.sections.append(section)
        self.origins[section.name] = Origin(now(), self.machine, self.versions)

    def over(self, earlier: Results | None, names: Sequence[str]) -> Results:
        """These results, and the sections of earlier ones that were not measured again.

        Args:
            earlier: Of the same kind, quick or not; None: there are none.
            names: Of all members, in the order in which to show them.
        """
        found = {section.name: section for section in (earlier.sections if earlier else [])}
        found |= {section.name: section for section in self.sections}
        origins = {**(earlier.origins if earlier else {}), **self.origins}
        seconds = {**(earlier.seconds if earlier else {}), **self.seconds}
        failed = {failure.name for failure in self.failures}
        order = [*names, *(name for name in found if name not in names)]
        return Results(
            is_quick=self.is_quick,
            taken_at=self.taken_at,
            machine=self.machine,
            versions=self.versions,
            sections=[found[name] for name in order if name in found],
            origins={name: origins[name] for name in order if name in found},
            seconds={name: seconds[name] for name in order if name in seconds},
            failures=list(self.failures),
            left_out=[name for name in names if name not in found and name not in failed],
        )

    @property
    def missed(self) -> list[tuple[Section, Figure]]:
        """Figures that miss their targets; none in a quick run, whose sizes the targets are not for."""
        return [(section, figure) for section, figure in self._judged() if figure.is_met is False]

    @property
    def met_count(self) -> int:
        """Figures that reach their targets; 0 in a quick run."""
        return sum(figure.is_met is True for _, figure in self._judged())

    def _judged(self) -> list[tuple[Section, Figure]]:
        return [] if self.is_quick else [(section, figure) for section in self.sections for figure in section.figures]

    def to_json(self) -> dict[str, Any]:
        """All of it in types of JSON, with "is_met" beside every figure; `from_json` reads it back.

        "is_met" is null without a target and in a quick run.
        """
        sections = []
        for section in self.sections:
            data = section.to_json()
            for entry, figure in zip(data["figures"], section.figures, strict=True):
                entry["is_met"] = None if self.is_quick else figure.is_met
            sections.append({**data, **asdict(self.origins[section.name])})
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
        sections, origins = [], {}
        for entry in map(dict, data["sections"]):
            figures = [{key: value for key, value in item.items() if key != "is_met"} for item in entry["figures"]]
            origins[entry["name"]] = Origin(*(entry.pop(key) for key in ("taken_at", "machine", "versions")))
            sections.append(Section.from_json({**entry, "figures": figures}))
        return cls(
            is_quick=data["is_quick"],
            taken_at=data["taken_at"],
            machine=data["machine"],
            versions=data["versions"],
            sections=sections,
            origins=origins,
            seconds=data["seconds"],
            failures=[Failure(**entry) for entry in data["failures"]],
            left_out=data["left_out"],
        )


def read(path: Path, is_quick: bool) -> Results | None:
    """Results that stand in a file, to which a run of a kind may add; None: there is no file.

    Raises:
        ValueError: they cannot be read, or are of the other kind.
    """
    if not path.exists():
        return None
    try:
        found = Results.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no results that this program can add to ({error}): move it away") from error
    if found.is_quick != is_quick:
        kinds = ("a full run", "a quick run")
        raise ValueError(f"{path} is of {kinds[found.is_quick]}, and {kinds[is_quick]} would take its place")
    return found
