"""`python -m syncer_service.replay TAPE...`: drives a fresh machine along event tapes and compares its decisions.

Exit codes: 0 all as recorded; 1 something differs, or the machine raises; 2 a file is no tape, or the command line
cannot be used. Needs neither gRPC nor JAX, and no other part of a syncer.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from decoupled_diloco.core.effects import Effect
from syncer_service.replay.comparison import Replay, Watch, replay
from syncer_service.replay.words import beginning_line, difference_lines, effect_lines, event_line, summary_lines
from syncer_service.tape_file import TapeError, TapeFile, TapeRecord, end_line, header_line, record_line, tape_files


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Runs the command; `arguments` without the program's name."""
    out = out or sys.stdout
    parser = build_parser()
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    paths = [path for given in options.tape for path in (tape_files(given) if given.is_dir() else [given])]
    if not paths:
        parser.error(f"there are no tapes in {', '.join(map(str, options.tape))}")
    if len(paths) > 1 and (options.as_scenario or options.until):
        parser.error(f"--as-scenario and --until want one tape, not {len(paths)}")
    try:
        return max(_replay_one(path, options, out) for path in paths)
    except (TapeError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m syncer_service.replay",
        description="Drives a fresh machine along event tapes and compares its decisions with the recorded ones.",
        allow_abbrev=False,
    )
    parser.add_argument("tape", nargs="+", type=Path, help="a file of a tape, or a folder of them (STATE_DIR/tape)")
    parser.add_argument(
        "--until",
        type=_instant,
        metavar="INSTANT",
        help="stop after this instant, as --show prints it; +SECONDS counts from the beginning of the tape",
    )
    parser.add_argument(
        "--show",
        action="append",
        type=re.compile,
        default=[],
        metavar="PATTERN",
        help="print events and effects with a match of this regular expression (. for all); may be repeated",
    )
    parser.add_argument(
        "--as-scenario",
        type=Path,
        metavar="FILE",
        help="write the events, with the effects of now, as a text that tests/scenarios/tapes can keep",
    )
    return parser


def _instant(text: str) -> tuple[bool, float]:
    """Whether it counts from the beginning, and the seconds."""
    return text.startswith("+"), float(text)


def _replay_one(path: Path, options: argparse.Namespace, out: TextIO) -> int:
    tape = TapeFile(path)
    print(beginning_line(tape), file=out)
    until = None
    if options.until is not None:
        is_relative, seconds = options.until
        until = seconds + (tape.header.beginning.at if is_relative else 0.0)
    if options.as_scenario is not None:
        result = write_scenario(tape, options.as_scenario, until)
        print(f"{result.event_count} events written to {options.as_scenario}", file=out)
        if tape.header.beginning.began == "captured":
            print("it begins in the middle of a process: another release may not be able to read it", file=out)
    else:
        result = replay(tape, until=until, watch=_watch(options.show, out))
    if result.difference is not None:
        print(*difference_lines(result.difference), sep="\n", file=out)
    print(*summary_lines(tape, result), sep="\n", file=out)
    return 0 if result.difference is None else 1


def _watch(patterns: list[re.Pattern[str]], out: TextIO) -> Watch | None:
    if not patterns:
        return None

    def show(record: TapeRecord, effects: list[Effect]) -> None:
        line, further = event_line(record), list(effect_lines(effects))
        if any(pattern.search(text) for pattern in patterns for text in (line, *further)):
            print(line, *further, sep="\n", file=out)

    return show


def write_scenario(tape: TapeFile, path: Path, until: float | None = None) -> Replay:
    """Writes a tape as plain text, with the effects that the machine of now gives.

    Args:
        tape: The tape.
        path: The file; written anew.
        until: The last instant of the events that are taken.

    Returns:
        The replay; a difference is there only if the machine raised.

    Raises:
        TapeError: The tape holds what this release does not know.
        OSError: The file cannot be written.
    """
    lines = [header_line(replace(tape.header, missed_count=0))]
    result = replay(
        tape,
        until=until,
        watch=lambda record, effects: lines.append(record_line(record.at, record.event, effects)),
        compare=False,
    )
    if result.difference is not None:
        record = result.difference.record
        lines[-1] = record_line(record.at, record.event, None)
    path.write_text("".join([*lines, end_line("the part that was kept")]), encoding="utf-8")
    return result


if __name__ == "__main__":
    sys.exit(main())
