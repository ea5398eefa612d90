"""Syncers for tests: in this process, on free ports, with short deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from decoupled_diloco.config import RunConfig
from decoupled_diloco.run_file import run_config
from decoupled_diloco.runtime.lifecycle import StopRequest
from syncer_service.app import RunningSyncer, running_syncer
from syncer_service.config import SyncerSettings

DEADLINES = {
    "heartbeat_seconds": 0.1,
    "lease_seconds": 2.0,
    "stall_seconds": 1.0,
    "upload_idle_seconds": 1.0,
    "upload_seconds_min": 5.0,
    "drain_seconds_max": 5.0,
    "attach_idle_seconds": 0.6,
}


def config_of(**sections: Mapping[str, object]) -> RunConfig:
    """A small run; `sections` replace values."""
    values: dict[str, dict[str, object]] = {
        "run": {"id": "test", "total_steps": 0},
        "fragments": {"count": 4, "interval_steps": 8, "overlap_steps": 2},
        "encoding": {"upload": "float32", "download": "float32"},
        "deadlines": dict(DEADLINES),
    }
    for section, changes in sections.items():
        values.setdefault(section, {}).update(changes)
    return run_config(values)


def settings_of(folder: Path, **values: object) -> SyncerSettings:
    """Process settings with free ports."""
    defaults = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "http_listen": "127.0.0.1:0",
        "output_dir": folder / "output",
        "state_dir": folder / "state",
        "drain_seconds": 2.0,
    }
    return SyncerSettings(**(defaults | values))


class _EventList:
    """A tape in a list: (instant, event)."""

    def __init__(self, events: list) -> None:
        self._events = events

    def event(self, now, event) -> None:
        self._events.append((now, event))

    def effects(self, effects) -> None:
        pass


@asynccontextmanager
async def syncer(
    folder: Path, config: RunConfig | None = None, *, tape: list | None = None, **settings: object
) -> AsyncIterator[RunningSyncer]:
    """A running syncer; a part of it that dies fails the test."""
    stop = StopRequest()
    keep = _EventList(tape) if tape is not None else None
    async with running_syncer(config or config_of(), settings_of(folder, **settings), stop, tape=keep) as running:
        yield running
    assert stop.exit_code == 0, stop.reason


def machine_of(running: RunningSyncer):
    return running.serving.machine


async def until(running: RunningSyncer, condition, seconds: float = 20.0) -> None:
    """Waits for something that the machine will come to."""
    async with asyncio.timeout(seconds):
        await running.serving.driver.wait_until(condition)


async def fetch(running: RunningSyncer, path: str) -> tuple[int, str]:
    """Status and text of a page."""
    async with aiohttp.ClientSession() as session, session.get(running.addresses.page + path) as answer:
        return answer.status, await answer.text()
