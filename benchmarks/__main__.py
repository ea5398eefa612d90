"""Every benchmark of this repository, one after the other: `python -m benchmarks`.

Writes results/latest.json, latest.md and pictures. Targets that are missed are named, and are no error; a benchmark
that fails is shown, and the exit status is 1 once the others are done. docs/benchmarks.md says what is measured.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from benchmarks import markdown, pictures
from benchmarks.figures import Section, show
from benchmarks.peers import ways
from benchmarks.suite import MEMBERS, Failure, Member, Results, run_members

FOLDER = Path(__file__).parent / "results"
PEERS_MEMBER = "peers"


def chosen(only: str, is_quick: bool) -> list[Member]:
    """Members to run.

    Args:
        only: Their names, separated by commas; "": all that a run of this kind has.
        is_quick: Slow ones are left out, unless they are named.

    Raises:
        ValueError: there is no member of that name.
    """
    if not only:
        return [member for member in MEMBERS if not is_quick or member.arguments_quick is not None]
    known = {member.name: member for member in MEMBERS}
    names = [name.strip() for name in only.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {','.join(unknown)}: there is no such benchmark; there are {', '.join(known)}")
    return [known[name] for name in names]


def teller(console: Console) -> Callable[[Member, Section | Failure | None], None]:
    """Tells what happens as it happens."""

    def told(member: Member, outcome: Section | Failure | None) -> None:
        if outcome is None:
            console.print(f"\n[bold]{member.name}[/]: {member.about} ...", highlight=False)
        elif isinstance(outcome, Failure):
            console.print(f"[red]{member.name} came to nothing: {escape(outcome.reason)}[/]", highlight=False)
            console.print(outcome.output, style="dim", markup=False, highlight=False)
        else:
            show(outcome, console)

    return told


def write(results: Results, folder: Path) -> None:
    """Writes JSON, pictures and Markdown to a folder; the JSON comes first, so that nothing can take it away."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "latest.json").write_text(json.dumps(results.to_json(), indent=1) + "\n", encoding="utf-8")
    for old in folder.glob("*.png"):
        old.unlink()
    drawn = pictures.draw(results.sections, folder)
    (folder / "latest.md").write_text(markdown.page(results, drawn), encoding="utf-8")


def say_verdict(results: Results, folder: Path, console: Console) -> None:
    """The last lines."""
    missed = results.missed
    console.print(f"\nTargets met: {results.met_count}, missed: {len(missed)}.", highlight=False)
    for section, figure in missed:
        text = f"{section.name}: {figure.name}: {markdown.value_of(figure)}, target {markdown.target_of(figure)}"
        console.print(f"  [red]missed[/] {escape(text)}", highlight=False)
    for failure in results.failures:
        console.print(f"  [red]came to nothing[/] {failure.name}: {escape(failure.reason)}", highlight=False)
    console.print(f"Written to {folder}/latest.json and latest.md, with pictures.", highlight=False)


def _interrupt(number: int, frame: object) -> None:
    """Being told to end is as good as Ctrl-C: the benchmark that runs is ended, and what there is gets written."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> int:
    """Runs the suite; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="benchmarks:\n" + "\n".join(f"  {member.name:12} {member.about}" for member in MEMBERS),
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller repetitions, two minutes in all")
    parser.add_argument("--only", default="", metavar="A,B", help="these benchmarks")
    parser.add_argument("--peers", default="", metavar="A,B", help="also compare with flower, hivemind, nvflare")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder for what is written (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        members = chosen(options.only, options.quick)
        ways.chosen(options.peers)
    except ValueError as error:
        parser.error(str(error))
    if options.peers and PEERS_MEMBER not in {member.name for member in members}:
        parser.error(f"--peers {options.peers}: --only leaves out the benchmark {PEERS_MEMBER!r}, which compares")
    console = Console(width=None if sys.stdout.isatty() else 150)
    results = Results(options.quick)
    results.left_out = [member.name for member in MEMBERS if member not in members]
    more = {PEERS_MEMBER: ("--peers", options.peers)} if options.peers else {}
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        try:
            run_members(members, results, Path(folder), more, teller(console))
        except KeyboardInterrupt:
            results.failures.append(Failure("suite", "interrupted; what had been measured until then is kept", ""))
    write(results, options.output)
    say_verdict(results, options.output, console)
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
