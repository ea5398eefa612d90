"""What Prometheus thinks of the metrics themselves."""

import asyncio
from pathlib import Path

import pytest

from tests.integration.syncers import fetch, syncer
from tests.operate.tools import system_tool

pytestmark = pytest.mark.operate


async def test_promtool_finds_nothing_wrong_with_the_syncers_metrics(tmp_path: Path) -> None:
    async with syncer(tmp_path) as running:
        status, exposition = await fetch(running, "metrics")
    assert status == 200
    checker = await asyncio.create_subprocess_exec(
        system_tool("promtool"),
        "check",
        "metrics",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    findings, _ = await checker.communicate(exposition.encode())
    assert (checker.returncode, findings.decode()) == (0, "")
