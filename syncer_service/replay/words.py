"""Events, effects, differences and runs in words, for a screen."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from decoupled_diloco.core.effects import Effect
from decoupled_diloco.core.plain import tagged
from syncer_service.replay.comparison import Difference, Plain, Replay
from syncer_service.tape_file import TapeFile, TapeRecord, line_of

ROUNDS_SHOWN: Final = 5
"""Closed rounds that a summary shows."""


def in_words(value: Any) -> str:
    """A plain value in short: `CommitRound(round=3, fragment=2, ...)`."""
    if isinstance(value, Mapping):
        fields = ", ".join(f"{name}={in_words(part)}" for name, part in value.items() if name != "type")
        return f"{value['type']}({fields})" if "type" in value else "{" + fields + "}"
    if isinstance(value, list):
        return "[" + ", ".join(in_words(part) for part in value) + "]"
    return repr(value)


def event_line(record: TapeRecord) -> str:
    """Instant and event."""
    return f"{record.at:.6f}  {in_words(tagged(record.event))}"


def effect_lines(effects: Iterable[Effect]) -> Iterator[str]:
    """A line for each effect."""
    for effect in effects:
        yield f"    -> {in_words(tagged(effect))}"


def difference_lines(difference: Difference) -> Iterator[str]:
    """The first event after which a replay goes another way, and the events before."""
    yield f"the {len(difference.before)} events before it:"
    yield from (f"  {event_line(record)}" for record in difference.before)
    yield f"event {difference.number}:"
    yield f"  {event_line(difference.record)}"
    if difference.fault is not None:
        then = "it raised or hung then, too" if difference.record.effects is None else "then it did not"
        yield f"the machine raises ({then}):"
        yield from (f"  {line}" for line in "".join(traceback.format_exception(difference.fault)).splitlines())
        return
    yield from _compared(difference.record.effects or [], difference.now or [])


def _compared(then: list[Plain], now: list[Plain]) -> Iterator[str]:
    yield f"{len(then)} effects then, {len(now)} now; the first that differ:"
    equal = 0
    while equal < min(len(then), len(now)) and line_of(then[equal]) == line_of(now[equal]):
        equal += 1
    for name, effects in (("then", then), ("now", now)):
        shown = in_words(effects[equal]) if equal < len(effects) else "nothing more"
        yield f"  {name + ':':5} {equal + 1}. {shown}"
    if equal < min(len(then), len(now)) and then[equal]["type"] == now[equal]["type"]:
        names = [name for name in now[equal] if line_of(then[equal].get(name)) != line_of(now[equal][name])]
        yield f"  they differ in {', '.join(names)}"


def beginning_line(tape: TapeFile) -> str:
    """Where a tape begins, and by what it was written."""
    header = tape.header
    how = {
        "new": "a new run",
        "restored": "a run restored from its durable state",
        "captured": "a run in the middle of a process",
    }[header.beginning.began]
    missed = f"; {header.missed_count} events before it are on no tape" if header.missed_count else ""
    return f"{tape.path.name}: {how}, start {header.epoch} of the syncer, release {header.software_version}{missed}"


def summary_lines(tape: TapeFile, result: Replay) -> Iterator[str]:
    """How a replay went, and how the run stands at its end."""
    verdict = "all as recorded" if result.difference is None else "NOT as recorded"
    seconds = result.newest_at - result.first_at
    yield f"{result.event_count} events, {result.effect_count} effects in {seconds:.3f} s: {verdict}"
    if not result.is_stopped:
        yield f"end of the tape: {tape.ended}"
    if result.event_count and (result.difference is None or result.difference.fault is None):
        yield from run_lines(result)


def run_lines(result: Replay) -> Iterator[str]:
    """The run as its machine stands."""
    machine, now = result.machine, result.newest_at
    run = machine.status(now)
    yield f"run: {run.phase.value}, global step {run.global_step}; {run.reason}"
    yield (
        f"rounds: {run.rounds_committed_count} committed, {run.rounds_abandoned_count} abandoned, "
        f"{len(machine.rounds.under_way)} under way"
    )
    for item in machine.list_rounds(ROUNDS_SHOWN + len(machine.rounds.under_way), now=now):
        members = ", ".join(member.learner for member in item.members) or "nobody yet"
        yield f"  round {item.round} (fragment {item.fragment}) {item.state.value}: {members}; {item.reason}"
    figures = run.goodput
    yield (
        f"goodput {figures.goodput:.1%}, token goodput {figures.token_goodput:.1%}, "
        f"participation {figures.participation:.1%}, uptime {figures.uptime:.1%}"
    )
    for learner in machine.learners(now):
        yield (
            f"  {learner.role.value} {learner.learner} (incarnation {learner.incarnation}): {learner.state.value}, "
            f"local step {learner.local_step}, merged in {learner.rounds_merged_count} rounds"
            + (f"; {learner.reason}" if learner.reason else "")
        )
