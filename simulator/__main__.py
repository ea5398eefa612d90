"""`python -m simulator`: many seeds on all processors, or one seed in words; `bandwidth`: a plan of the network."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from simulator import bandwidth_command
from simulator.seeds import digest, replay, simulate

SECONDS = 60.0
"""Simulated time with troubles in a walk."""

USAGE = "python -m simulator bandwidth --params N --learners M --step-seconds S [options]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: all rules were kept, or the plan is printed; 2: the command line cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="simulated seconds with troubles")
    parser.add_argument("--replay", type=int, metavar="SEED", help="goes through one seed and prints all that happens")
    parser.add_argument("--digest", type=int, metavar="SEED", help="prints a digest of all that happens in one seed")
    commands = parser.add_subparsers(dest="command", title="other commands")
    planner = commands.add_parser(
        "bandwidth", help="plans the network of a run", description=bandwidth_command.__doc__, usage=USAGE
    )
    bandwidth_command.add_arguments(planner)
    options = parser.parse_args(arguments)
    if options.command == "bandwidth":
        return bandwidth_command.run(options, planner.error)
    if options.digest is not None:
        print(digest(options.digest, options.seconds))
        return 0
    if options.replay is not None:
        return 0 if replay(options.replay, options.seconds) else 1
    first = options.first
    return 1 if simulate(range(first, first + options.seeds), options.seconds).failures else 0


if __name__ == "__main__":
    sys.exit(main())
