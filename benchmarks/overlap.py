"""What a learner loses to its exchange with the syncer: `python -m benchmarks.overlap`, or `make bench-gpu`.

A learner with everything that it has in production (inner loop, session, hand-over, fragments on the devices, network
thread) trains a language model against a syncer process on this machine, P = 8, H = 24, tau = 2. Blocks of its steps
take turns with blocks of the same steps without synchronisation, in one process. A step that is shorter than the case
says is followed by a wait, where the learner waits for the step's result. The device thread's loss is what lies between
a step's result and the begin of the next step, less what that takes without synchronisation; its parts are timed too.

On an accelerator a learner waits for the step before only; here it waits for every step, so that its loss can be seen.
It runs on whatever JAX finds; JAX_PLATFORMS="" leaves the choice to JAX. In this repository it has been run on CPUs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, Section, Target, of_repetitions, run
from benchmarks.overlap_run import LEARNER, Job
from demo.plan import Plan
from demo.processes import Addresses, Processes

CHILD_SECONDS_MAX: Final = 300.0
SYNC_INTERVAL_STEPS: Final = 24
PARTS: Final = {
    "plan": "plan",
    "copy": "copies",
    "apply": "applies",
    "publish": "report",
    "check": "while the step is under way: a look at the parameters",
    "copy_ahead": "while the step is under way: copies for the next boundary",
    "step_under_way": "while the step is under way: waking the network thread, which takes the interpreter",
}
"""Calls whose seconds a step are shown, and what they are for. What is done while the step is under way is no loss."""
CACHE: Final = Path("runs/overlap/cache")
"""Compiled programs and tokenised text; kept between runs."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model with steps of one duration.

    Attributes:
        name: of its figures.
        options: of the language model.
        step_seconds: every step lasts at least so long.
        share_max: target for the lost share of a step, in percent.
        steps: of one measured block.
        repetitions: pairs of blocks.
    """

    name: str
    options: dict[str, int]
    step_seconds: float
    share_max: float
    steps: int
    repetitions: int


LARGE: Final = {"d_model": 256, "ff": 768, "layer_count": 6, "head_count": 4, "kv_head_count": 2, "head_dim": 64}
CASES: Final = (
    Case("5M parameters, 100 ms", {**LARGE, "batch_size": 1}, 0.1, 1.0, 2 * SYNC_INTERVAL_STEPS, 4),
    Case("demo's model, 20 ms", {}, 0.02, 3.0, 5 * SYNC_INTERVAL_STEPS, 5),
)


def measured(case: Case, folder: Path, cache: Path = CACHE) -> dict[str, Any]:
    """What `overlap_run` found out about a case.

    Raises:
        RuntimeError: it failed; the end of its log says why.
    """
    (folder / "logs").mkdir(parents=True)
    plan = Plan(folder, (LEARNER,), quorum=1, seconds=0.0, total_steps=0)
    plan.write_run_file()
    options = "".join(f"{name} = {value}\n" for name, value in case.options.items())
    plan.run_file.write_text(plan.run_file.read_text(encoding="utf-8") + options, encoding="utf-8")
    processes = Processes(plan, Addresses.free())
    job = Job(
        str(plan.run_file),
        processes.addresses.data,
        str(cache),
        case.step_seconds,
        SYNC_INTERVAL_STEPS,
        case.steps,
        case.repetitions,
    )
    (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.overlap_run", str(folder / "job.json"), str(folder / "result.json")]
    processes.start_syncer()
    try:
        done = subprocess.run(
            command,
            env=processes.environment(),
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS_MAX,
            check=False,
        )
    finally:
        processes.stop_all()
    if done.returncode:
        raise RuntimeError(f"overlap_run ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def figures_of(case: Case, result: dict[str, Any]) -> list[Figure]:
    """The figures of a case from what was measured."""
    pairs = list(zip(result["blocks"]["session"], result["blocks"]["baseline"], strict=True))

    def figure(name: str, unit: str, value: Callable[[Any, Any], float], **more: Any) -> Figure:
        return of_repetitions(f"{case.name}: {name}", [value(own, bare) for own, bare in pairs], unit, **more)

    def lost(own: Any, bare: Any) -> float:
        return 100.0 * float(own["boundary"] - bare["boundary"]) / max(case.step_seconds, float(own["compute"]))

    found = [
        figure("share lost between steps", "%", lost, target=Target("at most", case.share_max)),
        figure("step rate beside steps without it", "x", lambda own, bare: bare["period"] / own["period"]),
        figure(
            "a step's own duration beside one without it",
            "x",
            lambda own, bare: own["compute"] / bare["compute"],
            note="the syncer and the network thread use the same cores",
        ),
        figure("fragments copied at a boundary", "", lambda own, _: own["counts"].get("copied fragments", 0.0)),
    ]
    for part, words in PARTS.items():
        found.append(figure(words, "ms a step", lambda own, _, part=part: 1e3 * own["items"].get(part, 0.0)))
    waited, memory = "the device thread waited for the network", "copies and staged versions on the devices"
    return [
        *found,
        figure("an upload, from copy to answer", "ms", lambda own, _: 1e3 * own["upload"], note="while steps go on"),
        figure("uploads answered", "a step", lambda own, _: own["counts"].get("uploads", 0.0)),
        figure(waited, "ms", lambda own, _: 1e3 * own["network_wait"], target=Target("at most", 0.0)),
        figure(memory, "x parameters", lambda own, _: own["device_bytes"] / own["parameter_bytes"]),
        *_of_devices(case, result["devices"]),
    ]


def _of_devices(case: Case, devices: dict[str, float]) -> list[Figure]:
    """What copies and applies take of the devices, one at a time and nothing else going on."""
    return [
        Figure(f"{case.name}: one copy, from the call to its end on the device", _ms(devices, "copy"), "ms"),
        Figure(f"{case.name}: one apply, likewise", _ms(devices, "apply"), "ms"),
        Figure(f"{case.name}: a copy to host memory", devices["host_bytes_per_second"] / 1e9, "GB/s"),
    ]


def _ms(devices: dict[str, float], what: str) -> float:
    return 1e3 * (devices[f"{what}_call"] + devices[f"{what}_device"])


def measure(quick: bool) -> Section:
    """Measures all cases."""
    figures: list[Figure] = []
    kinds = set()
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            chosen = case if not quick else _shorter(case)
            result = measured(chosen, Path(folder) / "run")
        figures += figures_of(case, result)
        kinds.add(result["device"])
    repetitions = statistics.median(case.repetitions for case in CASES)
    return Section(
        "overlap",
        "What a learner loses to its exchange",
        f"Device: {', '.join(sorted(kinds))}; {len(os.sched_getaffinity(0))} cores, shared with the syncer process. "
        f"P = 8, H = {SYNC_INTERVAL_STEPS}, tau = 2, bf16 both ways, one learner. Medians of about {repetitions:g} "
        "blocks that take turns with blocks without synchronisation; shorter steps are followed by a wait.",
        tuple(figures),
    )


def _shorter(case: Case) -> Case:
    return Case(case.name, case.options, case.step_seconds, case.share_max, SYNC_INTERVAL_STEPS, 1)


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
