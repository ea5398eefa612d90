"""A host whose wall clock is off: only that clock, and in the program that it becomes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tidy.source_tree import ROOT

TELLS_TIME = """
import sys, time
print(time.time(), time.time_ns(), time.monotonic(), sys.argv[1:], __name__)
"""
CALLS = """
import asyncio, time, grpc
async def main():
    async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
        began = time.monotonic()
        try:
            await channel.unary_unary("/a/b")(b"", timeout=0.4, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            print(error.code().name, time.monotonic() - began)
asyncio.run(main())
"""


def said(folder: Path, program: str, off_seconds: float, *arguments: str) -> str:
    """What a program prints on a host whose clock is off."""
    (folder / "program_under_test.py").write_text(program)
    command = [sys.executable, "-m", "chaos.wrong_clock", str(off_seconds), "program_under_test", *arguments]
    variables = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.mark.parametrize("off_seconds", [-86400.0, 31536000.0])
def test_a_program_sees_another_time_of_day_and_the_same_monotonic_clock(tmp_path: Path, off_seconds: float):
    before, monotonic_before = time.time(), time.monotonic()
    text = said(tmp_path, TELLS_TIME, off_seconds, "--flag", "value")
    after, monotonic_after = time.time(), time.monotonic()
    seconds, nanoseconds, monotonic, rest = text.split(" ", 3)
    assert before <= float(seconds) - off_seconds <= after
    assert before <= int(nanoseconds) / 1e9 - off_seconds <= after
    assert monotonic_before <= float(monotonic) <= monotonic_after
    assert rest == "['--flag', 'value'] __main__"


@pytest.mark.parametrize("off_seconds", [-86400.0, 31536000.0])
def test_deadlines_of_calls_are_as_long_as_ever(tmp_path: Path, off_seconds: float):
    code, seconds = said(tmp_path, CALLS, off_seconds).split()
    assert code == "DEADLINE_EXCEEDED"
    assert float(seconds) > 0.3
