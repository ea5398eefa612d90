"""The protos pass buf: STANDARD and COMMENTS rules, and no break against the last release."""

import subprocess

import pytest

from tests.operate.tools import node_tool
from tests.tidy.source_tree import ROOT

pytestmark = pytest.mark.operate


@pytest.mark.parametrize("arguments", [["lint"], ["breaking", "--against", "protos/baseline.binpb"], ["build"]])
def test_buf(arguments: list[str]) -> None:
    command = [node_tool("buf"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_buf_formats_the_protos() -> None:
    command = [node_tool("buf"), "format", "--diff", "--exit-code"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
