"""How far does one syncer scale in learners? `python -m benchmarks.scale`.

Up to 64 whole learners without a model (`crowd.py`), all in one process, train against a syncer in another one, with
its durable store and its tape. Fragments are small, so that what is measured is the work per message and not per byte.
A round begins every two steps. The processor time of the syncer per round is set against the number of contributors,
from the fewest to the most and back again. Then the machine goes along the tape of each run, every decision timed.
"""

from __future__ import annotations

import asyncio
import gc
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.crowd import Crowd
from benchmarks.figures import Figure, Section, Target, of_repetitions, run
from benchmarks.rig_learner import RigLearner
from benchmarks.scrape import readings
from benchmarks.syncer_rig import SyncerProcess, flat_schema, run_values
from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.core.effects import StartMerge
from decoupled_diloco.core.errors import Reason
from decoupled_diloco.core.ids import Role
from decoupled_diloco.runtime.malloc import tune_malloc
from syncer_service.tape_file import TapeFile, tape_files

LEARNERS: Final = (8, 16, 32, 64)
LEARNERS_QUICK: Final = (8, 32)
ROUNDS: Final = 8
ROUNDS_QUICK: Final = 4
"""Rounds that are measured, once everybody is in them."""
WARM_ROUNDS: Final = 3
FRAGMENTS: Final = 8
FRAGMENT_PARAMETERS: Final = 16384
STEP_SECONDS: Final = 0.5
STEPS_PER_ROUND: Final = 2
DECISION_MS_MAX: Final = 0.2
GROWTH_MAX: Final = 1.05
"""Exponent of growth from the fewest to the most contributors: 1 in proportion, 2 with their square."""
QUESTIONS: Final = 40
QUESTION_PAUSE_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """One number of learners.

    Attributes:
        learners: how many trained.
        contributors: mean members of the measured rounds.
        rounds: how many were measured.
        wall_seconds: they took.
        cpu_seconds: processor time of the syncer meanwhile.
        opened: rounds of the whole run that were opened and are not under way any more.
        committed: how many of them were committed.
        queue_highest: most events that have waited for a decision at once.
        overloaded: transfers that were refused because the syncer had no room for them.
        broken: transfers that broke.
        upload_ms: median from the header of a contribution to its fate.
        question_ms: median of a small question to the machine and back, over gRPC, while they train.
        decision_ms: median, 99th percentile and maximum of a decision of the machine.
        merge_decision_ms: median of the decisions that begin a merge.
    """

    learners: int
    contributors: float
    rounds: int
    wall_seconds: float
    cpu_seconds: float
    opened: int
    committed: int
    queue_highest: int
    overloaded: int
    broken: int
    upload_ms: float
    question_ms: float
    decision_ms: tuple[float, float, float]
    merge_decision_ms: float

    @property
    def cpu_ms_per_round(self) -> float:
        """Processor time of the syncer per round."""
        return 1e3 * self.cpu_seconds / self.rounds


@dataclass(frozen=True, slots=True)
class Line:
    """The straight line through points that has the least squares of relative deviations.

    Attributes:
        base: value at 0.
        slope: growth.
        deviation: largest deviation of a point from it, as a share of the line's value there.
    """

    base: float
    slope: float
    deviation: float


def line_through(points: Sequence[tuple[float, float]]) -> Line:
    """Fits a straight line to points (x, y), y > 0, each deviation relative to the point's y.

    Raises:
        ValueError: there are fewer than two different x.
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if spread == 0:
        raise ValueError("a line needs points with different x")
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    base = mean_y - slope * mean_x
    return Line(base, slope, max(abs(y / (base + slope * x) - 1) for x, y in points))


async def measure_learners(learner_count: int, round_count: int, step_seconds: float = STEP_SECONDS) -> Measured:
    """Lets so many learners train until so many rounds with all of them were measured.

    Raises:
        RuntimeError: the syncer did not start, or a learner failed.
        TimeoutError: the rounds did not come.
    """
    values = run_values(
        run={"learners_expected": learner_count, "learners_max": max(LEARNERS), "total_steps": 0},
        fragments={"count": FRAGMENTS, "interval_steps": FRAGMENTS * STEPS_PER_ROUND, "overlap_steps": 4},
        encoding={"upload": "bf16", "download": "bf16"},
        deadlines={"last_call_seconds_max": 1.0, "last_call_seconds_min": 0.1},
    )
    schema = flat_schema([FRAGMENT_PARAMETERS] * FRAGMENTS)
    with SyncerProcess(values, store="durable") as syncer:
        async with Crowd(syncer, learner_count, schema, step_seconds) as crowd:
            await crowd.committed(WARM_ROUNDS, contributors=learner_count)
            first, cpu, started = max(crowd.members), syncer.cpu_seconds(), time.perf_counter()
            crowd.upload_seconds.clear()
            await crowd.committed(len(crowd.members) + round_count)
            wall, cpu = time.perf_counter() - started, syncer.cpu_seconds() - cpu
            members = [count for number, count in sorted(crowd.members.items()) if number > first]
            metrics = await readings(syncer.page)
            questions = await question_seconds(syncer, schema)
        decisions, merges = decision_seconds(syncer.folder / "state")
    closed = {outcome: int(metrics[f'rounds_total{{outcome="{outcome}"}}']) for outcome in ("committed", "abandoned")}
    return Measured(
        learners=learner_count,
        contributors=statistics.fmean(members),
        rounds=len(members),
        wall_seconds=wall,
        cpu_seconds=cpu,
        opened=sum(closed.values()),
        committed=closed["committed"],
        queue_highest=int(metrics["queue_events_highest"]),
        overloaded=crowd.failures[Reason.OVERLOADED.value],
        broken=crowd.failures["UNREACHABLE"],
        upload_ms=1e3 * statistics.median(crowd.upload_seconds),
        question_ms=1e3 * statistics.median(questions),
        decision_ms=spread_ms(decisions),
        merge_decision_ms=1e3 * statistics.median(merges),
    )


async def question_seconds(syncer: SyncerProcess, schema: Schema) -> list[float]:
    """How long small questions of somebody who does not train take: gRPC, the event loop, the machine, and back."""
    async with RigLearner(syncer, "probe", schema, Role.OBSERVER) as probe:
        await probe.echo()
        found = []
        for _ in range(QUESTIONS):
            await asyncio.sleep(QUESTION_PAUSE_SECONDS)  # spread over the rounds
            found.append(await probe.echo())
    return found


def decision_seconds(state_dir: Path) -> tuple[list[float], list[float]]:
    """How long the machine takes for every event on the tape, and for those that begin a merge.

    Raises:
        TapeError: the tape cannot be read.
        ValueError: there is none.
    """
    every, merges = [], []
    for path in tape_files(state_dir / "tape"):
        tape = TapeFile(path)
        machine, records = tape.machine(), list(tape)
        gc.collect()
        for record in records:
            started = time.perf_counter()
            effects = machine.handle(record.event, record.at)
            every.append(time.perf_counter() - started)
            if any(isinstance(effect, StartMerge) for effect in effects):
                merges.append(every[-1])
    if not merges:
        raise ValueError(f"{state_dir}: there is no merge on its tape")
    return every, merges


def spread_ms(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(seconds)
    return tuple(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 1.0))  # type: ignore[return-value]


def measure(quick: bool) -> Section:
    """Measures every number of learners, from the fewest to the most and back."""
    tune_malloc()
    counts, round_count = (LEARNERS_QUICK, ROUNDS_QUICK) if quick else (LEARNERS, ROUNDS)
    step_seconds = STEP_SECONDS / 2 if quick else STEP_SECONDS
    order = counts if quick else (*counts, *reversed(counts))
    return section_of([asyncio.run(measure_learners(count, round_count, step_seconds)) for count in order])


def section_of(found: Sequence[Measured]) -> Section:
    """The figures of what was measured, in any order."""
    sizes = [[item for item in found if item.learners == count] for count in sorted({item.learners for item in found})]
    points = _points(sizes)
    line = line_through(points)
    largest = sizes[-1]
    opened, committed = sum(item.opened for item in found), sum(item.committed for item in found)
    at, every = f"{largest[0].learners} learners", found[0].wall_seconds / found[0].rounds
    decisions = [item.decision_ms[0] for item in largest]
    figures = [
        Figure("rounds that were committed", 100 * committed / opened, "%", Target("at least", 100)),
        Figure("transfers refused for want of room", sum(item.overloaded for item in found), "", Target("at most", 0)),
        Figure("transfers that broke", sum(item.broken for item in found), "", Target("at most", 0)),
        Figure(
            "events that waited for a decision, at most",
            max(item.queue_highest for item in found),
            "",
            Target("at most", 4095),
            note="the queue takes 4096",
        ),
        Figure(f"learners in a round, {at}", 100 * points[-1][0] / largest[0].learners, "%"),
        of_repetitions(f"processor time per round, {at}", [item.cpu_ms_per_round for item in largest], "CPU-ms"),
        Figure("processor time for one more contributor", line.slope, "CPU-ms", note="slope of the straight line"),
        Figure("processor time for a round of nobody", line.base, "CPU-ms", note="where that line begins"),
        Figure(
            "largest deviation from the straight line",
            100 * line.deviation,
            "%",
            note="fewer than proportional where many come at once",
        ),
        Figure(
            "growth with the contributors",
            growth(points),
            "",
            Target("at most", GROWTH_MAX),
            note="exponent, 1 is linear",
        ),
        of_repetitions(f"decision of the machine, {at}, median", decisions, "ms", Target("at most", DECISION_MS_MAX)),
        of_repetitions(f"the same, 99th percentile, {at}", [item.decision_ms[1] for item in largest], "ms"),
        of_repetitions(f"the decision to merge, {at}", [item.merge_decision_ms for item in largest], "ms"),
        of_repetitions(f"a question over gRPC and back, {at}", [item.question_ms for item in largest], "ms"),
        of_repetitions(f"contribution, header to fate, {at}", [item.upload_ms for item in largest], "ms"),
        of_repetitions("the same, fewest learners", [item.upload_ms for item in sizes[0]], "ms"),
    ]
    return Section(
        "scale",
        "Many learners on one syncer",
        f"{', '.join(str(size[0].learners) for size in sizes)} learners without a model, all in one process; on the "
        f"same machine the syncer with its durable store and its tape. {FRAGMENTS} fragments of "
        f"{FRAGMENT_PARAMETERS} parameters, bf16 both ways, a round every {every:.1f} s, "
        f"{found[0].rounds} rounds measured each, {len(largest)} times. Processor time is the syncer's, all threads.",
        tuple(figures),
        {"tables": [table_of_sizes(sizes, line)], "measured": [asdict(item) for item in found]},
    )


def table_of_sizes(sizes: Sequence[Sequence[Measured]], line: Line) -> dict[str, object]:
    """What was measured by number of learners, as a table of a section."""
    columns = ["learners", "in a round", "CPU-ms per round", "on the line", "queue, most", "decision ms", "99 %"]
    rows = [
        [
            size[0].learners,
            contributors,
            cpu_ms,
            line.base + line.slope * contributors,
            max(item.queue_highest for item in size),
            statistics.median(item.decision_ms[0] for item in size),
            statistics.median(item.decision_ms[1] for item in size),
        ]
        for size, (contributors, cpu_ms) in zip(sizes, _points(sizes), strict=True)
    ]
    return {"title": "By number of learners", "columns": columns, "rows": rows}


def growth(points: Sequence[tuple[float, float]]) -> float:
    """The exponent by which y grows with x from the first point to the last."""
    (x_first, y_first), (x_last, y_last) = points[0], points[-1]
    return math.log(y_last / y_first) / math.log(x_last / x_first)


def _points(sizes: Sequence[Sequence[Measured]]) -> list[tuple[float, float]]:
    """Contributors and processor milliseconds per round, by number of learners."""
    return [(_mean(size, "contributors"), _mean(size, "cpu_ms_per_round")) for size in sizes]


def _mean(items: Sequence[Measured], name: str) -> float:
    return statistics.fmean(getattr(item, name) for item in items)


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
