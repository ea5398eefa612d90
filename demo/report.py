"""What remains of a demo: summary.json, the picture, and a few lines for people."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from decoupled_diloco.v1 import syncer_pb2
from demo.plan import Plan
from demo.watch import Watch, duration_seconds

NOTE = "taken on shared cores; speeds of learners that share cores say nothing about speeds on machines of their own"


def summarise(plan: Plan, watch: Watch, rejoin_seconds: list[float]) -> dict[str, Any]:
    """The figures of the run as they stood at its end."""
    last = watch.samples[-1]
    run, figures = last.run, last.run.goodput
    evaluations = watch.evaluations()
    up, down = watch.transferred()
    steps = [
        duration_seconds(learner.step_duration)
        for sample in watch.samples
        for learner in sample.learners
        if learner.role == syncer_pb2.ROLE_LEARNER and learner.HasField("step_duration") and learner.state == "live"
    ]
    return {
        "note": NOTE,
        "wall_seconds": round(watch.seconds(), 1),
        "learners": list(plan.learners),
        "total_steps": plan.total_steps,
        "rounds_committed": run.rounds_committed_count,
        "rounds_abandoned": run.rounds_abandoned_count,
        "tokens_processed": figures.tokens_processed,
        "tokens_merged": round(figures.tokens_merged),
        "tokens_discarded": {cause: round(value) for cause, value in sorted(figures.tokens_discarded.items())},
        "eval_bits_per_byte_first": round(evaluations[0][1], 4) if evaluations else None,
        "eval_bits_per_byte_last": round(evaluations[-1][1], 4) if evaluations else None,
        "kills": sum(mark.action == "kill" for mark in watch.marks),
        "syncer_back_seconds": [round(seconds, 2) for seconds in watch.syncer_back_seconds],
        "rejoin_seconds": [round(seconds, 2) for seconds in rejoin_seconds],
        "goodput": round(figures.goodput, 4),
        "token_goodput": round(figures.token_goodput, 4),
        "participation": round(figures.participation, 4),
        "uptime": round(figures.uptime, 4),
        "effective_interval_steps": round(run.effective_interval_steps, 2),
        "activity_seconds": {name: round(value, 1) for name, value in sorted(figures.activity_seconds.items())},
        "median_step_ms": round(1000 * statistics.median(steps), 2) if steps else None,
        "bytes_up": up,
        "bytes_down": down,
    }


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    """Writes summary.json."""
    path = folder / "summary.json"
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return path


def draw(plan: Plan, watch: Watch) -> Path:
    """The picture: quality over tokens with the faults marked, and who was in which round."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (quality, rounds) = plt.subplots(2, 1, figsize=(10, 7.5), height_ratios=(3, 2), layout="constrained")
    colours = {name: f"C{index}" for index, name in enumerate(plan.learners)}
    _draw_quality(quality, plan, watch, colours)
    _draw_rounds(rounds, plan, watch, colours)
    path = plan.folder / "picture.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_quality(axes: Any, plan: Plan, watch: Watch, colours: dict[str, str]) -> None:
    for name in plan.learners:
        seen = [(sample.tokens, sample.learner(name)) for sample in watch.samples]
        points = [
            (tokens, learner.loss if learner.state == "live" else math.nan)
            for tokens, learner in seen
            if learner and learner.HasField("loss")
        ]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colours[name], lw=0.8, alpha=0.6, label=f"training loss, {name}"
            )
    axes.set_xlabel("tokens processed by all learners")
    axes.set_ylabel("training loss (nats per token)")
    right = axes.twinx()
    evaluations = watch.evaluations()
    if evaluations:
        right.plot(*zip(*evaluations, strict=True), "k.-", label="bits per byte of the published model")
    right.set_ylabel("bits per byte, held-out text")
    for mark in watch.marks:
        axes.axvline(mark.tokens, color=colours.get(mark.process, "black"), ls="--", lw=1)
        axes.annotate(
            f"{mark.action} {mark.process}",
            (mark.tokens, 0.98),
            xycoords=("data", "axes fraction"),
            rotation=90,
            va="top",
            ha="right" if mark.action in ("kill", "suspend") else "left",
            fontsize=8,
        )
    lines = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    axes.legend(lines, [line.get_label() for line in lines], loc="center right", fontsize=8)
    axes.set_title("Decoupled DiLoCo demo: nobody else stops")


def _draw_rounds(axes: Any, plan: Plan, watch: Watch, colours: dict[str, str]) -> None:
    for row, name in enumerate(plan.learners):
        numbers = [
            item.round for item in watch.committed() if any(member.learner_id == name for member in item.members)
        ]
        axes.plot(numbers, [row] * len(numbers), "|", color=colours[name], ms=14)
    axes.set_yticks(range(len(plan.learners)), plan.learners)
    axes.set_ylim(-0.6, len(plan.learners) - 0.4)
    axes.set_xlabel("committed round (a bar: this learner's contribution is in it)")
