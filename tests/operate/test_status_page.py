"""The status page in a real browser."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.integration.protocol_learner import ProtocolLearner, Script
from tests.integration.syncers import config_of, syncer
from tests.operate.tools import system_tool

pytestmark = pytest.mark.operate

QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


async def document(url: str, profile: Path) -> str:
    """The page's elements after its script has fetched the status once."""
    browser = await asyncio.create_subprocess_exec(
        system_tool("chromium"),
        *QUIET.split(),
        f"--user-data-dir={profile}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await browser.communicate()
    assert browser.returncode == 0
    return output.decode().split("<script>")[0]


def text(html: str) -> str:
    """What a reader sees, roughly."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


async def test_the_page_shows_a_run_from_waiting_to_finished(tmp_path: Path) -> None:
    config = config_of(run={"total_steps": 32})
    async with syncer(tmp_path, config) as running:
        page = running.addresses.page
        waiting = text(await document(page, tmp_path / "browser"))
        assert "waiting for learners to join" in waiting
        assert "none yet" in waiting

        team = [
            ProtocolLearner(str(running.addresses.data), name, config.to_policy(), Script(seed=seed))
            for seed, name in enumerate(("learner-a", "learner-b"))
        ]
        await asyncio.gather(*(learner.run() for learner in team))
        finished = await document(page, tmp_path / "browser")

    assert "<title>test · step 32 · Decoupled DiLoCo</title>" in finished
    seen = text(finished)
    assert "as of" in seen, "the script did not run to its end"
    for words in ("finished", "goodput", "token goodput", "participation", "uptime", "committed", "learner-a"):
        assert words in seen
