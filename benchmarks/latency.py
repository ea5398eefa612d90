"""From "grace closed" to the learners' hand-over slots, and decisions: `python -m benchmarks.latency`.

First every call of the machine in a simulated run of 64 learners. Then the whole way of a round's result, with the
programs as shipped: a syncer with its durable store and three learners (then one) with the demo's model, each in a
process of its own on this machine. The learners' steps sleep instead of computing, because four processes share its
cores; all else is theirs. Instants are taken by `instants` on the clock that all processes share.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from benchmarks.decisions import measure_decisions
from benchmarks.figures import Figure, Section, Target, run
from benchmarks.instants import read
from benchmarks.syncer_rig import SyncerProcess
from benchmarks.tied import tied

LEARNERS: Final = ("alpha", "beta", "gamma")
STEP_SECONDS: Final = 0.1
SECONDS, SECONDS_QUICK = 40.0, 6.0
"""How long the run is watched."""
ALONE_SECONDS, ALONE_SECONDS_QUICK = 15.0, 4.0
"""The same with a single learner: as many processes as two cores carry at once."""
DECISION_SECONDS, DECISION_SECONDS_QUICK = 200.0, 20.0
START_SECONDS: Final = 90.0
OVERHEAD_MS_MAX: Final = 1.5
"""All but the transfer and the durable commit."""

VALUES: Final[Mapping[str, Mapping[str, object]]] = {
    "run": {"id": "latency", "total_steps": 0, "learners_expected": len(LEARNERS)},
    "fragments": {"count": 8, "interval_steps": 8, "overlap_steps": 2},
}

STAGES: Final = (
    "decision: grace has closed",
    "until the merge begins",
    "merge and outer step",
    "until the commit is decided",
    "until the store has it",
    "durable commit",
    "until the publication is decided",
    "until the syncer sends it",
    "until the header is here",
    "transfer",
    "until the news is here",
    "until it is decoded",
    "decode, digest",
    "staging on the devices",
    "hand-over",
)
"""From one instant of a way to the next. A learner that has not asked in advance has the news, and asks, before the
syncer sends it; to one that has, the news come beside the version."""
COMMIT, TRANSFER = STAGES.index("durable commit"), STAGES.index("transfer")

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Way:
    """The way of one version to one learner: the instants between which `STAGES` lie.

    Attributes:
        learner: where it arrived.
        instants: one more than there are stages.
        in_advance: whether the learner had asked for it before it was there.
    """

    learner: str
    instants: tuple[float, ...]
    in_advance: bool

    @property
    def stages(self) -> tuple[float, ...]:
        """Seconds of each stage."""
        return tuple(after - before for before, after in pairwise(self.instants))

    @property
    def total(self) -> float:
        """Seconds in all."""
        return self.instants[-1] - self.instants[0]

    @property
    def overhead(self) -> float:
        """Seconds of all stages but the durable commit and the transfer."""
        return self.total - self.stages[COMMIT] - self.stages[TRANSFER]


# --- from the instants of four processes to ways ---


class Lines:
    """The instants of one process.

    Args:
        path: as `benchmarks.instants` has written it.
    """

    def __init__(self, path: Path) -> None:
        self._of: dict[tuple[str, str], Span] = {}
        self._in_order: dict[str, list[Span]] = defaultdict(list)
        self.keys: dict[str, list[Any]] = defaultdict(list)
        for label, key, began, ended in read(path):
            self._of.setdefault((label, json.dumps(key)), (began, ended))
            self._in_order[label].append((began, ended))
            self.keys[label].append(key)

    def of(self, label: str, key: Any) -> Span | None:
        """The first call of that label about that key."""
        return self._of.get((label, json.dumps(key)))

    def next(self, label: str, at: float) -> Span | None:
        """The first call of that label that began at an instant or later."""
        return min((span for span in self._in_order[label] if span[0] >= at), default=None)


def ways(syncer: Lines, learners: Mapping[str, Lines]) -> Iterator[Way]:
    """Every way that can be followed from its beginning to its end; those at the edges of the watched time cannot."""
    for round_number, fragment, version in syncer.keys["commit_round"]:
        about = [fragment, version]
        decided = syncer.of("start_merge", round_number)
        commit_decided = syncer.of("commit_round", [round_number, *about])
        commit, published = syncer.of("commit", round_number), syncer.of("publish", about)
        if not (decided and commit_decided and commit and published):
            continue
        merge = syncer.next("merge", decided[1])
        for name, lines in learners.items():
            news, arrived = lines.of("news", about), lines.of("hand_over", about)
            served = syncer.of("serve", [name, *about])
            if not (merge and news and arrived and served):
                continue
            followed = [lines.next(label, served[0]) for label in ("header", "received")]
            followed += [lines.next(label, news[0]) for label in ("decode", "stage")]
            if None in followed:
                continue
            header, received, decoded, staged = (span for span in followed if span is not None)
            instants = (
                *decided, *merge, commit_decided[1], *commit, published[1], served[0], header[0], received[1],
                max(received[1], news[0]), *decoded, staged[1], arrived[1],
            )  # fmt: skip
            if list(instants) == sorted(instants):
                yield Way(name, instants, lines.of("download", about) is None)


# --- the run ---


class WatchedSyncer(SyncerProcess):
    """The syncer as shipped, with instants taken of it.

    Args:
        folder: of its files; the instants are in `syncer.jsonl`.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(VALUES, store="durable", folder=folder)
        program = self._command.index("-m") + 1
        self._command[program : program + 1] = ["benchmarks.instants", "syncer", str(folder / "syncer.jsonl")]


@contextmanager
def _learner(folder: Path, name: str, address: str) -> Iterator[None]:
    """A learner in a process of its own."""
    arguments = [str(folder / f"{name}.jsonl"), address, name, str(STEP_SECONDS), json.dumps(VALUES)]
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            tied([sys.executable, "-m", "benchmarks.instants", "learner", *arguments]),
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stderr=log,
        )
    try:
        yield
    finally:
        child.kill()
        child.wait()


def measure_ways(folder: Path, names: Sequence[str], seconds: float) -> list[Way]:
    """Watches a run for some seconds after everybody has got a version.

    Args:
        folder: for the files of all processes.
        names: of the learners.
        seconds: how long.

    Raises:
        RuntimeError: the learners did not start.
    """
    paths = {name: folder / f"{name}.jsonl" for name in names}
    with WatchedSyncer(folder) as syncer, ExitStack() as stack:
        for name in names:
            stack.enter_context(_learner(folder, name, syncer.address))
        deadline = time.monotonic() + START_SECONDS
        while not all(path.exists() and _has_taken_part(path) for path in paths.values()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the learners have not taken part after {START_SECONDS:g} s; see {folder}")
            time.sleep(0.2)
        began = time.monotonic()
        time.sleep(seconds)
    found = ways(Lines(folder / "syncer.jsonl"), {name: Lines(path) for name, path in paths.items()})
    watched = [way for way in found if way.instants[0] >= began]
    if not watched:
        raise RuntimeError(f"no version could be followed from its round to a learner; see {folder}")
    return watched


def _has_taken_part(path: Path) -> bool:
    """Whether a learner has got a version of a round: later than the first ones, which have the number 1."""
    return any(label == "hand_over" and key[1] > 1 for label, key, _, _ in read(path))


def path_figures(found: Sequence[Way], learners: str) -> list[Figure]:
    """Totals and stages, in milliseconds; ranges are 10th to 90th percentile."""
    lists: dict[str, list[float]] = {
        f"{learners}: grace closed to hand-over slot, all but commit and transfer": [way.overhead for way in found],
        f"{learners}: grace closed to hand-over slot, in all": [way.total for way in found],
    }
    lists |= {f"{learners}: - {stage}": [way.stages[index] for way in found] for index, stage in enumerate(STAGES)}
    figures = []
    for position, (name, seconds) in enumerate(lists.items()):
        ordered = [1e3 * value for value in sorted(seconds)]
        tenth = len(ordered) // 10
        target = Target("at most", OVERHEAD_MS_MAX) if position == 0 else None
        figures.append(
            Figure(name, statistics.median(ordered), "ms", target, ordered[tenth], ordered[-1 - tenth], "p10 to p90")
        )
    share = statistics.mean(way.in_advance for way in found)
    figures.append(Figure(f"{learners}: versions asked for in advance", 100 * share, "%"))
    return figures


def measure(quick: bool) -> Section:
    """All figures."""
    decisions = measure_decisions(DECISION_SECONDS_QUICK if quick else DECISION_SECONDS)
    with tempfile.TemporaryDirectory(prefix="latency-") as name:
        together = measure_ways(Path(name), LEARNERS, SECONDS_QUICK if quick else SECONDS)
    with tempfile.TemporaryDirectory(prefix="latency-") as name:
        alone = measure_ways(Path(name), LEARNERS[:1], ALONE_SECONDS_QUICK if quick else ALONE_SECONDS)
    return Section(
        name="latency",
        title="From grace closed to the hand-over slot, and decisions",
        conditions=(
            f"{len(together)} ways of versions of the demo's model (0.16M parameters, 8 fragments) to {len(LEARNERS)} "
            f"learners and {len(alone)} to a lone one, all processes on this machine, loopback, durable store, "
            f"sleeping steps of {STEP_SECONDS:g} s. Decisions: a simulated run of 64 learners and 24 fragments, one "
            "second a step; processor time of the calling thread, median of each kind."
        ),
        figures=(
            *path_figures(together, f"{len(LEARNERS)} learners"),
            *path_figures(alone, "1 learner"),
            *decisions.figures(),
        ),
        details={
            "stages_ms": {
                stage: statistics.median(1e3 * way.stages[index] for way in together)
                for index, stage in enumerate(STAGES)
            }
        },
    )


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
