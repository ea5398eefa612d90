"""How large a model does one syncer sustain? `python -m benchmarks.capacity`.

Measures what a syncer with its durable store does with a large fragment, one thing at a time: it takes contributions
of four learners at once, merges them, commits, serves the step to all four. `simulator.capacity` makes of these rates
the largest model for so many learners and such steps, and names what limits it. Rates can be given instead:

    python -m benchmarks.capacity --upload-gbytes-per-second 1.2 --learners 16 --step-seconds 0.5
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import psutil

from benchmarks.figures import Figure, Section, machine, of_repetitions, reported, result_path
from benchmarks.places import disk
from benchmarks.rig_learner import RigLearner
from benchmarks.scrape import readings
from benchmarks.syncer_rig import SyncerProcess, flat_schema, run_values
from decoupled_diloco.core.encoding_bits import ENCODING_BITS
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime.malloc import tune_malloc
from simulator.bandwidth import Plan
from simulator.capacity import (
    BASE_INTERVAL_COMMITS,
    RATE_FIGURES,
    RATE_OPTIONS,
    Rates,
    Sustained,
    commit_bytes,
    merge_bytes,
    sustained,
)

LEARNERS: Final = 4
"""That send and receive at once where rates are measured."""
PARAMETERS: Final = 16 << 20
PARAMETERS_QUICK: Final = 2 << 20
ROUNDS: Final = 2 * BASE_INTERVAL_COMMITS
ROUNDS_QUICK: Final = BASE_INTERVAL_COMMITS
"""A multiple, so that whole payloads have their share of the commits."""
MEMORY_SHARE: Final = 0.8
"""Of the machine's memory that a syncer may have."""
FOLDER: Final = Path("runs/capacity")
"""Outside the suite, state lies below it while rates are measured, so that commits go to this disk."""


@dataclass(slots=True)
class Measured:
    """Seconds of every round: of uploads and downloads by all learners; merge and commit on average."""

    uploads: list[float] = field(default_factory=list)
    downloads: list[float] = field(default_factory=list)
    merge: float = 0.0
    commit: float = 0.0


async def measure_rounds(folder: Path, parameter_count: int, round_count: int) -> Measured:
    """Plays rounds of one fragment with all learners in them.

    Raises:
        RuntimeError: the syncer did not start, or a contribution was not accepted.
    """
    values = run_values(
        run={"learners_expected": LEARNERS},
        quorum={"minimum": LEARNERS},
        encoding={"upload": "bf16", "download": "bf16"},
    )
    schema, found = flat_schema([parameter_count]), Measured()
    async with AsyncExitStack() as stack:
        syncer = stack.enter_context(SyncerProcess(values, store="durable", folder=folder))
        team = [await stack.enter_async_context(RigLearner(syncer, f"learner-{n}", schema)) for n in range(LEARNERS)]
        first, *others = team
        await first.initialize()
        for learner in others:
            await learner.apply_first()
        payloads = [learner.payload(0, seed=number) for number, learner in enumerate(team)]
        newest = await _round(team, payloads, Measured(), 0)  # the first one fills buffers and caches
        before = await readings(syncer.page)
        for _ in range(round_count):
            newest = await _round(team, payloads, found, newest)
        after = await readings(syncer.page)
        for part in ("merge", "commit"):
            total, count = (
                after[f"round_{part}_seconds_{x}"] - before[f"round_{part}_seconds_{x}"] for x in ("sum", "count")
            )
            setattr(found, part, total / count)
    return found


async def _round(team: Sequence[RigLearner], payloads: Sequence[memoryview], found: Measured, newest: int) -> int:
    """One round; its number. `newest`: the number of the one before."""
    asks = [await learner.asked(0, after_round=newest) for learner in team]
    started = time.perf_counter()
    work = (learner.upload(ask, data) for learner, ask, data in zip(team, asks, payloads, strict=True))
    fates = await asyncio.gather(*work)
    found.uploads.append(time.perf_counter() - started)
    if set(fates) != {Fate.ACCEPTED}:
        raise RuntimeError(f"the contributions to round {asks[0].round} came to {', '.join(fates)}")
    news = [await learner.published(0, after=ask.base) for learner, ask in zip(team, asks, strict=True)]
    started = time.perf_counter()
    await asyncio.gather(
        *(learner.download(item, held=ask.base) for learner, item, ask in zip(team, news, asks, strict=True))
    )
    found.downloads.append(time.perf_counter() - started)
    for learner, item in zip(team, news, strict=True):
        await learner.apply(item)
    return asks[0].round


def rates_of(found: Measured, parameter_count: int) -> dict[str, list[float]]:
    """GB/s by field of `Rates`: of every round for the wire, on average for merge and commit."""
    plan = Plan(parameter_count, LEARNERS)
    wire = LEARNERS * parameter_count * ENCODING_BITS["bf16"] / 8 / 1e9
    return {
        "upload": [wire / seconds for seconds in found.uploads],
        "download": [wire / seconds for seconds in found.downloads],
        "merge": [merge_bytes(plan) * parameter_count / 1e9 / found.merge],
        "commit": [commit_bytes() * parameter_count / 1e9 / found.commit],
    }


def measure(quick: bool, given: Mapping[str, float | None], plan: Plan) -> Section:
    """Measures what is not given, and says what a syncer sustains.

    Args:
        quick: a smaller fragment and fewer rounds.
        given: GB/s by field of `Rates`.
        plan: learners, schedule and step to say it for; its own size is not read.
    """
    count, round_count = (PARAMETERS_QUICK, ROUNDS_QUICK) if quick else (PARAMETERS, ROUNDS)
    known = {name: [value] for name, value in given.items() if value is not None}
    if len(known) < len(RATE_FIGURES):
        tune_malloc()
        parent = disk(FOLDER)
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            known = {**rates_of(asyncio.run(measure_rounds(Path(folder), count, round_count)), count), **known}
    return section_of(known, plan, count, round_count)


def section_of(known: Mapping[str, Sequence[float]], plan: Plan, count: int, round_count: int) -> Section:
    """The figures of rates in GB/s."""
    medians = {name: 1e9 * statistics.median(known[name]) for name in RATE_FIGURES}
    rates = Rates(**medians, memory_bytes=MEMORY_SHARE * psutil.virtual_memory().total)
    found = sustained(plan, rates)
    figures = [
        of_repetitions(RATE_FIGURES[name][1], known[name], "GB/s", note=RATE_OPTIONS[option][1].removeprefix("GB/s "))
        for option, (name, _) in RATE_OPTIONS.items()
    ]
    title = f"largest model, {plan.learner_count} learners, steps of {plan.step_seconds:g} s"
    figures.append(Figure(title, found.parameter_count / 1e6, "M parameters", note=found.limit))
    return Section(
        "capacity",
        "What one syncer sustains",
        f"{statement(found, plan)} H = {plan.interval_steps}, P = {plan.fragment_count}, tau = {plan.overlap_steps}; "
        f"{MEMORY_SHARE:.0%} of the memory. Rates of a fragment of {count / (1 << 20):g} Mi parameters and {LEARNERS} "
        f"learners on the same machine, bf16 both ways, checksums, checks of values and the durable store on; "
        f"{round_count} rounds, each part alone.",
        tuple(figures),
        {"tables": [table_of(plan, rates)], "statement": statement(found, plan)},
    )


def statement(found: Sustained, plan: Plan) -> str:
    """What a syncer sustains, in a sentence."""
    size, learners = f"{found.parameter_count / 1e6:,.0f}M parameters", f"{plan.learner_count} learners"
    return f"One syncer on this machine sustains {size} x {learners} / {plan.step_seconds:g} s; {found.limit}."


def table_of(plan: Plan, rates: Rates) -> dict[str, object]:
    """Millions of parameters for other numbers of learners and encodings of uploads."""
    columns = ["learners", *(f"{name} up" for name in ENCODING_BITS), f"limit, {list(ENCODING_BITS)[-1]} up"]
    rows: list[list[object]] = []
    for learners in (2, 8, 32, 64):
        found = [
            sustained(replace(plan, learner_count=learners, upload_bits=bits), rates) for bits in ENCODING_BITS.values()
        ]
        rows.append([str(learners), *(item.parameter_count / 1e6 for item in found), found[-1].limit])
    title = f"Largest models in millions of parameters, steps of {plan.step_seconds:g} s"
    return {"title": title, "columns": columns, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds, for a first look")
    parser.add_argument("--json", type=result_path, metavar="PATH", help="also write the figures there")
    parser.add_argument("--learners", type=int, default=8, help="learners to say it for (%(default)s)")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="their steps (%(default)s)")
    parser.add_argument("--fragments", type=int, default=24, help="P (%(default)s)")
    parser.add_argument("--interval", type=int, default=24, help="H (%(default)s)")
    parser.add_argument("--overlap", type=int, default=2, help="tau (%(default)s)")
    for option, (_, text) in RATE_OPTIONS.items():
        parser.add_argument(option, type=float, metavar="RATE", help=f"{text}; not measured then")
    options = parser.parse_args(arguments)
    given = {name: getattr(options, f"{name}_gbytes_per_second") for name in RATE_FIGURES}
    for name in ("learners", "step_seconds", "fragments", "interval", *(f"{rate}_gbytes_per_second" for rate in given)):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} {value:g}: must be above 0")
    if options.fragments > options.interval or not 0 <= options.overlap < options.interval:
        parser.error("--fragments must be at most --interval, and --overlap from 0 to below --interval")
    plan = Plan(1.0, options.learners, options.fragments, options.interval, options.overlap, options.step_seconds)
    before = machine()
    return reported(lambda: measure(options.quick, given, plan), before, options.json, options.quick)


if __name__ == "__main__":
    sys.exit(main())
