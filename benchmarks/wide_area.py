"""What several bulk connections gain over a long distance, where a connection moves one window in a round trip.

Also how long a sync of a small fragment takes there (`long_syncs`).

A proxy in user space stands between a learner and a real syncer: it delays every piece and lets each connection have a
window's worth of bytes under way, as TCP does. The syncer is a process of its own, the client that of a learner.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchmarks.figures import Figure, Section, of_repetitions, run
from benchmarks.long_syncs import FRAGMENT_VALUES as FRAGMENT_VALUES_OF_SYNCS
from benchmarks.long_syncs import sync_figures, sync_seconds
from benchmarks.rig_learner import RigLearner
from benchmarks.syncer_rig import SyncerProcess, flat_schema, run_values
from chaos.proxy import Conditions, Link, Proxy
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime.malloc import tune_malloc
from decoupled_diloco.runtime.ports import parse_address

LATENCY_SECONDS: Final = 0.04
"""Each way."""
WINDOW_BYTES: Final = 1 << 20
FRAGMENT_COUNT: Final = 8
"""Fragments, and transfers in flight."""
FRAGMENT_VALUES: Final = 1 << 21
FRAGMENT_VALUES_QUICK: Final = 1 << 19
CONNECTIONS: Final = (1, 2, 4, 8)
REPETITIONS: Final = 3
REPETITIONS_QUICK: Final = 1

FREE: Final = "latency alone"
WINDOWED: Final = "latency and window"
Rates = Mapping[tuple[str, str, int], Sequence[float]]
"""Bytes a second by kind of link, direction and number of connections; one entry per turn."""


class Bench:
    """One syncer behind one link, and a learner that joins anew with another number of connections each time."""

    def __init__(self, syncer: SyncerProcess, link: Link, value_count: int) -> None:
        self._syncer = syncer
        self._link = link
        self._schema = flat_schema(FRAGMENT_COUNT * [value_count])
        self._bytes = 4 * value_count * FRAGMENT_COUNT
        self._is_begun = False

    async def turn(self, conditions: Conditions, connections: int) -> tuple[float, float]:
        """All uploads at the same time, then all downloads; bytes a second of each."""
        self._link.heal()
        learner = RigLearner(
            self._syncer, "alpha", self._schema, address=self._link.address, bulk_connections=connections
        )
        async with learner:
            await (learner.apply_first() if self._is_begun else learner.initialize())
            self._is_begun = True
            asks = [await learner.asked(fragment) for fragment in range(FRAGMENT_COUNT)]
            payloads = [learner.payload(fragment, "float32") for fragment in range(FRAGMENT_COUNT)]
            self._link.impose(conditions)
            began = time.perf_counter()
            fates = await asyncio.gather(*(learner.upload(ask, payloads[ask.fragment], "float32") for ask in asks))
            uploaded = self._bytes / (time.perf_counter() - began)
            if set(fates) != {Fate.ACCEPTED}:
                raise RuntimeError(f"the contributions came to {', '.join(map(str, fates))}")
            news = [await learner.published(ask.fragment, after=ask.base) for ask in asks]
            began = time.perf_counter()
            await asyncio.gather(*(learner.download(version) for version in news))
            downloaded = self._bytes / (time.perf_counter() - began)
            for version in news:
                await learner.apply(version)
        return uploaded, downloaded


async def rates_of(value_count: int, repetitions: int, connections: Sequence[int] = CONNECTIONS) -> Rates:
    """Turns over both links and all numbers of connections, in turns."""
    links = {
        FREE: Conditions(latency_seconds=LATENCY_SECONDS),
        WINDOWED: Conditions(latency_seconds=LATENCY_SECONDS, window_bytes=WINDOW_BYTES),
    }
    found: dict[tuple[str, str, int], list[float]] = {}
    # So that a round of every fragment is under way: F = min(P, 1 + ceil(tau * P / H)) = P.
    values = run_values(fragments={"count": FRAGMENT_COUNT, "interval_steps": 8, "overlap_steps": 7})
    with Proxy() as proxy, SyncerProcess(values) as syncer:
        address = parse_address(syncer.address)
        bench = Bench(syncer, proxy.link((address.host, address.port)), value_count)
        for _ in range(repetitions):
            for name, conditions in links.items():
                for count in connections:
                    uploaded, downloaded = await bench.turn(conditions, count)
                    found.setdefault((name, "upload", count), []).append(uploaded)
                    found.setdefault((name, "download", count), []).append(downloaded)
    return found


def figures_of(rates: Rates) -> Iterator[Figure]:
    """One connection as it is, others as ratios to it in the same turn."""
    for (link, direction, count), values in rates.items():
        if count == 1:
            megabytes = [value / 1e6 for value in values]
            yield of_repetitions(f"{link}, {direction}, 1 connection", megabytes, "MB/s")
        else:
            base = rates[link, direction, 1]
            ratios = [value / one for value, one in zip(values, base, strict=True)]
            yield of_repetitions(f"{link}, {direction}, {count} connections", ratios, "x one")


def measure(quick: bool) -> Section:
    """Measures."""
    tune_malloc()
    value_count = FRAGMENT_VALUES_QUICK if quick else FRAGMENT_VALUES
    repetitions = REPETITIONS_QUICK if quick else REPETITIONS
    rates = asyncio.run(rates_of(value_count, repetitions))
    syncs = asyncio.run(sync_seconds(LATENCY_SECONDS, repetitions))
    conditions = (
        f"{FRAGMENT_COUNT} transfers in flight of {4 * value_count / 1e6:.1f} MB of float32 each, through a proxy on "
        f"the same machine that delays by {1000 * LATENCY_SECONDS:g} ms each way and, where there is a window, lets "
        f"each connection have {WINDOW_BYTES >> 10} KiB under way. Turns: {repetitions}, of which medians are shown; "
        "ratios are of one turn. A sync is that of a lone learner, with the same delay and fragments of "
        f"{FRAGMENT_VALUES_OF_SYNCS} parameters."
    )
    figures = (*figures_of(rates), *sync_figures(syncs))
    return Section("wide_area", "Several connections over a long distance", conditions, figures)


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
