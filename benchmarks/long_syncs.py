"""How long a sync takes over a long distance, from the contribution to the version; `benchmarks.wide_area` shows it.

The version is asked for along with the contribution, as learners do, or once there is news of it, in turns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from benchmarks.figures import Figure, of_repetitions
from benchmarks.rig_learner import RigLearner
from benchmarks.syncer_rig import SyncerProcess, flat_schema, run_values
from chaos.proxy import Conditions, Proxy
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.runtime.ports import parse_address
from learner_service.downloader import Downloader, Held

FRAGMENT_VALUES: Final = 20_000
"""Few, so that the link's rate does not count."""
FRAGMENT_COUNT: Final = 4

Seconds = Mapping[bool, Sequence[float]]
"""Of every sync, by whether its version was asked for in advance."""


class _Learner:
    """A learner that holds what it has fetched, with the downloads of the real one."""

    def __init__(self, rig: RigLearner, executor: ThreadPoolExecutor) -> None:
        self._rig = rig
        self._values: list[FloatVector] = [np.full(size, 0.5, np.float32) for size in rig.sizes]
        self._downloader = Downloader(
            lambda: rig.bulk, tuple(rig.sizes), executor, lambda _: None, random.Random(1), get_logger(__name__)
        )

    async def sync(self, ask: lev.Asked, in_advance: bool) -> float:
        """Answers an ask and fetches the version that comes of it; seconds from the one to the other."""
        payload = self._rig.payload(ask.fragment, seed=ask.round)
        began = time.perf_counter()
        if in_advance:
            self._downloader.expect(ask.fragment, ask.base)
        upload = asyncio.create_task(self._rig.upload(ask, payload))
        news = await self._rig.published(ask.fragment, after=ask.base)
        held = Held(ask.base, self._values[ask.fragment])
        self._values[ask.fragment] = await self._downloader.fetch(ask.fragment, news.version, held)
        seconds = time.perf_counter() - began
        if (fate := await upload) is not Fate.ACCEPTED:
            raise RuntimeError(f"the contribution to round {ask.round} came to {fate}")
        await self._rig.apply(news)
        return seconds


async def sync_seconds(latency_seconds: float, repetitions: int) -> Seconds:
    """Syncs of a lone learner behind a proxy.

    Args:
        latency_seconds: of the proxy, each way.
        repetitions: syncs of every fragment in each of the two ways.
    """
    values = run_values(
        fragments={"count": FRAGMENT_COUNT, "interval_steps": 8}, encoding={"upload": "bf16", "download": "bf16"}
    )
    found: dict[bool, list[float]] = {True: [], False: []}
    with Proxy() as proxy, SyncerProcess(values) as syncer, ThreadPoolExecutor(2) as executor:
        address = parse_address(syncer.address)
        link = proxy.link((address.host, address.port))
        link.heal()
        async with RigLearner(
            syncer, "alpha", flat_schema(FRAGMENT_COUNT * [FRAGMENT_VALUES]), address=link.address
        ) as rig:
            await rig.initialize()
            learner, rounds = _Learner(rig, executor), FRAGMENT_COUNT * [0]
            link.impose(Conditions(latency_seconds=latency_seconds))
            for turn in range(2 * repetitions):
                for fragment in range(FRAGMENT_COUNT):
                    ask = await rig.asked(fragment, rounds[fragment])
                    rounds[fragment] = ask.round
                    found[turn % 2 == 0].append(await learner.sync(ask, turn % 2 == 0))
    return found


def sync_figures(found: Seconds) -> Iterator[Figure]:
    """Both ways, in milliseconds."""
    for in_advance, how in ((True, "in advance"), (False, "after the news")):
        name = f"contribution to version, asked for {how}"
        yield of_repetitions(name, [1e3 * seconds for seconds in found[in_advance]], "ms")
