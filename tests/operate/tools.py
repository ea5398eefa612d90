"""Finds the tools of `make test-operate`; an absent one skips the test that needs it."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.tidy.source_tree import ROOT


def node_tool(name: str) -> str:
    """Path of a command from tools/package.json."""
    found = ROOT / "tools" / "node_modules" / ".bin" / name
    if not found.exists():
        pytest.skip(f"no {name}: needs npm, then `make test-operate`")
    return str(found)


def system_tool(name: str) -> str:
    """Path of a Debian command."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: `make system-deps`")
    return found


def python_tool(name: str) -> str:
    """Path of a command that the environment of this interpreter holds."""
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        pytest.skip(f"no {name}: `make setup`")
    return str(found)
