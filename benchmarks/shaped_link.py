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

FRAGMENT_COUNT: Final = 4
"""Fragments, and uploads in flight at most."""
ROUNDS_IN_A_ROW: Final = 3
"""Rounds of each fragment that are uploaded while others are in flight."""
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
    """A learner with fragments of one size, and threads for what takes processor time, as many as learners have.

    Args:
        learner: joined; its run has fragments that are all under way at the same time.
        values: the delta that it contributes each time.
    """

    def __init__(self, learner: RigLearner, values: FloatVector) -> None:
        self._learner = learner
        self._values = values
        self._threads = ThreadPoolExecutor(TRANSFER_THREADS)
        self._last_round = dict.fromkeys(range(FRAGMENT_COUNT), 0)
        self.found: dict[str, list[Entry]] = {}

    async def turn(self, encoding: str, is_counted: bool) -> None:
        """One turn of an encoding: uploads one at a time with downloads of what becomes of them, then all in flight."""
        done: list[tuple[str, Entry]] = []
        for ask in await self._asks():
            watch = Stopwatch()
            await self._upload(ask, encoding)
            done.append((f"{ONE_AT_A_TIME} {encoding}", watch.entry(self._values.size)))
            done += await self._take(ask, encoding)
        watch = Stopwatch()
        last = await asyncio.gather(*(self._stream(fragment, encoding) for fragment in self._last_round))
        done.append((f"{IN_FLIGHT} {encoding}", watch.entry(FRAGMENT_COUNT * ROUNDS_IN_A_ROW * self._values.size)))
        for ask in last:
            await self._take(ask, "")
        for name, entry in done if is_counted else ():
            self.found.setdefault(name, []).append(entry)

    async def _stream(self, fragment: int, encoding: str) -> lev.Asked:
        """Contributions to round after round of a fragment; the version of the last one is not waited for."""
        for index in range(ROUNDS_IN_A_ROW):
            ask = await self._learner.asked(fragment, self._last_round[fragment])
            self._last_round[fragment] = ask.round
            await self._upload(ask, encoding)
            if index + 1 < ROUNDS_IN_A_ROW:
                await self._take(ask, "")
        return ask

    async def _asks(self) -> list[lev.Asked]:
        """A new request for each fragment."""
        asks = [await self._learner.asked(fragment, after) for fragment, after in self._last_round.items()]
        self._last_round = {ask.fragment: ask.round for ask in asks}
        return asks

    async def _upload(self, ask: lev.Asked, encoding: str) -> None:
        """From the values to the syncer's word that it has them all and has looked at them."""
        loop = asyncio.get_running_loop()
        payload = await loop.run_in_executor(self._threads, encoded, self._values, encoding)
        fate = await self._learner.upload(ask, payload, encoding)
        if fate is not Fate.ACCEPTED:
            raise RuntimeError(f"the contribution to round {ask.round} came to {fate}")

    async def _take(self, ask: lev.Asked, encoding: str) -> list[tuple[str, Entry]]:
        """Waits for the version that a contribution leads to; downloads it, if the encoding is one of downloads."""
        news = await self._learner.published(ask.fragment, after=ask.base)
        done = []
        if encoding in DOWNLOAD_ENCODINGS:
            watch = Stopwatch()
            receipt = await self._learner.download(news, None if encoding == "float32" else ask.base)
            if receipt.encoding != encoding:
                raise RuntimeError(f"the version came as {receipt.encoding}, not as {encoding}")
            Encoded(receipt.payload, encoding, self._values.size).decode()
            done.append((f"{DOWNLOAD} {encoding}", watch.entry(self._values.size)))
        await self._learner.apply(news)
        return done


async def transfers(value_count: int, repetitions: int) -> dict[str, list[Entry]]:
    """Turns of all encodings, as often as asked after one to warm up; the entries by "one at a time bf16"."""
    values = np.random.default_rng(0).standard_normal(value_count, np.float32) * np.float32(0.01)
    run = run_values(
        # So that a round of every fragment is under way: F = min(P, 1 + ceil(tau * P / H)) = P.
        fragments={"count": FRAGMENT_COUNT, "interval_steps": 8, "overlap_steps": 6},
        encoding={"upload": "float32", "download": "bf16"},
    )
    with SyncerProcess(run) as syncer:
        async with RigLearner(syncer, "alpha", flat_schema(FRAGMENT_COUNT * [value_count])) as learner:
            await learner.initialize()
            bench = Bench(learner, values)
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
