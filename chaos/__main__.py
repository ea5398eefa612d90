"""`python -m chaos`: a run with faults on purpose, and its verdict (make chaos)."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from chaos.plan import Plan
from chaos.report import lines, summarise, total, total_lines, write_summary
from chaos.run import ChaosError, Run
from chaos.schedule import CALM_SECONDS, KINDS


def main(arguments: list[str]) -> int:
    """Makes the runs; returns 0 if no rule was broken, 1 if one was, 2 if a run could not be made."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, _stop)
    summaries = []
    for seed in range(options.seed, options.seed + options.seeds):
        folder = options.output / f"seed-{seed}"
        plan = Plan(folder, seed, 60.0 * options.minutes, options.faults)
        _say(f"seed {seed}: {len(plan.faults)} faults in {plan.seconds:.0f} s, quorum {plan.quorum}")
        for fault in plan.faults:
            _say(f"  {fault}")
        if options.schedule_only:
            continue
        try:
            outcome = Run(plan, _say).make()
        except ChaosError as error:
            _say(f"this run could not be made: {error}")
            return 2
        summary = summarise(outcome)
        write_summary(folder / "summary.json", summary)
        for line in lines(summary):
            _say(line)
        summaries.append(summary)
        again = f"python -m chaos --seed {seed} --minutes {options.minutes:g} --faults {','.join(options.faults)}"
        _say(f"{folder / 'summary.json'}; once more: {again}")
    if not summaries:
        return 0
    whole = summaries[0] if len(summaries) == 1 else total(summaries)
    write_summary(options.output / "summary.json", whole)
    if len(summaries) > 1:
        for line in total_lines(whole):
            _say(line)
    return 1 if whole["violation_count"] else 0


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    """Unwinds, so that no process and no mount is left behind."""
    raise SystemExit(128 + number)


def _say(text: str) -> None:
    print(text, flush=True)


def _parse(arguments: list[str]) -> argparse.Namespace:
    kinds = "\n".join(f"  {kind.name:<16} {kind.sentence}" for kind in KINDS.values())
    parser = argparse.ArgumentParser(
        prog="python -m chaos",
        description=f"{__doc__}\n\nKinds of faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=1, help="what the schedule follows from (default 1)")
    parser.add_argument("--seeds", type=int, default=1, help="how many runs, one seed after the other (default 1)")
    parser.add_argument("--minutes", type=float, default=3.0, help="length of the part with faults (default 3)")
    parser.add_argument("--faults", type=_kinds, default=tuple(KINDS), help="kinds, with commas between (default all)")
    parser.add_argument("--output", type=Path, default=Path("runs/chaos"), help="folder (default runs/chaos)")
    parser.add_argument("--schedule-only", action="store_true", help="print the schedule and stop")
    options = parser.parse_args(arguments)
    if 60.0 * options.minutes <= 2 * CALM_SECONDS:
        parser.error(f"--minutes {options.minutes:g}: at least {(2 * CALM_SECONDS + 5) / 60:.2f}")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: at least 1")
    return options


def _kinds(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: kinds are {', '.join(KINDS)}")
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
