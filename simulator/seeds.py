"""Many walks on all processors, and one walk in words."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TextIO

from simulator.rule import BrokenRuleError
from simulator.walk import Walk

PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one walk ended. `counts`: what happened how often, by kind."""

    seed: int
    round_count: int
    event_count: int
    restart_count: int
    counts: Counter[str]
    rule: str = ""
    text: str = ""


@dataclass(slots=True)
class Totals:
    """The sums of many walks."""

    walk_count: int = 0
    round_count: int = 0
    event_count: int = 0
    restart_count: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """One more walk."""
        self.walk_count += 1
        self.round_count += outcome.round_count
        self.event_count += outcome.event_count
        self.restart_count += outcome.restart_count
        self.counts += outcome.counts
        if outcome.rule:
            self.failures.append(outcome)


def walk(seed: int, seconds: float) -> Outcome:
    """One walk to its end, or to the first violation."""
    run = Walk(seed)
    rule = text = ""
    try:
        run.go(seconds)
    except BrokenRuleError as violation:
        rule, text = violation.rule, str(violation)
    except Exception as error:
        rule, text = "no exception", f"{type(error).__name__}: {error}"
    world = run.world
    return Outcome(seed, len(world.commits), world.event_count, world.start_count - 1, world.counts, rule, text)


def _walk(job: tuple[int, float]) -> Outcome:
    gc.disable()  # a walk makes few cycles, and looking for them takes a tenth of the time
    try:
        return walk(*job)
    finally:
        gc.collect()


def outcomes(seeds: range, seconds: float) -> Iterator[Outcome]:
    """The walks of these seeds, as they end."""
    jobs = [(seed, seconds) for seed in seeds]
    processes = len(os.sched_getaffinity(0))
    if processes == 1:
        yield from map(_walk, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_walk, jobs, chunksize=4)


def simulate(seeds: range, seconds: float, clock: Callable[[], float] = time.monotonic) -> Totals:
    """Walks through all seeds, with a line now and then."""
    totals, began, told = Totals(), clock(), clock()
    for outcome in outcomes(seeds, seconds):
        totals.add(outcome)
        if outcome.rule:
            print(f"seed {outcome.seed} failed: {outcome.text}", flush=True)
            print(f"  replay it: python -m simulator --replay {outcome.seed} --seconds {seconds:g}", flush=True)
        if clock() - told >= PROGRESS_SECONDS:
            told = clock()
            rate = totals.round_count / (told - began)
            print(
                f"{totals.walk_count} of {len(seeds)} seeds, {totals.round_count} rounds, {rate:.0f} rounds/s, "
                f"{len(totals.failures)} failed",
                flush=True,
            )
    _summarize(totals, clock() - began)
    return totals


def _summarize(totals: Totals, seconds: float) -> None:
    print(
        f"{totals.walk_count} seeds in {seconds:.0f} s: {totals.round_count} committed rounds "
        f"({totals.round_count / seconds:.0f}/s), {totals.event_count} events ({totals.event_count / seconds:.0f}/s), "
        f"{totals.restart_count} restarts of the syncer, {len(totals.failures)} seeds failed"
    )
    for kind, count in totals.counts.most_common():
        print(f"{count:8d}  {kind}")
    for rule, count in Counter(outcome.rule for outcome in totals.failures).most_common():
        print(f"broken in {count} seeds: {rule}")


def replay(seed: int, seconds: float, out: TextIO = sys.stdout) -> bool:
    """One walk in words; whether it kept all rules."""
    run = Walk(seed, trace=lambda line: print(line, file=out))
    print(f"seed {seed}: {run.world.policy}, {run.troubles.crowd} learners", file=out)
    try:
        run.go(seconds)
    except BrokenRuleError as violation:
        print(f"{run.world.now:10.3f}  VIOLATION of {violation}", file=out)
        return False
    print(f"{run.world.now:10.3f}  all rules were kept, {len(run.world.commits)} rounds were committed", file=out)
    return True


def digest(seed: int, seconds: float) -> str:
    """Names everything that happens in a walk."""
    lines: list[str] = []
    Walk(seed, trace=lines.append).go(seconds)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
