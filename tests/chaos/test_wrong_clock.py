"""A host whose wall clock is off: only that clock, and in the program that it becomes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tidy.source_tree import ROOT

PROGRAM = """
import sys, time
print(time.time(), time.time_ns(), time.monotonic(), sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("off_seconds", [-86400.0, 31536000.0])
def test_a_program_sees_another_time_of_day_and_the_same_monotonic_clock(tmp_path: Path, off_seconds: float):
    (tmp_path / "tells_time.py").write_text(PROGRAM)
    before, monotonic_before = time.time(), time.monotonic()
    command = [sys.executable, "-m", "chaos.wrong_clock", str(off_seconds), "tells_time", "--flag", "value"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    after, monotonic_after = time.time(), time.monotonic()
    seconds, nanoseconds, monotonic, rest = done.stdout.strip().split(" ", 3)
    assert before <= float(seconds) - off_seconds <= after
    assert before <= int(nanoseconds) / 1e9 - off_seconds <= after
    assert monotonic_before <= float(monotonic) <= monotonic_after
    assert rest == "['--flag', 'value'] __main__"
