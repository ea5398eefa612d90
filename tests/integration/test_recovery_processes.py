"""Whole processes: a learner is killed and comes back from its id alone, on a machine on which it can write nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.syncers import config_of, machine_of, syncer, until
from tests.integration.test_learner_process import ROOT, SYNTHETIC, write_run_file

Line = dict[str, object]
NOWHERE = "/proc/nowhere"
"""A folder that nobody can make, not even root."""
READ_ONLY = (
    *("unshare", "--user", "--map-root-user", "--mount", "sh", "-c"),
    'mount --make-rprivate / && mount -o remount,bind,ro / && exec "$@"',
    "sh",
)
"""Runs a command with a root file system that is read-only, where the machine lets one."""


def read_only_prefix() -> tuple[str, ...]:
    done = subprocess.run([*READ_ONLY, "true"], capture_output=True, check=False) if sys.platform == "linux" else None
    return READ_ONLY if done is not None and done.returncode == 0 else ()


@asynccontextmanager
async def process(name: str, *arguments: object, prefix: tuple[str, ...] = ()) -> AsyncIterator[list[Line]]:
    """A learner's process and the lines of its log, as they come; killed in the end."""
    command = [*prefix, sys.executable, "-B", "-m", "learner_service", "--learner-id", name, "--log-format", "json"]
    places = {"JAX_PLATFORMS": "cpu", "HOME": NOWHERE, "TMPDIR": NOWHERE}
    running = await asyncio.create_subprocess_exec(
        *command,
        *map(str, arguments),
        cwd=ROOT,
        env=os.environ | places,
        stderr=asyncio.subprocess.PIPE,
    )
    lines: list[Line] = []

    async def read() -> None:
        assert running.stderr is not None
        while line := await running.stderr.readline():
            lines.append(json.loads(line) if line.startswith(b"{") else {"event": line.decode()})

    reading = asyncio.create_task(read())
    try:
        yield lines
    finally:
        if running.returncode is None:
            running.send_signal(signal.SIGKILL)
        await running.wait()
        await reading


async def said(lines: list[Line], event: str, seconds: float = 60.0) -> Line:
    """Waits for a line of the log."""

    def found() -> Line | None:
        return next((line for line in lines if line["event"] == event), None)

    try:
        async with asyncio.timeout(seconds):
            while found() is None:  # noqa: ASYNC110 (another task fills the list)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{event} was not said: {lines}") from None
    line = found()
    assert line is not None
    return line


@pytest.mark.slow
async def test_a_killed_learner_comes_back_from_its_id_alone_with_the_moments_of_a_peer(tmp_path):
    sections = {"run": {"total_steps": 0, "seed": 1}, "workload": SYNTHETIC}
    run_file = write_run_file(tmp_path, **sections)
    async with syncer(tmp_path, config_of(**sections)) as running:
        common = ("--run-file", run_file, "--cache-dir", NOWHERE, "--syncer", running.addresses.data)
        common = (*common, "--peer-listen", "127.0.0.1:0", "--step-seconds-min", 0.03)
        async with process("a", *common) as first:
            await said(first, "data_opened")
            async with process("b", *common):
                await until(running, lambda: "b" in machine_of(running).membership.learners, 60.0)
                await until(running, lambda: merged(running, "b") >= 2, 60.0)
            incarnation = machine_of(running).membership.learners["b"].incarnation
            before = merged(running, "b")
            async with process("b", *common, prefix=read_only_prefix()) as again:
                recovered = await said(again, "optimizer_recovered")
                assert recovered["origin"] == "a"
                assert recovered["source"] == "peer"
                await until(running, lambda: merged(running, "b") > before, 60.0)
                assert machine_of(running).membership.learners["b"].incarnation > incarnation
                assert not [line for line in again if line["event"] == "optimizer_fresh"]


def merged(running, name: str) -> int:
    """Rounds that a learner's contributions were merged into."""
    return int(sum(machine_of(running).membership.learners[name].rounds_merged))
