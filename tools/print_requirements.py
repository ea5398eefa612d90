"""Prints what the project and some of its extras need, one requirement a line, for `pip install -r`.

`python tools/print_requirements.py syncer` reads pyproject.toml beside it. The Dockerfiles use it to install
dependencies in a layer of their own, which changes of the code do not touch.
"""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(extras: list[str]) -> list[str]:
    """The project's own requirements, then those of the extras in the given order.

    Raises:
        SystemExit: an extra does not exist; the message lists those that do.
    """
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    for extra in extras:
        if extra not in known:
            raise SystemExit(f"there is no extra {extra!r}; pyproject.toml has {', '.join(sorted(known))}")
    return [*project["dependencies"], *(line for extra in extras for line in known[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
