"""What one chaos run consists of: its folder, its learners, its settings and its schedule, all from the seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chaos.schedule import SYNCER, Fault, draw

LEARNERS: Final = ("alpha", "beta", "gamma")
ROGUE: Final = "rogue"
"""The participant that comes only to misbehave."""
STEP_SECONDS: Final = 0.15
"""Every inner step is made to last this long: three learners and a syncer then fit on two cores."""

FRAGMENT_COUNT: Final = 4
PARAMETER_COUNT: Final = 300_000
"""Some hundred kilobytes a fragment, so that streams can break and rot in the middle."""

DEADLINES: Final = {
    "heartbeat_seconds": 0.5,
    "lease_seconds": 4.0,
    "stall_seconds": 2.0,
    "upload_idle_seconds": 2.0,
    "upload_seconds_min": 5.0,
    "attach_idle_seconds": 2.5,
    "last_call_seconds_max": 1.0,
    "rpc_seconds": 3.0,
    "drain_seconds_max": 10.0,
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.

    Attributes:
        folder: where everything goes.
        seed: what the schedule and the quorum follow from.
        seconds: length of the part with faults.
        kinds: kinds of faults.
        mean_gap_seconds: between the beginnings of two faults.
    """

    folder: Path
    seed: int
    seconds: float
    kinds: Sequence[str]
    learners: tuple[str, ...] = LEARNERS
    mean_gap_seconds: float = 5.0

    @property
    def quorum(self) -> int:
        """K: 1 for even seeds, 2 for odd ones."""
        return 1 + self.seed % 2

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The schedule."""
        return draw(self.seed, self.seconds, self.learners, self.kinds, self.mean_gap_seconds)

    @property
    def run_file(self) -> Path:
        """Where the run file lies."""
        return self.folder / "run.toml"

    @property
    def disk(self) -> Path:
        """What the syncer's state lies on."""
        return self.folder / "disk"

    @property
    def state_dir(self) -> Path:
        """The syncer's durable state."""
        return self.disk / "state"

    @property
    def mirror(self) -> Path:
        """The syncer's mirror, on another disk."""
        return self.folder / "mirror"

    def lost_state(self, number: int) -> Path:
        """The state directory of the n-th disk that was lost, kept as evidence; no process of the run sees it."""
        return self.folder / "lost" / str(number)

    def journal(self, learner: str) -> Path:
        """A learner's journal."""
        return self.folder / "journals" / f"{learner}.jsonl"

    def log(self, name: str) -> Path:
        """What a process has said."""
        return self.folder / "logs" / f"{name}.log"

    def flag(self, name: str, point: str) -> Path:
        """The file whose presence makes a failpoint of a process act."""
        return self.folder / "flags" / f"{name}.{point}"

    @property
    def full_flag(self) -> Path:
        """The file whose presence makes the syncer's disk full."""
        return self.flag(SYNCER, "full")

    @property
    def mirror_flag(self) -> Path:
        """The file in whose presence the mirror takes nothing."""
        return self.flag(SYNCER, "mirror")

    def write(self) -> None:
        """Makes the folders and the run file."""
        for name in ("journals", "logs", "flags"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        deadlines = "\n".join(f"{name} = {value}" for name, value in DEADLINES.items())
        text = f"""# Written by a chaos run; every process of it reads it.
[run]
id = "chaos-{self.seed}"
seed = {self.seed}
learners_expected = {len(self.learners)}
total_steps = 0

[fragments]
count = {FRAGMENT_COUNT}
interval_steps = 12
overlap_steps = 2

[quorum]
minimum = {self.quorum}

[deadlines]
{deadlines}

[workload]
factory = "learner_service.workloads.synthetic:factory"
options = {{ parameter_count = {PARAMETER_COUNT} }}
"""
        self.run_file.write_text(text, encoding="utf-8")
