"""What an encoding of contributions costs in quality: `python -m benchmarks.quality`.

The demo's model is trained by four learners in virtual time (`virtual_run.py`) once for each encoding and seed, in as
many threads as there are cores. A seed stands for initial parameters and order of data, which are the same for every
encoding: so the loss of each run is compared with that of the float32 run of its seed, and what seeds differ in falls
out. Shown is the mean of these differences with its 95 % interval (Student's t on the differences).

    python -m benchmarks.quality --seeds 8 --steps 576 --keep runs/quality.jsonl

trains longer; with `--keep` it goes on where an earlier call was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, Section, Target, machine, reported, result_path
from benchmarks.virtual_run import Model, VirtualRun
from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.core.policy import Policy
from learner_service.jax_setup import set_up_jax
from learner_service.workload import Workload, WorkloadContext, load_workload

LEARNERS: Final = 4
LOSS_PERCENT_MAX: Final = 0.5
"""More than float32's loss by so much is too much for int4."""
T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
SEEDS_MAX: Final = len(T_95) + 1
CACHE: Final = Path("~/.cache/decoupled-diloco")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to write contributions."""

    name: str
    encoding: str
    error_feedback: bool = False


REFERENCE: Final = Variant("float32", "float32")
VARIANTS: Final = (
    REFERENCE,
    Variant("bf16", "bf16"),
    Variant("int8", "int8"),
    Variant("int4", "int4"),
    Variant("int4 with error feedback", "int4", error_feedback=True),
)
LIMITED: Final = ("int4",)
"""Variants with a target."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained.

    Attributes:
        seeds: runs of each variant, 2 to `SEEDS_MAX`.
        steps: global steps of a run.
        factory: the workload; its evaluation says "loss".
        options: of the workload.
    """

    seeds: int
    steps: int
    factory: str = "learner_service.workloads.language_model:factory"
    options: Mapping[str, object] = field(default_factory=dict)


FULL: Final = Size(seeds=4, steps=192)
QUICK: Final = Size(seeds=2, steps=32)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        variant: its name.
        seed: its seed.
        steps: its length.
        loss: of Theta on held-out data.
        bits_per_byte: the same for text; 0 for a workload without text.
        error: median over contributions of the encoding's error, as a share of what was sent.
    """

    variant: str
    seed: int
    steps: int
    loss: float
    bits_per_byte: float
    error: float


class Runs:
    """Trains, one run at a time for each thread.

    Args:
        size: how much.
        cache_path: folder for tokenised text.
    """

    def __init__(self, size: Size, cache_path: Path) -> None:
        self.size = size
        self._cache_path = cache_path
        self._lock = threading.Lock()
        self._workload = cache(self._load)
        self.policy = Policy(total_steps=size.steps, last_call=False)
        self.model = Model.of(self._workload(0), self.policy.fragment_count)

    def outcome(self, variant: Variant, seed: int) -> Outcome:
        """Trains one run from its beginning to its end."""
        with self._lock:
            workload = self._workload(seed)
        policy = self.policy.changed(upload_encoding=variant.encoding)
        run = VirtualRun(self.model, workload, seed, policy, LEARNERS, variant.error_feedback).run()
        found = run.evaluate()
        error = statistics.median(run.errors)
        return Outcome(variant.name, seed, self.size.steps, found["loss"], found.get("bits_per_byte", 0.0), error)

    def _load(self, seed: int) -> Workload:
        context = WorkloadContext(seed, LEARNERS, self.size.steps, self._cache_path, self.size.options)
        return load_workload(self.size.factory, context)


class Kept:
    """Outcomes of earlier calls, in a file of JSON lines; without a path, of none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self.outcomes = [Outcome(**json.loads(line)) for line in lines]

    def find(self, variant: Variant, seed: int, steps: int) -> Outcome | None:
        """An outcome of an earlier call."""
        wanted = (variant.name, seed, steps)
        return next((found for found in self.outcomes if (found.variant, found.seed, found.steps) == wanted), None)

    def add(self, outcome: Outcome) -> None:
        """Writes an outcome down. Any thread may call it."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")


def outcomes(size: Size, cache_path: Path, kept: Kept) -> list[Outcome]:
    """All runs of all seeds, those of an earlier call included; as many at a time as there are cores."""
    wanted = [(variant, seed) for seed in range(size.seeds) for variant in VARIANTS]
    found = {key: kept.find(*key, size.steps) for key in wanted}
    missing = [key for key, outcome in found.items() if outcome is None]
    runs = Runs(size, cache_path) if missing else None

    def trained(key: tuple[Variant, int]) -> Outcome:
        assert runs is not None
        outcome = runs.outcome(*key)
        kept.add(outcome)
        return outcome

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found |= dict(zip(missing, pool.map(trained, missing), strict=True))
    return [outcome for outcome in found.values() if outcome is not None]


def differences(found: Iterable[Outcome], variant: str) -> list[float]:
    """By how many percent the loss of each seed is above float32's, in the order of the seeds."""
    loss = {(outcome.variant, outcome.seed): outcome.loss for outcome in found}
    seeds = sorted(seed for name, seed in loss if name == variant)
    return [100.0 * (loss[variant, seed] / loss[REFERENCE.name, seed] - 1.0) for seed in seeds]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the lower and upper end of its 95 % interval by Student's t; 2 to `SEEDS_MAX` values."""
    mean = statistics.fmean(values)
    half = T_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def measure(size: Size, cache_path: Path, kept: Kept) -> Section:
    """Trains all runs and makes figures of them."""
    return section_of(size, outcomes(size, cache_path, kept))


def section_of(size: Size, found: Sequence[Outcome]) -> Section:
    """The figures of all runs."""
    policy = Policy()
    return Section(
        name="quality",
        title="What the encoding of contributions costs in quality",
        conditions=(
            f"{LEARNERS} learners train the demo's model for {size.steps} steps in virtual time, H = "
            f"{policy.interval_steps}, P = {policy.fragment_count}, tau = {policy.overlap_steps}, outer rate "
            f"{policy.outer_learning_rate:g} and momentum {policy.outer_momentum:g}; downloads as bf16 deltas. "
            f"Loss of Theta on held-out text, seeds 0 to {size.seeds - 1}, each compared with the float32 run of its "
            "seed: the same initial parameters, the same data."
        ),
        figures=tuple(_figures(size, found)),
        details={"outcomes": [asdict(outcome) for outcome in found], "tables": [_table(size, found)]},
    )


def _figures(size: Size, found: Sequence[Outcome]) -> Iterator[Figure]:
    note = f"mean of {size.seeds} paired differences, 95 % interval"
    for variant in VARIANTS[1:]:
        mean, low, high = interval(differences(found, variant.name))
        target = Target("at most", LOSS_PERCENT_MAX) if variant.name in LIMITED else None
        name = f"{variant.name}: loss above float32's"
        yield Figure(name, mean, "%", target, low, high, note)
        if target is not None:
            yield Figure(f"{name}, upper end of the interval", high, "%", target)
    reference = [outcome.loss for outcome in found if outcome.variant == REFERENCE.name]
    spread = 100.0 * statistics.stdev(reference) / statistics.fmean(reference)
    yield Figure("float32: standard deviation of the loss between seeds", spread, "%")


def _table(size: Size, found: Sequence[Outcome]) -> dict[str, Any]:
    rows = []
    for variant in VARIANTS:
        own = [outcome for outcome in found if outcome.variant == variant.name]
        error = 100.0 * statistics.fmean(outcome.error for outcome in own)
        bits = encoding_named(variant.encoding).bits_per_element
        rows.append([variant.name, f"{bits:g}", error, *(f"{outcome.bits_per_byte:.4f}" for outcome in own)])
    columns = ["encoding", "bits per value", "error, % of what is sent", *(f"seed {n}" for n in range(size.seeds))]
    return {"title": "Bits per byte of each run", "columns": columns, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and reports. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.seeds} seeds, {QUICK.steps} steps: a first look")
    parser.add_argument("--json", type=result_path, metavar="PATH", help="also write the figures there")
    parser.add_argument("--seeds", type=int, help=f"runs of each encoding, 2 to {SEEDS_MAX} (default {FULL.seeds})")
    parser.add_argument("--steps", type=int, help=f"global steps of a run, at least 1 (default {FULL.steps})")
    parser.add_argument(
        "--keep", type=Path, metavar="PATH", help="runs that stand there are not repeated; others are added"
    )
    parser.add_argument(
        "--cache-dir", type=Path, default=Path("~/.cache/decoupled-diloco"), help="tokenised text, programs"
    )
    options = parser.parse_args(arguments)
    base = QUICK if options.quick else FULL
    seeds, steps = options.seeds or base.seeds, options.steps or base.steps
    if not 2 <= seeds <= SEEDS_MAX or steps < 1:
        parser.error(f"--seeds {seeds} --steps {steps}: 2 to {SEEDS_MAX} seeds and at least 1 step")
    on: dict[str, Any] = machine()
    cache_path = options.cache_dir.expanduser()
    set_up_jax(cache_path, "cpu", "learner")
    size = Size(seeds, steps)
    return reported(lambda: measure(size, cache_path, Kept(options.keep)), on, options.json, options.quick)


if __name__ == "__main__":
    sys.exit(main())
