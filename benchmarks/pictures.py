"""Pictures of the suite's results, one for each subject that a person gets something from.

A subject is drawn from the figures and details of a section by name; a section without them is left without a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas

from benchmarks.figures import Figure, Section, rounded

Maker = Callable[[Section, bool], Canvas | None]
"""Draws a section, of a quick run or a full one."""

OVERVIEW: Final = "targets"
OURS: Final = "#2b6cb0"
OTHERS: Final = "#a0aec0"
GOOD: Final = "#2f855a"
BAD: Final = "#c53030"
WIDTH_INCHES: Final = 9.0
RATIO_RANGE: Final = (0.1, 10.0)
"""What the overview of targets shows; a longer bar is cut, its value stands beside it."""
LABEL_SHARE: Final = 0.12
"""Of an axis, what a bar's label takes at most; it gives way to a target that lies so near."""
QUICK_TITLE: Final = "quick run, small sizes: targets are those of a full run, for orientation only"


def draw(sections: Sequence[Section], folder: Path, is_quick: bool) -> dict[str, list[str]]:
    """Writes all pictures that the sections allow, and removes the suite's others.

    Args:
        sections: What was measured.
        folder: Exists.
        is_quick: Small sizes, whose figures do not meet or miss targets.

    Returns:
        Names of files by section; those of all sections together under "".
    """
    drawn: dict[str, list[str]] = {}
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for section in sections:
            for subject, make in SUBJECTS.get(section.name, {}).items():
                if (canvas := make(section, is_quick)) is not None:
                    _save(canvas, folder / f"{subject}.png", is_quick)
                    drawn.setdefault(section.name, []).append(f"{subject}.png")
        if (canvas := targets(sections, is_quick)) is not None:
            _save(canvas, folder / f"{OVERVIEW}.png", is_quick)
            drawn[""] = [f"{OVERVIEW}.png"]
    known = {f"{subject}.png" for subjects in (*SUBJECTS.values(), (OVERVIEW,)) for subject in subjects}
    for name in known - {name for names in drawn.values() for name in names}:
        (folder / name).unlink(missing_ok=True)
    return drawn


def _save(canvas: Canvas, path: Path, is_quick: bool) -> None:
    if is_quick:
        canvas.suptitle(QUICK_TITLE, fontsize=9, y=0.92, va="bottom")
    canvas.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})


def _canvas(rows: int) -> Canvas:
    return Canvas(figsize=(WIDTH_INCHES, 1.2 + 0.3 * max(rows, 2)))


def targets(sections: Sequence[Section], is_quick: bool = False) -> Canvas | None:
    """How every figure stands to its target: to the right of the line is better."""
    named = [(section, figure) for section in sections for figure in section.figures if figure.target is not None]
    shown = [(section, figure, score) for section, figure in named if (score := standing(figure)) is not None]
    if not shown:
        return None
    canvas = _canvas(len(shown))
    axes = canvas.subplots()
    for row, (_, figure, score) in enumerate(shown):
        end = min(max(score, RATIO_RANGE[0]), RATIO_RANGE[1])
        axes.barh(row, end - 1, left=1, color=_colour(figure, is_quick), height=0.7)
        text = f" {rounded(figure.value)} {figure.unit}"
        axes.text(max(end, 1), row, text, va="center", ha="left", fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(*RATIO_RANGE)
    axes.set_yticks(range(len(shown)), [f"{section.name}: {figure.name}" for section, figure, _ in shown], fontsize=7)
    axes.invert_yaxis()
    to_left = "worse" if is_quick else "the target is missed"
    axes.set_xlabel(f"times better than the target (a bar to the left: {to_left})")
    return canvas


def standing(figure: Figure) -> float | None:
    """How many times better than its target a figure is; None if one of the two is not above 0."""
    if figure.target is None or figure.value <= 0 or figure.target.value <= 0 or not math.isfinite(figure.value):
        return None
    ratio = figure.value / figure.target.value
    return ratio if figure.target.bound == "at least" else 1 / ratio


def peers(section: Section, is_quick: bool = False) -> Canvas | None:
    """Speed, processor time and memory of every way side by side, ours among them."""
    ways: list[dict[str, Any]] = section.details.get("ways", [])
    if not ways:
        return None
    canvas = Canvas(figsize=(WIDTH_INCHES + 3, 1.2 + 0.35 * len(ways)))
    panels = (
        ("gb_per_second", "GB/s, there and back"),
        ("cpu_seconds_per_gib", "CPU-s/GiB, both ends"),
        ("peak_mib", "MiB at the peak, both processes"),
    )
    for axes, (key, label) in zip(canvas.subplots(1, len(panels), sharey=True), panels, strict=True):
        values = [way[key] for way in ways]
        colours = [OURS if way["kind"] == "ours" else OTHERS for way in ways]
        axes.barh(range(len(ways)), values, color=colours, height=0.7)
        for row, value in enumerate(values):
            axes.text(value, row, f" {rounded(value)}", va="center", fontsize=7)
        axes.set_xlabel(label)
        axes.set_xlim(0, 1.2 * max(values))
        axes.set_yticks(
            range(len(ways)),
            [way["name"] if way["kind"] == "ours" else f"{way['name']} ({way['kind']})" for way in ways],
        )
    canvas.axes[0].invert_yaxis()
    return canvas


def bars(unit: str, label: str, wanted: str = "") -> Maker:
    """A picture of all figures of one unit, with their ranges and targets.

    Args:
        unit: Of the figures.
        label: Of the axis.
        wanted: Only figures whose names have this in them.
    """

    def make(section: Section, is_quick: bool = False) -> Canvas | None:
        shown = [figure for figure in section.figures if figure.unit == unit and wanted in figure.name]
        if not shown:
            return None
        canvas = _canvas(len(shown))
        axes = canvas.subplots()
        widest = max(max(figure.value, figure.high or 0, _target_value(figure)) for figure in shown)
        for row, figure in enumerate(shown):
            axes.barh(row, figure.value, color=_colour(figure, is_quick), height=0.7)
            if figure.low is not None and figure.high is not None:
                axes.plot([figure.low, figure.high], [row, row], color="black", linewidth=0.8)
            if figure.target is not None:
                axes.plot([figure.target.value] * 2, [row - 0.45, row + 0.45], color="black", linestyle=":")
            end = max(figure.value, figure.high or 0)
            if end <= _target_value(figure) < end + LABEL_SHARE * widest:
                end = _target_value(figure)
            axes.text(end, row, f"  {rounded(figure.value)}", va="center", fontsize=7)
        axes.set_yticks(range(len(shown)), [figure.name for figure in shown])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel(f"{label} (line: range; dotted: target)")
        return canvas

    return make


def _target_value(figure: Figure) -> float:
    return figure.target.value if figure.target is not None else 0.0


def _colour(figure: Figure, is_quick: bool) -> str:
    return {True: GOOD, False: BAD, None: OURS}[None if is_quick else figure.is_met]


def stages(section: Section, is_quick: bool = False) -> Canvas | None:
    """Time by stage in one bar, in the order of the stages: details["stages_ms"] is {stage: milliseconds}."""
    spent: dict[str, float] = section.details.get("stages_ms", {})
    if not spent:
        return None
    canvas = Canvas(figsize=(WIDTH_INCHES, 2.2))
    axes = canvas.subplots()
    left = 0.0
    for index, (stage, milliseconds) in enumerate(spent.items()):
        label = f"{stage}: {rounded(milliseconds)} ms"
        axes.barh(0, milliseconds, left=left, color=f"C{index % 10}", height=0.6, label=label)
        left += milliseconds
    axes.set_yticks([])
    axes.set_xlim(0, left or 1)
    axes.set_xlabel("ms, medians of the stages")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=2, fontsize=7, frameon=False)
    return canvas


SUBJECTS: Final[dict[str, dict[str, Maker]]] = {
    "peers": {"peers": peers},
    "wire": {"wire": bars("GB/s", "GB/s"), "wire-shares": bars("x", "times the limit or the idle rate")},
    "arithmetic": {"merge": bars("GB/s", "GB/s read and written"), "memcpy-shares": bars("x", "x", "share of memcpy")},
    "overlap": {"overlap": bars("%", "% of a step"), "overlap-parts": bars("ms a step", "ms a step")},
    "latency": {"latency": stages},
    "memory": {"memory": bars("MiB", "MiB")},
    "shaped": {"gain": bars("x", "times float32's values a second on 1 Gbit/s")},
    "capacity": {"capacity": bars("GB/s", "GB/s")},
    "quality": {"quality": bars("%", "% of float32's loss")},
}
"""Pictures by section and name of the file."""
