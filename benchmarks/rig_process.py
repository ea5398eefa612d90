"""An observer in a process of its own, told what to do over its standard input: downloads and echoes beside the others.

with ObserverProcess(syncer, "eye-1", sizes) as eye:
eye.tell("download", 0, version)        # several may be told before the first one is asked
seconds = eye.answer()
eye.tell("echo")                        # one echo after the other, until
seconds = eye.stop_echo()
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import psutil

from benchmarks.rig_learner import RigLearner
from benchmarks.syncer_rig import ROOT, SyncerProcess, flat_schema
from benchmarks.tied import tied
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Role, Version
from decoupled_diloco.run_file import run_config
from decoupled_diloco.runtime.malloc import tune_malloc

ECHO_PAUSE_SECONDS: Final = 0.005
"""Between an echo and the next one."""


class ObserverProcess:
    """An observer that has joined and waits for words.

    Args:
        syncer: whom it joins.
        name: its id.
        sizes: of the parts of `flat_schema`, which the learners have too.
    """

    def __init__(self, syncer: SyncerProcess, name: str, sizes: Sequence[int]) -> None:
        self._config = {
            "address": syncer.address,
            "values": syncer.config.model_dump(mode="json"),
            "name": name,
            "sizes": list(sizes),
        }

    def __enter__(self) -> Self:
        self._child = subprocess.Popen(
            tied([sys.executable, "-m", "benchmarks.rig_process"]),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._process = psutil.Process(self._child.pid)
        self._say(self._config)
        self.answer()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._child:
            self._child.kill()

    def _say(self, message: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def tell(self, word: str, fragment: int = 0, version: Version | None = None) -> None:
        """Tells it what to do; does not wait."""
        name = [version.timeline, version.number, version.digest] if version is not None else None
        self._say([word, fragment, name])

    def answer(self) -> list[Any]:
        """What it says once it is done: seconds.

        Raises:
            RuntimeError: it has died.
        """
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of observer {self._config['name']} has died")
        said: list[Any] = json.loads(line)
        return said

    def stop_echo(self) -> tuple[list[float], list[float]]:
        """Seconds of every echo since it was told to, and how many seconds too late its wait before each one ended."""
        self.tell("stop")
        echoes, late = self.answer()
        return echoes, late

    def cpu_seconds(self) -> float:
        """Processor time so far, user and system, all threads."""
        times = self._process.cpu_times()
        return float(times.user + times.system)


class _Syncer:
    """What a `RigLearner` needs to know of a syncer that another process has started."""

    def __init__(self, address: str, config: RunConfig) -> None:
        self.address = address
        self.config = config


async def _words(queue: asyncio.Queue[Any]) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        queue.put_nowait(json.loads(line))


async def _observe() -> None:
    words: asyncio.Queue[Any] = asyncio.Queue()
    reader = asyncio.create_task(_words(words))
    told = await words.get()
    syncer = _Syncer(told["address"], run_config(told["values"]))
    async with RigLearner(syncer, told["name"], flat_schema(told["sizes"]), Role.OBSERVER) as eye:
        _reply([])
        while not reader.done() or not words.empty():
            word, fragment, name = await words.get()
            if word == "download":
                started = time.perf_counter()
                await eye.download(lev.Published(fragment, Version(*name), 0))
                _reply([time.perf_counter() - started])
            elif word == "echo":
                _reply(await _echoes(eye, words))


async def _echoes(eye: RigLearner, words: asyncio.Queue[Any]) -> list[list[float]]:
    """One after the other until there is a word; takes it."""
    echoes, late = [], []
    while words.empty():
        started = time.perf_counter()
        await asyncio.sleep(ECHO_PAUSE_SECONDS)
        late.append(time.perf_counter() - started - ECHO_PAUSE_SECONDS)
        echoes.append(await eye.echo())
    words.get_nowait()
    return [echoes, late]


def _reply(said: object) -> None:
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    tune_malloc()
    asyncio.run(_observe())
