"""The benchmarks that `python -m benchmarks` runs, each in a process of its own, and what comes of them.

A member is a module below `benchmarks` that takes `--quick` and `--json PATH` (see `figures.run`); two older ones
report in a form of their own, which `older.py` translates. Members run one after the other, so that none measures
another's work, and the failure of one is kept as text while the rest goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import older
from benchmarks.figures import Section
from benchmarks.places import ROOT, lack_of_space
from benchmarks.record import Failure, Results
from benchmarks.tied import tied

OUTPUT_LINES_KEPT: Final = 15
"""Last lines of a member that failed."""


@dataclass(frozen=True, slots=True)
class Member:
    """A benchmark of the suite.

    Attributes:
        name: its module below `benchmarks`.
        about: what it measures, in a few words.
        seconds_max: it is ended after so long; a full run takes half of it or less on two quiet cores.
        seconds_max_quick: the same of a quick run.
        report: name of the file that an older one writes below its `--output`; "": it takes `--json`.
        arguments: further arguments of a full run.
        arguments_quick: of a quick one; None: too slow for it, left out.
        translate: turns an older one's report into a section.
    """

    name: str
    about: str
    seconds_max: float = 300.0
    seconds_max_quick: float = 90.0
    report: str = ""
    arguments: tuple[str, ...] = ()
    arguments_quick: tuple[str, ...] | None = ()
    translate: Callable[[dict[str, Any]], Section] | None = None

    def command(self, is_quick: bool, folder: Path, more: Sequence[str] = ()) -> list[str]:
        """Its command line; what it writes goes below `folder`."""
        start = [sys.executable, "-m", f"benchmarks.{self.name}"]
        chosen = [*((self.arguments_quick or ()) if is_quick else self.arguments), *more]
        if self.report:
            return [*start, "--output", str(folder), *chosen]
        return [*start, *(["--quick"] if is_quick else []), "--json", str(folder / "section.json"), *chosen]

    def section(self, folder: Path) -> Section:
        """What it has written below `folder`.

        Raises:
            OSError, ValueError, KeyError, TypeError: it is not there, or not what a member writes.
        """
        data = json.loads((folder / (self.report or "section.json")).read_text(encoding="utf-8"))
        if self.translate is not None:
            return self.translate(data)
        data.pop("machine", None)
        return Section.from_json(data)


MEMBERS: Final[tuple[Member, ...]] = (
    Member("peers", "the same payload by our calls, by limits and by others' transports", seconds_max=900.0),
    Member("wire", "fragments up and down beside raw TCP and Arrow Flight, and beside merges"),
    Member("arithmetic", "merge, outer step and encodings beside memcpy and plain NumPy"),
    Member("overlap", "what a learner's device thread loses to its exchange"),
    Member("latency", "from grace closed to the learners' hand-over slots, by stage, and decisions"),
    Member("memory", "the syncer's memory above what the run itself is"),
    Member("profile", "where our time goes, on both ends"),
    Member("shaped", "what an encoding gains on a link of 1 Gbit/s, and the bytes on it"),
    Member("wide_area", "what several connections gain over a long distance", arguments_quick=None),
    Member("scale", "64 learners on one syncer: rounds, processor time, decisions"),
    Member("capacity", "the largest model that one syncer sustains", arguments_quick=None),
    Member("quality", "what an encoding costs in loss", seconds_max=600.0, arguments_quick=None),
    Member(
        "start",
        "a killed learner is back: from its start to its first step",
        report="summary.json",
        arguments=("--kills", "3"),
        arguments_quick=None,
        translate=older.start_section,
    ),
    Member(
        "durability",
        "a durable commit, and a restart",
        report="durability-1000000.json",
        arguments_quick=("--rounds", "15"),
        translate=older.durability_section,
    ),
)
"""In the order in which they run."""


def run_member(
    member: Member, is_quick: bool, folder: Path, more: Sequence[str], environment: Mapping[str, str]
) -> Section | Failure:
    """Runs one member in a process of its own, which ends with this one, and reads what it has written.

    Args:
        member: Which.
        is_quick: Fewer and smaller repetitions.
        folder: For what it writes, and for its temporary files.
        more: Further arguments for it.
        environment: Variables for it, beside those of this process.
    """
    limit = member.seconds_max_quick if is_quick else member.seconds_max
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            tied(member.command(is_quick, folder, more)),
            cwd=ROOT,
            env={**os.environ, **environment, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        reason = ""
        try:
            status = process.wait(timeout=limit)
            reason = f"it ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            reason = f"it was ended after {limit:g} seconds"
        finally:
            _end_group(process)
        if not reason:
            try:
                return member.section(folder)
            except (OSError, ValueError, KeyError, TypeError) as error:
                reason = f"its report cannot be read: {error!r}"
        output.seek(0)
        return Failure(member.name, reason + lack_of_space(folder), "".join(output.readlines()[-OUTPUT_LINES_KEPT:]))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends what a member may have left running with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_members(
    members: Sequence[Member],
    results: Results,
    folder: Path,
    more: Mapping[str, Sequence[str]],
    told: Callable[[Member, Section | Failure | None], None],
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs members one after the other and adds what comes of them to the results.

    Args:
        members: Which, in order.
        results: Grow.
        folder: For what the members write; a member's part is removed when it has ended.
        more: Further arguments by member's name.
        told: Hears before each member (None) and after it.
        environment: Variables for the members.
    """
    for member in members:
        told(member, None)
        own = folder / member.name
        started = time.monotonic()
        outcome: Section | Failure
        try:
            outcome = run_member(member, results.is_quick, own, more.get(member.name, ()), environment or {})
        except OSError as error:
            outcome = Failure(member.name, f"it could not be run: {error}{lack_of_space(folder)}", "")
        shutil.rmtree(own, ignore_errors=True)
        results.seconds[member.name] = round(time.monotonic() - started, 1)
        if isinstance(outcome, Failure):
            results.failures.append(outcome)
        else:
            results.add(outcome)
        told(member, outcome)
