"""What `shaped` runs in a network namespace of its own: transfers over its loopback, first free, then shaped.

    unshare --net python -m benchmarks.shaped_link VALUES REPETITIONS

prints one JSON object. The namespace makes the link's counters those of this run alone, and its shaper harmless.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.rig_learner import RigLearner
from benchmarks.syncer_rig import SyncerProcess, flat_schema, run_values
from decoupled_diloco.arrays.encoding import DOWNLOAD_ENCODINGS, ENCODINGS, Encoded, FloatVector, encoding_named
from decoupled_diloco.arrays.merge import examine
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime.malloc import tune_malloc

RATE_BITS: Final = 1_000_000_000
"""Rate of the shaped link, bits a second, headers included."""
BURST_BYTES: Final = 96 << 10
"""What the shaper lets through at once; room for one packet as TCP hands it over."""
QUEUE_MILLISECONDS: Final = 20
"""Longest wait in the shaper's queue."""
ETHERNET_MTU: Final = 1500
"""The shaped link counts the headers of packets of this size, as an Ethernet does."""

FRAGMENT_COUNT: Final = 8
"""Fragments of the run."""
ALONE_COUNT: Final = 2
"""Of those, how many are uploaded one at a time; the rest is in flight together."""
OTHERS_ENCODING: Final = "int4"
"""What closes the rounds should take little time."""
TRANSFER_THREADS: Final = 2
"""Threads that encode, as in a learner."""
ONE_AT_A_TIME: Final = "one at a time"
IN_FLIGHT: Final = "in flight"
DOWNLOAD: Final = "download"

Entry = dict[str, float]
"""Seconds from values in memory to values in memory, bytes that the link carried meanwhile, and values moved."""

NETWORK_COUNTERS: Final = Path("/proc/net/dev")


def sent_bytes(table: str) -> int:
    """Bytes sent over the loopback, both directions of every connection, from the text of /proc/net/dev."""
    fields = next(line.split(":")[1].split() for line in table.splitlines() if line.strip().startswith("lo:"))
    return int(fields[8])


class Stopwatch:
    """Times transfers and counts what the link carries."""

    def __init__(self) -> None:
        self._bytes = sent_bytes(NETWORK_COUNTERS.read_text())
        self._began = time.perf_counter()

    def entry(self, value_count: int) -> Entry:
        """What was since, for so many values moved."""
        seconds = time.perf_counter() - self._began
        carried = sent_bytes(NETWORK_COUNTERS.read_text()) - self._bytes
        return {"seconds": seconds, "wire_bytes": carried, "values": value_count}


def encoded(values: FloatVector, encoding: str) -> memoryview:
    """A contribution as a learner makes it: written down, and looked at before it is sent."""
    payload = encoding_named(encoding).encode(values)
    if problem := examine(Encoded(payload, encoding, values.size)).problem:
        raise RuntimeError(problem)
    return payload


class Bench:
    """A learner that is measured, and another one whose contributions close the rounds, so that none merges meanwhile.

    Args:
        learner: is measured; its run has fragments of one size, all under way at the same time, and a quorum of two.
        other: of the same run.
        values: the delta that the first one contributes each time.
    """

    def __init__(self, learner: RigLearner, other: RigLearner, values: FloatVector) -> None:
        self._learner = learner
        self._other = other
        self._values = values
        self._others_payload = encoding_named(OTHERS_ENCODING).encode(values)
        self._threads = ThreadPoolExecutor(TRANSFER_THREADS)  # for what takes processor time, as in a learner
        self._last_round = 0
        self.found: dict[str, list[Entry]] = {}

    async def turn(self, encoding: str, is_counted: bool) -> None:
        """One turn of an encoding: some uploads one at a time, the rest in flight together, and downloads."""
        asks = [await self._learner.asked(fragment, self._last_round) for fragment in range(FRAGMENT_COUNT)]
        self._last_round = max(ask.round for ask in asks)
        done: list[tuple[str, Entry]] = []
        for ask in asks[:ALONE_COUNT]:
            watch = Stopwatch()
            await self._upload(ask, encoding)
            done.append((f"{ONE_AT_A_TIME} {encoding}", watch.entry(self._values.size)))
        rest = asks[ALONE_COUNT:]
        watch = Stopwatch()
        await asyncio.gather(*(self._upload(ask, encoding) for ask in rest))
        done.append((f"{IN_FLIGHT} {encoding}", watch.entry(len(rest) * self._values.size)))
        news = [await self._closed(ask) for ask in asks]
        for ask, version in zip(asks[:ALONE_COUNT], news, strict=False):
            if encoding in DOWNLOAD_ENCODINGS:
                watch = Stopwatch()
                await self._download(version, ask, encoding)
                done.append((f"{DOWNLOAD} {encoding}", watch.entry(self._values.size)))
        for learner in (self._learner, self._other):
            for version in news:
                await learner.apply(version)
        for name, entry in done if is_counted else ():
            self.found.setdefault(name, []).append(entry)

    async def _upload(self, ask: lev.Asked, encoding: str) -> None:
        """From the values to the syncer's word that it has them all and has looked at them."""
        loop = asyncio.get_running_loop()
        payload = await loop.run_in_executor(self._threads, encoded, self._values, encoding)
        _check(await self._learner.upload(ask, payload, encoding), ask)

    async def _closed(self, ask: lev.Asked) -> lev.Published:
        """The version that a round leads to, once the other learner has contributed, too."""
        theirs = await self._other.event(lev.Asked, lambda asked: asked.round == ask.round)
        _check(await self._other.upload(theirs, self._others_payload, OTHERS_ENCODING), ask)
        return await self._learner.published(ask.fragment, after=ask.base)

    async def _download(self, news: lev.Published, ask: lev.Asked, encoding: str) -> None:
        """From the request to the values, whole or as a delta."""
        receipt = await self._learner.download(news, None if encoding == "float32" else ask.base)
        if receipt.encoding != encoding:
            raise RuntimeError(f"the version came as {receipt.encoding}, not as {encoding}")
        Encoded(receipt.payload, encoding, self._values.size).decode()


def _check(fate: Fate, ask: lev.Asked) -> None:
    if fate is not Fate.ACCEPTED:
        raise RuntimeError(f"the contribution to round {ask.round} came to {fate}")


async def transfers(value_count: int, repetitions: int) -> dict[str, list[Entry]]:
    """Turns of all encodings, as often as asked after one to warm up; the entries by "one at a time bf16"."""
    values = np.random.default_rng(0).standard_normal(value_count, np.float32) * np.float32(0.01)
    run = run_values(
        # So that a round of every fragment is under way: F = min(P, 1 + ceil(tau * P / H)) = P.
        fragments={"count": FRAGMENT_COUNT, "interval_steps": 8, "overlap_steps": 7},
        encoding={"upload": "float32", "download": "bf16"},
        quorum={"minimum": 2},
    )
    schema = flat_schema(FRAGMENT_COUNT * [value_count])
    with SyncerProcess(run) as syncer:
        async with RigLearner(syncer, "alpha", schema) as alpha, RigLearner(syncer, "beta", schema) as beta:
            await alpha.initialize()
            await beta.apply_first()
            bench = Bench(alpha, beta, values)
            for repetition in range(repetitions + 1):
                for encoding in ENCODINGS:
                    await bench.turn(encoding, is_counted=repetition > 0)
    return bench.found


def command(*words: str) -> None:
    """Runs a tool of the system.

    Raises:
        RuntimeError: it is not there, or refuses; with its own words.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{words[0]} cannot be run: {error}") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def main(value_count: int, repetitions: int) -> int:
    """Measures and prints."""
    tune_malloc()
    try:
        command("ip", "link", "set", "lo", "up")
        free = asyncio.run(transfers(value_count, repetitions))
        command("ip", "link", "set", "lo", "mtu", str(ETHERNET_MTU))
        command(
            *("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", f"{RATE_BITS}bit"),
            *("burst", str(BURST_BYTES), "latency", f"{QUEUE_MILLISECONDS}ms"),
        )
        shaped = asyncio.run(transfers(value_count, repetitions))
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"loopback": free, "shaped": shaped}))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
