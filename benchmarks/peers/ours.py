"""Our calls: UploadContribution to a syncer as shipped but for its store in memory, then DownloadFragment.

The learner's end is the client of `learner_service`. Between the two transfers the syncer merges, makes the outer step
and publishes; that is no part of a transport's work, so neither its time nor its processor time is counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np

from benchmarks.peers.loopback import Vector
from benchmarks.peers.usage import cpu_seconds, peak_bytes, resident_bytes, used_cpu_seconds
from benchmarks.rig_learner import RigLearner
from benchmarks.syncer_rig import SyncerProcess, flat_schema, run_values
from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.core.ids import Fate

ResultT = TypeVar("ResultT")


class Near:
    """A learner with a syncer of its own."""

    def __init__(self, address: str, count: int) -> None:
        self._runner = asyncio.Runner()
        self._syncer = SyncerProcess(run_values()).__enter__()
        self._far_base = resident_bytes(self._syncer.process.pid)
        try:
            self._learner = RigLearner(self._syncer, "alpha", flat_schema([count]))
            self._run(self._learner.__aenter__())
            self._run(self._learner.initialize())
        except BaseException:
            self.close()
            raise
        self._round = 0
        self.measured: dict[str, Any] = {}

    def _run(self, work: Awaitable[ResultT]) -> ResultT:
        async def awaited() -> ResultT:
            return await work

        return self._runner.run(awaited())

    def round_trip(self, payload: Vector) -> Vector:
        """A contribution there, the version that it leads to back."""
        return self._run(self._round_trip(payload))

    async def _round_trip(self, payload: Vector) -> Vector:
        learner, syncer = self._learner, self._syncer.process.pid
        ask = await learner.asked(0, after_round=self._round)
        self._round = ask.round
        begun = self._now()
        fate = await learner.upload(ask, payload.view(np.uint8).data)  # float32: the payload is the values
        uploaded = self._now()
        if fate is not Fate.ACCEPTED:
            raise RuntimeError(f"the contribution to round {ask.round} came to {fate}")
        news = await learner.published(0, after=ask.base)
        published = self._now()
        receipt = await learner.download(news)
        values: Vector = np.frombuffer(receipt.payload, np.float32)
        ended = self._now()
        self._news = news
        await learner.apply(news)
        seconds, own, far = (
            (uploaded[part] - begun[part]) + (ended[part] - published[part]) for part in range(len(begun))
        )
        usage = {"cpu_seconds": far, "peak_bytes": peak_bytes(syncer), "base_bytes": self._far_base}
        self.measured = {"seconds": seconds, "cpu_seconds": own, "peak_bytes": peak_bytes(os.getpid()), "far": usage}
        return values

    def _now(self) -> tuple[float, float, float]:
        """Wall clock, processor time of this process and of the syncer."""
        return time.perf_counter(), used_cpu_seconds(), cpu_seconds(self._syncer.process.pid)

    def check(self, sent: Vector, got: Vector) -> bool:
        """The version is the one that was published, bit for bit, and as large as the contribution."""
        return got.size == sent.size and vector_digest(got) == self._news.version.digest

    def close(self) -> None:
        """Ends the syncer."""
        self._syncer.__exit__(None, None, None)
