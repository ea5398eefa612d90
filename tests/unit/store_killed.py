"""Commits rounds until a failpoint kills it: `python -m tests.unit.store_killed FOLDER INTERVAL POINTS`."""

import sys
from pathlib import Path

from decoupled_diloco.runtime import failpoints
from tests.unit.store_cases import TestRun

COUNT = 8


def main() -> None:
    folder, base_interval, points = sys.argv[1:]
    run = TestRun(Path(folder), int(base_interval)).begin()
    failpoints.arm(points)
    run.commits(COUNT)
    print("survived")


if __name__ == "__main__":
    main()
