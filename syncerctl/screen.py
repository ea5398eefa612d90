"""The run, learners and rounds for people: words first, tables below, no wider or longer than it has to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

STATUS_LEARNERS_MAX: Final = 10
"""Learners that `status` shows, worst first, so that it fits one screen."""

Plain = dict[str, Any]

_TONES: Final = {
    "live": "green",
    "running": "green",
    "committed": "green",
    "finished": "green",
    "lost": "red",
    "abandoned": "red",
    "left": "dim",
}


def show_status(console: Console, run: Plain, learners: Sequence[Plain]) -> None:
    """The run in words and figures, and its learners."""
    steps = f"step {run['global_step']:,}" + (f" of {run['total_steps']:,}" if run["total_steps"] else "")
    uptime = _seconds(run["uptime_seconds"])
    console.print(f"[bold]{escape(run['run_id'])}[/] · {_toned(run['phase'])} · {steps} · syncer up {uptime}")
    console.print(escape(run["reason"] or "all rounds are under way"))
    for warning in run["warnings"]:
        console.print(f"[yellow]warning: {escape(warning)}[/]")
    console.print()
    goodput = run["goodput"]
    console.print(
        f"goodput {goodput['goodput']:.1%}   token goodput {goodput['token_goodput']:.1%}   "
        f"participation {goodput['participation']:.1%}   uptime {goodput['uptime']:.1%}"
    )
    console.print(
        f"learners {run['learners_live_count']} live of {run['learners_registered_count']} registered, "
        f"{run['learners_participating_count']} in the newest round   "
        f"rounds {run['rounds_committed_count']:,} committed, {run['rounds_abandoned_count']:,} abandoned   "
        f"H {run['effective_interval_steps']:.1f}"
    )
    loss = [] if run["loss"] is None else [f"training loss {run['loss']:.4g}"]
    redone = [f"{goodput['steps_redone']:,} steps redone"] if goodput["steps_redone"] else []
    console.print("   ".join([f"tokens {goodput['tokens_processed']:,} processed", *redone, *loss]))
    if run["evaluation"]:
        ordered = sorted(run["evaluation"].items(), key=lambda item: (item[0] != "loss", item[0]))
        figures = [f"{_figure_name(name)} {value:.4g}" for name, value in ordered]
        console.print("   ".join([f"evaluated at step {run['evaluation_global_step']:,}:", *figures]), markup=False)
    console.print()
    show_learners(console, learners[:STATUS_LEARNERS_MAX])
    if len(learners) > STATUS_LEARNERS_MAX:
        console.print(f"and {len(learners) - STATUS_LEARNERS_MAX} more: syncerctl learners")


def _figure_name(name: str) -> str:
    """An evaluation's loss is of data that nobody trains on; the training loss is another figure."""
    return "held-out loss" if name == "loss" else name.replace("_", " ")


def show_learners(console: Console, learners: Sequence[Plain]) -> None:
    """A line for each learner."""
    if not learners:
        console.print("no learner has joined yet")
        return
    table = _table("learner", "state", ">step", ">step time", ">tokens/s", ">loss", ">rounds", ">behind", "why")
    for learner in learners:
        name = learner["learner_id"] + (" (observer)" if learner["role"] == "observer" else "")
        table.add_row(
            escape(name),
            _toned(learner["state"]),
            f"{learner['local_step']:,}",
            _seconds(learner["step_seconds"]),
            f"{learner['tokens_per_second']:,.0f}",
            "-" if learner["loss"] is None else f"{learner['loss']:.4g}",
            f"{learner['rounds_merged_count']:,}",
            f"{learner['rounds_behind_count']:,}",
            escape(learner["reason"]),
        )
    console.print(table)


def show_rounds(console: Console, rounds: Sequence[Plain]) -> None:
    """A line for each round."""
    if not rounds:
        console.print("no round has been opened yet")
        return
    table = _table(">round", ">fragment", ">global step", "state", "members", ">merge", "why")
    for item in rounds:
        absent = "".join(f"; without {a['learner_id']}: {a['reason']}" for a in item["absentees"])
        table.add_row(
            str(item["round"]),
            str(item["fragment"]),
            f"{item['global_step']:,}",
            _toned(item["state"]),
            escape(", ".join(member["learner_id"] for member in item["members"]) or "-"),
            _seconds(item["merge_seconds"]),
            escape(item["reason"] + absent),
        )
    console.print(table)


def show_checkpoints(console: Console, checkpoints: Sequence[Plain], unreadable: Sequence[str]) -> None:
    """A line for each checkpoint."""
    if checkpoints:
        table = _table("checkpoint", "made at", ">step", ">timeline", ">rounds", ">size", "by", "why")
        for column in table.columns[:6]:
            column.no_wrap = True
        for item in checkpoints:
            table.add_row(
                escape(item["checkpoint_id"]),
                escape(_minute(item["created_at"])),
                f"{item['global_step']:,}",
                str(item["timeline"]),
                f"{item['rounds_committed_count']:,}",
                _bytes(item["payload_bytes"]),
                "itself" if item["automatic"] else "operator",
                escape(item["reason"]),
            )
        console.print(table)
    else:
        console.print("there is no checkpoint yet")
    for text in unreadable:
        console.print(f"[yellow]unreadable: {escape(text)}[/]")


def show_checkpoint(console: Console, item: Plain) -> None:
    """One checkpoint in words."""
    reason = f": {item['reason']}" if item["reason"] else ""
    console.print(
        f"{item['checkpoint_id']} of run {item['run_id']}, made at {item['created_at']}{reason}\n"
        f"global step {item['global_step']:,}, timeline {item['timeline']}, "
        f"{item['rounds_committed_count']:,} rounds committed, {_bytes(item['payload_bytes'])}",
        markup=False,
    )
    versions = [f"{version['timeline']}.{version['number']}" for version in item["versions"]]
    console.print(f"versions by fragment: {' '.join(versions)}", markup=False)


def _minute(time: str) -> str:
    """2026-11-30T18:04:59.123+00:00 -> 2026-11-30 18:04Z."""
    return time[:16].replace("T", " ") + ("Z" if time.endswith("+00:00") else time[-6:])


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _table(*columns: str) -> Table:
    """A table without lines; columns that start with ">" hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _toned(word: str) -> str:
    return f"[{_TONES.get(word, 'yellow')}]{word}[/]"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
