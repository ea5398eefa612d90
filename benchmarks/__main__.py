"""Every benchmark of this repository, one after the other: `python -m benchmarks`.

Writes results/latest.json, latest.md and pictures; a quick run writes them to results/quick. Sections that a run does
not measure stay as they are. Targets that are missed are named, and are no error; a benchmark that fails is shown, and
the exit status is 1 once the others are done. Whoever interrupts it keeps what had been measured (status 130, after
SIGTERM 143, after SIGHUP 129). docs/benchmarks.md says what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks import markdown, pictures, places, record
from benchmarks.ending import ended_by_signals, status_of, undisturbed
from benchmarks.figures import Section, show
from benchmarks.peers import ways
from benchmarks.record import Failure, Results
from benchmarks.suite import MEMBERS, Member, run_members

FOLDER = Path(__file__).parent / "results"
QUICK_FOLDER = "quick"
"""Below the folder for results, so that a first look takes the place of no full run."""
PEERS_MEMBER = "peers"
NAMES = [member.name for member in MEMBERS]


class Terminal(Console):
    """A console that says where nobody reads it any more, in place of ending the program."""

    def on_broken_pipe(self) -> None:
        """Called where an OSError is handled."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing can be said there at the end, either
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def chosen(only: str | None, is_quick: bool) -> list[Member]:
    """Members to run.

    Args:
        only: Their names, separated by commas; None: all that a run of this kind has.
        is_quick: Slow ones are left out, unless they are named.

    Raises:
        ValueError: it names none, or one that there is not.
    """
    if only is None:
        return [member for member in MEMBERS if not is_quick or member.arguments_quick is not None]
    known = {member.name: member for member in MEMBERS}
    names = list(dict.fromkeys(name.strip() for name in only.split(",")))
    if "" in names:
        raise ValueError(f"--only {only!r}: a name is empty; there are {', '.join(known)}")
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {','.join(unknown)}: there is no such benchmark; there are {', '.join(known)}")
    return [known[name] for name in names]


def teller(console: Console, is_quick: bool) -> Callable[[Member, Section | Failure | None], None]:
    """Tells what happens as it happens."""

    def told(member: Member, outcome: Section | Failure | None) -> None:
        if outcome is None:
            console.print(f"\n[bold]{member.name}[/]: {member.about} ...", highlight=False)
        elif isinstance(outcome, Failure):
            console.print(f"[red]{member.name} came to nothing: {escape(outcome.reason)}[/]", highlight=False)
            console.print(outcome.output, style="dim", markup=False, highlight=False)
        else:
            show(outcome, console, is_quick)

    return told


def write(results: Results, folder: Path) -> None:
    """Writes JSON, pictures and Markdown to a folder; the JSON comes first, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    new = folder / ".latest.json.new"
    new.write_text(json.dumps(results.to_json(), indent=1) + "\n", encoding="utf-8")
    os.replace(new, folder / "latest.json")
    drawn = pictures.draw(results.sections, folder, results.is_quick)
    (folder / "latest.md").write_text(markdown.page(results, drawn), encoding="utf-8")


def say_verdict(measured: Results, written: Results, folder: Path, console: Console) -> None:
    """The last lines.

    Args:
        measured: By this run.
        written: With what was kept of earlier ones.
        folder: Where.
        console: Prints.
    """
    console.print(f"\n{markdown.verdict(measured)}", highlight=False)
    for section, figure in measured.missed:
        text = f"{section.name}: {figure.name}: {markdown.value_of(figure)}, target {markdown.target_of(figure)}"
        console.print(f"  [red]missed[/] {escape(text)}", highlight=False)
    for failure in measured.failures:
        console.print(f"  [red]came to nothing[/] {failure.name}: {escape(failure.reason)}", highlight=False)
    if not measured.sections:
        console.print(f"Nothing was measured, and nothing in {folder} was changed.", highlight=False)
        return
    own = {section.name for section in measured.sections}
    kept = [section.name for section in written.sections if section.name not in own]
    console.print(f"Written to {folder}/latest.json and latest.md, with pictures.", highlight=False)
    if kept:
        console.print(f"Kept there from earlier runs: {', '.join(kept)}.", highlight=False)


def _check_output(folder: Path) -> None:
    try:
        places.check_writable(folder)
    except places.PlaceError as error:
        raise ValueError(f"--output {error}") from None


def parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Member], Path, Results | None]:
    """Options, members, the folder for results, and the results that stand there.

    All that can be wrong beforehand is found here; the program ends with status 2 and says what would be right.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(f"  {member.name:12} {member.about}" for member in MEMBERS),
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer and smaller repetitions, two minutes in all")
    add("--only", metavar="A,B", help="these benchmarks; sections of others stay as they are")
    add("--peers", default="", metavar="A,B", help="also compare with flower, hivemind, nvflare")
    add("--output", type=Path, default=FOLDER, help=f"folder; a quick run writes to its {QUICK_FOLDER!r} (%(default)s)")
    options = parser.parse_args(arguments)
    folder = options.output / QUICK_FOLDER if options.quick else options.output
    try:
        members = chosen(options.only, options.quick)
        ways.chosen(options.peers)
        if options.peers and PEERS_MEMBER not in {member.name for member in members}:
            raise ValueError(
                f"--peers {options.peers}: --only leaves out the benchmark {PEERS_MEMBER!r}, which compares"
            )
        _check_output(folder)
        earlier = record.read(folder / "latest.json", options.quick)
        places.check_temporary(options.quick)
    except ValueError as error:
        parser.error(str(error))
    return options, members, folder, earlier


def main(arguments: Sequence[str]) -> int:
    """Runs the suite; returns the exit status."""
    options, members, folder, earlier = parsed(arguments)
    console = Terminal(width=None if sys.stdout.isatty() else 150)
    results, status = Results(options.quick), 0
    more = {PEERS_MEMBER: ("--peers", options.peers)} if options.peers else {}
    try:
        with ended_by_signals(), places.temporary_places() as (temporary, environment):
            run_members(members, results, temporary, more, teller(console, options.quick), environment)
    except KeyboardInterrupt as error:
        status = status_of(error)
        results.failures.append(Failure("suite", "interrupted; what had been measured until then is kept", ""))
    except OSError as error:
        results.failures.append(Failure("suite", f"it could not go on: {error}", ""))
    written = results.over(earlier, NAMES)
    with undisturbed(), contextlib.suppress(OSError):  # where the terminal has closed, nobody hears the last words
        try:
            if results.sections:
                write(written, folder)
        except OSError as error:
            results.failures.append(Failure("suite", f"{folder} cannot be written any more: {error}", ""))
        say_verdict(results, written, folder, console)
    return status or (1 if results.failures else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
