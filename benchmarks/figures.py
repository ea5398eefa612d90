"""What a benchmark reports: figures with units, targets and the conditions that they were taken under.

A benchmark of the suite is a module with one function `measure(quick) -> Section` that ends in

    if __name__ == "__main__":
        sys.exit(run(measure, __doc__))

so that `python -m benchmarks.NAME` prints its figures, `--quick` takes fewer and smaller repetitions, `--json PATH`
writes what the suite (`python -m benchmarks`) puts together. Machines are shared and noisy: what is compared takes
turns within one run, and only medians of repetitions and ratios between them carry a target.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.ending import ended_by_signals, status_of
from benchmarks.places import PlaceError, check_writable

Bound = Literal["at least", "at most"]

SIGNIFICANT_DIGITS: Final = 3
"""Digits of a printed figure; more are noise."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should reach.

    Attributes:
        bound: which side is good.
        value: the limit, in the figure's unit; the limit itself is good.
    """

    bound: Bound
    value: float

    def is_met_by(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return value >= self.value if self.bound == "at least" else value <= self.value


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value.

    Attributes:
        name: what was measured, unique within its section, for example "upload, float32: share of raw TCP".
        value: the median of the repetitions, or a count.
        unit: "x" for ratios, else for example "GB/s", "CPU-s/GiB", "ms", "%", "MiB".
        target: what it should reach; None: for information.
        low: smallest repetition, or lower end of an interval that `note` names; None: there was one only.
        high: largest repetition, or upper end.
        note: what one must know to read it, in a few words.
    """

    name: str
    value: float
    unit: str
    target: Target | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return self.target.is_met_by(self.value) if self.target is not None else None


@dataclass(frozen=True, slots=True)
class Section:
    """What one benchmark found out.

    Attributes:
        name: the module's name below `benchmarks`.
        title: what it is about, a phrase for a heading.
        conditions: sizes, repetitions and work done, in sentences, so that the figures can be read without the code.
        figures: in the order in which to show them.
        details: free data for pictures and for people, in types of JSON. "tables", if there, is a list of tables that
            are shown below the figures: {"title": ..., "columns": [...], "rows": [[...], ...]}, texts or numbers.
    """

    name: str
    title: str
    conditions: str
    figures: tuple[Figure, ...]
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The section in types of JSON; `from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Section:
        """A section that `to_json` wrote."""
        figures = (
            Figure(**{**entry, "target": Target(**entry["target"]) if entry["target"] else None})
            for entry in data["figures"]
        )
        return cls(**{**data, "figures": tuple(figures)})


def of_repetitions(
    name: str, values: Sequence[float], unit: str, target: Target | None = None, note: str = ""
) -> Figure:
    """A figure from repetitions: their median, with smallest and largest."""
    return Figure(name, statistics.median(values), unit, target, min(values), max(values), note)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def rounded(value: float) -> str:
    """A value with three significant digits and no exponent."""
    if value == 0:
        return "0"
    digits = max(0, SIGNIFICANT_DIGITS - 1 - int(f"{abs(value):e}".split("e")[1]))
    return f"{value:,.{digits}f}"


def table_of(figures: Iterable[Figure], is_quick: bool = False) -> Table:
    """Figures as a table for a terminal; those of a quick run are not held against their targets."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure")
    for heading in ("value", "range", target_heading(is_quick)):
        table.add_column(heading, justify="right")
    table.add_column("")
    for figure in figures:
        spread = "" if figure.low is None else f"{rounded(figure.low)} to {rounded(figure.high or 0)}"
        target = "" if figure.target is None else f"{figure.target.bound} {figure.target.value:g}"
        mark = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[None if is_quick else figure.is_met]
        name = figure.name + (f" [dim]({figure.note})[/]" if figure.note else "")
        table.add_row(name, f"{rounded(figure.value)} {figure.unit}", spread, target, mark)
    return table


def target_heading(is_quick: bool) -> str:
    """What stands above targets: those of a full run do not judge a quick one, whose sizes they are not for."""
    return "target of a full run" if is_quick else "target"


def show(section: Section, console: Console, is_quick: bool = False) -> None:
    """Prints a section, of a quick run or a full one."""
    console.print(f"\n[bold]{section.title}[/]\n[dim]{section.conditions}[/]", highlight=False)
    console.print(table_of(section.figures, is_quick), highlight=False)
    for data in section.details.get("tables", ()):
        console.print(f"\n{data['title']}", highlight=False)
        console.print(_table_of_texts(data["columns"], data["rows"]), highlight=False)


def cell(value: str | float | None) -> str:
    """A cell of a table: texts as they are, numbers with three significant digits, nothing for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else rounded(value)


def _table_of_texts(columns: Sequence[str], rows: Sequence[Sequence[str | float | None]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(columns):
        is_number = any(isinstance(row[index], int | float) for row in rows)
        table.add_column(heading, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def result_path(text: str) -> Path:
    """Of an option that names a file for figures: its folder is made and written to before anything is measured.

    Raises:
        argparse.ArgumentTypeError: it cannot be.
    """
    path = Path(text)
    try:
        if path.is_dir():
            raise PlaceError(f"{path} is a folder; a file is right")
        check_writable(path.parent)
    except PlaceError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def run(measure: Callable[[bool], Section], description: str | None, arguments: Sequence[str] | None = None) -> int:
    """The main program of a benchmark. Returns the exit status: 0 also where a target is missed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller repetitions, for a first look")
    parser.add_argument("--json", type=result_path, metavar="PATH", help="also write the figures there")
    options = parser.parse_args(arguments)
    before = machine()
    return reported(lambda: measure(options.quick), before, options.json, options.quick)


def reported(measure: Callable[[], Section], on: dict[str, Any], path: Path | None, is_quick: bool) -> int:
    """Measures and reports; returns the exit status: 0, or that of a signal that came meanwhile."""
    try:
        with ended_by_signals():
            section = measure()
    except KeyboardInterrupt as error:
        print("told to end before everything was measured: there are no figures", file=sys.stderr)
        return status_of(error)
    report(section, on, path, is_quick)
    return 0


def report(section: Section, on: dict[str, Any], path: Path | None, is_quick: bool = False) -> None:
    """Prints a section, and writes it with the machine that it was taken on, if a path is given."""
    show(section, Console(width=None if sys.stdout.isatty() else 150), is_quick)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**section.to_json(), "machine": on}, indent=1) + "\n")
