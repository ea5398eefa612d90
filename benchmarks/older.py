"""Reports of benchmarks that are older than `figures.py`, as sections of the suite."""

from __future__ import annotations

from typing import Any

from benchmarks.figures import Figure, Section, Target

START_SECONDS_TARGET = 4.0
"""From the start of a learner's process to its first step, compilation cache warm, machine quiet."""


def start_section(report: dict[str, Any]) -> Section:
    """What `python -m benchmarks.start` wrote as `summary.json`."""
    figures = []
    for name, others in (("quiet", "steps of the others padded"), ("busy", "the others compute all the time")):
        found = report[name]
        target = Target("at most", START_SECONDS_TARGET) if name == "quiet" else None
        figures += [
            Figure(f"start to first step, {name}", found["first_step"], "s", target, note=others),
            Figure(
                f"start to a merged contribution, {name}", found["first_merged"], "s", high=found["first_merged_max"]
            ),
            Figure(f"processor time to first step, {name}", found["cpu_until_first_step"], "CPU-s"),
        ]
    phases = {name: report[name] for name in ("quiet", "busy")}
    return Section(
        "start",
        "A killed learner is back",
        f"A syncer and three learners of the demo's model; one is killed and started again with nothing but its id, "
        f"{report['kills']} times beside others that pause and as often beside others that compute. Programs come out "
        f"of the compilation cache. Medians.",
        tuple(figures),
        {"phases": phases},
    )


def durability_section(report: dict[str, Any]) -> Section:
    """What `python -m benchmarks.durability` wrote."""
    figures = []
    for result in report["results"]:
        kind = f"base every {result['base_interval']}"
        figures += [
            Figure(
                f"{kind}: commit",
                1000 * result["commit_seconds_median"],
                "ms",
                high=1000 * result["commit_seconds_max"],
                note=f"{result['bytes_per_commit_and_parameter']:g} bytes for each parameter",
            ),
            Figure(f"{kind}: restart", 1000 * result["restart_seconds_median"], "ms"),
        ]
    alone = report["ledger_alone"]
    figures.append(
        Figure(
            "ledger alone: commit",
            1000 * alone["commit_seconds_median"],
            "ms",
            note=f"{alone['learners']} learners registered, {alone['members']} contributions",
        )
    )
    return Section(
        "durability",
        "A durable commit, and a restart",
        f"Stores with different base intervals commit the same {report['rounds']} rounds of a fragment of "
        f"{report['parameters']:,} parameters in turn, each with fsync; medians. Every store came back equal.",
        tuple(figures),
        {"results": report["results"], "ledger_alone": alone},
    )
