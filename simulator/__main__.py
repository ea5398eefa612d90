"""`python -m simulator`: many seeds on all processors, or one seed in words."""

from __future__ import annotations

import argparse
import sys

from simulator.seeds import digest, replay, simulate

SECONDS = 60.0
"""Simulated time with troubles in a walk."""


def main() -> int:
    """Exit code 0: all rules were kept."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="simulated seconds with troubles")
    parser.add_argument("--replay", type=int, metavar="SEED", help="goes through one seed and prints all that happens")
    parser.add_argument("--digest", type=int, metavar="SEED", help="prints a digest of all that happens in one seed")
    arguments = parser.parse_args()
    if arguments.digest is not None:
        print(digest(arguments.digest, arguments.seconds))
        return 0
    if arguments.replay is not None:
        return 0 if replay(arguments.replay, arguments.seconds) else 1
    first = arguments.first
    return 1 if simulate(range(first, first + arguments.seeds), arguments.seconds).failures else 0


if __name__ == "__main__":
    sys.exit(main())
