"""`syncerctl`: the operator's command line."""

from __future__ import annotations

import sys

from syncerctl.program import app


def main() -> None:
    """Runs the program; ends the process with its exit code."""
    app(sys.argv[1:], prog_name="syncerctl")


if __name__ == "__main__":
    main()
