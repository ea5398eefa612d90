"""What memory does the syncer need? `python -m benchmarks.memory`.

The syncer as shipped, with its durable store, in a process of its own, and learners that speak the protocol. First the
peak of resident memory in rounds of eight contributions to one large fragment, as bf16 and as float32, above what the
run itself is (parameters, outer momentum and downlink residual: 12 bytes a parameter). All eight upload at once, and
all of them download the new version at once. Then many rounds of small fragments, for memory that grows.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import numpy as np

from benchmarks.figures import Figure, Section, Target, run
from benchmarks.rig_learner import RigLearner, cycle
from benchmarks.syncer_rig import SyncerProcess, flat_schema, run_values
from decoupled_diloco.runtime.malloc import tune_malloc

MIB = 1 << 20
CONTRIBUTIONS = 8
PARAMETERS, PARAMETERS_QUICK = 16 << 20, 1 << 20
ROUNDS, ROUNDS_QUICK = 4, 2
"""Rounds of the large fragment; the first one allocates, and counts."""
ALLOWED_FRAGMENTS = CONTRIBUTIONS + 2
ALLOWED_MIB = 200
"""The program itself, with interpreter, gRPC and NumPy, and all that is small."""

SMALL_PARAMETERS = 1 << 14
SMALL_FRAGMENTS = 4
SMALL_LEARNERS = 2
SMALL_ROUNDS, SMALL_ROUNDS_QUICK = 500, 60
SETTLED_SHARE = 0.2
"""Share of the small rounds after which caches and pools have been filled."""
GROWTH_MIB_MAX = 8.0
"""Largest growth that counts as none: the machine keeps the newest 1000 closed rounds and 200 rounds of answers."""


@dataclass(slots=True)
class Large:
    """One encoding of the large fragment, in bytes."""

    encoding: str
    parameters: int
    start_bytes: int = 0
    """Resident before the run had parameters."""
    settled_bytes: int = 0
    """Resident after the last round."""
    library_bytes: int = 0
    """Of that, pages of files."""
    peaks: list[int] = field(default_factory=list)
    """Peak in each round."""

    @property
    def above_state_mib(self) -> float:
        """The highest peak above parameters, momentum and residual."""
        return (max(self.peaks) - 12 * self.parameters) / MIB

    @property
    def allowed_mib(self) -> float:
        """What the issue allows."""
        return ALLOWED_FRAGMENTS * 4 * self.parameters / MIB + ALLOWED_MIB

    def figures(self) -> list[Figure]:
        """What is shown of it."""
        name, state = f"{CONTRIBUTIONS} x {self.encoding}", 12 * self.parameters
        return [
            Figure(
                f"{name}: peak above theta, momentum, residual",
                self.above_state_mib,
                "MiB",
                Target("at most", self.allowed_mib),
                low=(min(self.peaks) - state) / MIB,
                high=self.above_state_mib,
                note=f"({ALLOWED_FRAGMENTS} fragments of float32 + {ALLOWED_MIB} MiB) allowed",
            ),
            Figure(
                f"{name}: kept between rounds above theta, momentum, residual",
                (self.settled_bytes - state) / MIB,
                "MiB",
                note="buffers for the next round, the newest delta, the program",
            ),
            Figure(
                f"{name}: pages of program and libraries in both",
                self.library_bytes / MIB,
                "MiB",
                note="read from files; the system can take them back",
            ),
        ]


def measure_large(encoding: str, parameters: int, rounds: int) -> Large:
    """Peaks of a syncer with one fragment and eight learners.

    Args:
        encoding: of contributions.
        parameters: of the fragment, a multiple of 256.
        rounds: how many.
    """
    found = Large(encoding, parameters)
    values = run_values(
        encoding={"upload": encoding, "download": "bf16"},
        quorum={"minimum": CONTRIBUTIONS},
        run={"id": "memory", "total_steps": 0, "learners_expected": CONTRIBUTIONS},
    )
    with SyncerProcess(values, store="durable") as syncer:
        found.start_bytes = syncer.resident_bytes()
        asyncio.run(_large_rounds(syncer, found, rounds))
        found.settled_bytes, found.library_bytes = syncer.resident_bytes(), syncer.library_bytes()
    return found


async def _large_rounds(syncer: SyncerProcess, found: Large, rounds: int) -> None:
    async with AsyncExitStack() as stack:
        learners = await _learners(stack, syncer, CONTRIBUTIONS, [found.parameters])
        payload = learners[0].payload(0)
        newest_round = 0
        for _ in range(rounds):
            syncer.reset_peak()
            newest_round = await _round(learners, payload, 0, newest_round)
            found.peaks.append(syncer.peak_bytes())


async def _learners(stack: AsyncExitStack, syncer: SyncerProcess, count: int, sizes: Sequence[int]) -> list[RigLearner]:
    """Learners that have applied the first versions."""
    schema = flat_schema(sizes)
    learners = [
        await stack.enter_async_context(RigLearner(syncer, f"learner-{number}", schema)) for number in range(count)
    ]
    await learners[0].initialize()
    await asyncio.gather(*(learner.apply_first() for learner in learners[1:]))
    return learners


async def _round(learners: Sequence[RigLearner], payload: memoryview, fragment: int, after_round: int) -> int:
    """A round with a contribution of everybody; returns its number."""

    async def take_part(learner: RigLearner) -> int:
        ask = await learner.asked(fragment, after_round)
        await cycle(learner, payload, fragment, ask)
        return ask.round

    return max(await asyncio.gather(*(take_part(learner) for learner in learners)))


def measure_small(rounds: int) -> list[int]:
    """Resident bytes after every tenth of many rounds of small fragments."""
    values = run_values(
        fragments={"count": SMALL_FRAGMENTS, "interval_steps": 8, "overlap_steps": 2},
        encoding={"upload": "bf16", "download": "bf16"},
        quorum={"minimum": SMALL_LEARNERS},
        run={"id": "memory", "total_steps": 0, "learners_expected": SMALL_LEARNERS},
    )
    with SyncerProcess(values, store="durable") as syncer:
        return asyncio.run(_small_rounds(syncer, rounds))


async def _small_rounds(syncer: SyncerProcess, rounds: int) -> list[int]:
    resident = []
    async with AsyncExitStack() as stack:
        learners = await _learners(stack, syncer, SMALL_LEARNERS, [SMALL_PARAMETERS] * SMALL_FRAGMENTS)
        payload = learners[0].payload(0)
        newest_rounds = [0] * SMALL_FRAGMENTS
        for number in range(rounds):
            fragment = number % SMALL_FRAGMENTS
            newest_rounds[fragment] = await _round(learners, payload, fragment, newest_rounds[fragment])
            for learner in learners:
                learner.events[:-64] = []
            if (number + 1) % (rounds // 10) == 0:
                resident.append(syncer.resident_bytes())
    return resident


def growth_mib(resident: Sequence[int], rounds: int) -> float:
    """Growth over all rounds by the slope of a line through what was measured once caches were filled."""
    first = int(SETTLED_SHARE * len(resident))
    at = (np.arange(len(resident)) + 1)[first:] * (rounds / len(resident))
    slope = np.polyfit(at, np.array(resident[first:], float), 1)[0]
    return float(slope) * rounds / MIB


def measure(quick: bool) -> Section:
    """All figures."""
    tune_malloc()
    parameters, rounds = (PARAMETERS_QUICK, ROUNDS_QUICK) if quick else (PARAMETERS, ROUNDS)
    small_rounds = SMALL_ROUNDS_QUICK if quick else SMALL_ROUNDS
    large = [measure_large(encoding, parameters, rounds) for encoding in ("bf16", "float32")]
    resident = measure_small(small_rounds)
    figures = [Figure("syncer before the run has parameters", large[0].start_bytes / MIB, "MiB")]
    figures += [figure for found in large for figure in found.figures()]
    figures.append(
        Figure(
            f"growth over {small_rounds} rounds of small fragments",
            growth_mib(resident, small_rounds),
            "MiB",
            Target("at most", GROWTH_MIB_MAX),
            note="slope; the newest 1000 closed rounds are kept",
        )
    )
    return Section(
        name="memory",
        title="Memory of the syncer",
        conditions=(
            f"One fragment of {parameters / 1e6:.1f}M parameters ({4 * parameters / MIB:.0f} MiB as float32), "
            f"{CONTRIBUTIONS} learners that upload at once and download at once, bf16 deltas down, durable store; peak "
            f"resident memory of the process in each of {rounds} rounds. Then {SMALL_LEARNERS} learners and "
            f"{SMALL_FRAGMENTS} fragments of {SMALL_PARAMETERS} parameters."
        ),
        figures=tuple(figures),
        details={
            "peaks_mib": {found.encoding: [peak / MIB for peak in found.peaks] for found in large},
            "small_resident_mib": [value / MIB for value in resident],
        },
    )


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
