"""Fragments over the wire, beside raw TCP and Arrow Flight: `python -m benchmarks.wire`.

One fragment of float32 goes up and comes down through the real calls, to and from a syncer in a process of its own,
and the same bytes go over a plain TCP connection and over Arrow Flight, all in turn. Then contributions go up while the
syncer merges another fragment, and an observer asks small questions on a control connection all the time.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from benchmarks.figures import Figure, Section, Target, of_repetitions, run
from benchmarks.flight import Flight
from benchmarks.raw_tcp import RawTcp
from benchmarks.rig_learner import RigLearner
from benchmarks.rig_process import ObserverProcess
from benchmarks.scrape import LOOP_LAG, Buckets, histogram
from benchmarks.server_process import ServerProcess
from benchmarks.syncer_rig import SyncerProcess, flat_schema, own_cpu_seconds, run_values
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime.malloc import tune_malloc

OBSERVERS: Final = 4
"""Downloads at once."""
CONTRIBUTORS: Final = 4
"""Contributions to the fragment that is merged beside an upload."""
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        elements: of the fragment, a multiple of 256.
        beside_elements: of the contributions that go up beside a merge of `elements`.
        repetitions: of everything.
        beside_repetitions: of the merges.
    """

    elements: int
    beside_elements: int
    repetitions: int
    beside_repetitions: int


FULL: Final = Size(1 << 26, 1 << 24, 7, 5)
QUICK: Final = Size(1 << 24, 1 << 22, 3, 2)


class Measurable(Protocol):
    """A process whose processor time counts."""

    def cpu_seconds(self) -> float: ...  # noqa: D102


@dataclass(slots=True)
class Way:
    """One way for bytes, by repetition.

    Attributes:
        seconds: wall time.
        cpu_seconds: processor time of both ends.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def rates(self, size_bytes: int) -> list[float]:
        """GB/s."""
        return [size_bytes / seconds / 1e9 for seconds in self.seconds]

    def shares(self, reference: Way, copies: int = 1) -> list[float]:
        """Rate over that of another way in the same repetition; this one moved so many copies."""
        pairs = zip(reference.seconds, self.seconds, strict=True)
        return [copies * theirs / ours for theirs, ours in pairs]


class Ways:
    """All ways by name, measured in turn."""

    def __init__(self) -> None:
        self._ways: dict[str, Way] = {}

    def __getitem__(self, name: str) -> Way:
        return self._ways.setdefault(name, Way())

    def took(self, name: str, seconds: float, cpu_seconds: float = 0.0) -> None:
        """One more repetition."""
        self[name].seconds.append(seconds)
        self[name].cpu_seconds.append(cpu_seconds)

    def time(self, name: str, work: Callable[[], object], other_end: Measurable) -> None:
        """Times work that blocks."""
        cpu, started = own_cpu_seconds() + other_end.cpu_seconds(), time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        self.took(name, seconds, own_cpu_seconds() + other_end.cpu_seconds() - cpu)

    def forget(self) -> None:
        """What was measured so far was the warm-up."""
        self._ways.clear()


# --- alone ---


class Alone:
    """Raw TCP, Flight and the syncer, one transfer after the other.

    Args:
        size: how much.
    """

    def __init__(self, size: Size) -> None:
        self._size = size
        self.ways = Ways()
        self._values = np.random.default_rng(0).standard_normal(size.elements, np.float32)
        self._out = np.zeros(size.elements, np.float32)

    async def measure(self) -> Ways:
        """All repetitions."""
        schema = flat_schema([self._size.elements])
        with ExitStack() as processes:
            start = processes.enter_context
            tcp, flight = start(ServerProcess("benchmarks.raw_tcp")), start(ServerProcess("benchmarks.flight"))
            limits = tcp, start(RawTcp(tcp.port)), flight, start(Flight(flight.port))
            syncer = start(SyncerProcess(run_values(), settings={"log-level": "debug"}))
            async with RigLearner(syncer, "alpha", schema) as alpha:
                eyes = [
                    start(ObserverProcess(syncer, f"eye-{index}", [self._size.elements])) for index in range(OBSERVERS)
                ]
                await alpha.initialize()
                for repetition in range(self._size.repetitions + 1):
                    self._limits(*limits)
                    await self._ours(syncer, alpha, eyes)
                    if repetition == 0:
                        self.ways.forget()
        return self.ways

    def _limits(self, tcp_server: ServerProcess, tcp: RawTcp, flight_server: ServerProcess, flight: Flight) -> None:
        values, out = self._values, self._out
        self.ways.time("TCP up", lambda: tcp.upload(values.view(np.uint8).data), tcp_server)
        self.ways.time("TCP down", lambda: tcp.download(out.view(np.uint8).data), tcp_server)
        self.ways.time("Flight up", lambda: flight.upload(values), flight_server)
        self.ways.time("Flight down", lambda: flight.download(out), flight_server)

    async def _ours(self, syncer: SyncerProcess, alpha: RigLearner, eyes: Sequence[ObserverProcess]) -> None:
        payload = self._values.view(np.uint8).data
        ask = await alpha.asked(0)
        with syncer.measured() as upload:
            await _contribute(alpha, ask, payload)
        into_buffer = float(syncer.log("upload_ended")[-1]["seconds"])
        self.ways.took("upload until accepted", upload.usage.wall_seconds, upload.usage.cpu_seconds)
        self.ways.took("upload", into_buffer)
        self.ways.took("afterwards", upload.usage.wall_seconds - into_buffer)
        news = await alpha.published(0, after=ask.base)
        # The first download of a version encodes it, the others find it ready.
        for count in (1, len(eyes)):
            ends: tuple[Measurable, ...] = (syncer, *eyes)
            cpu = sum(end.cpu_seconds() for end in ends)
            started = time.perf_counter()
            for eye in eyes[:count]:
                eye.tell("download", 0, news.version)
            for eye in eyes[:count]:
                eye.answer()
            seconds = time.perf_counter() - started
            cpu = sum(end.cpu_seconds() for end in ends) - cpu
            self.ways.took(f"download by {count}", seconds, cpu)
        await alpha.apply(news)
        await alpha.asked(0, after_round=ask.round)


async def _contribute(learner: RigLearner, ask: lev.Asked, payload: memoryview) -> None:
    fate = await learner.upload(ask, payload)
    if fate is not Fate.ACCEPTED:
        raise RuntimeError(f"the contribution of {learner.name} to round {ask.round} came to {fate}")


# --- beside a merge ---


@dataclass(slots=True)
class Beside:
    """What was found beside merges.

    Attributes:
        idle_seconds: uploads while nothing else was to be done.
        busy_seconds: uploads of the same size that began with a merge.
        merge_seconds: from the last contribution to the end of its round.
        echo_seconds: answers to small questions, all the time.
        asker_late_seconds: how late short waits ended in the process that asks: what the machine's own load costs.
        lag_p99_seconds: upper bound of the event loop's lag, all the time.
    """

    idle_seconds: list[float] = field(default_factory=list)
    busy_seconds: list[float] = field(default_factory=list)
    merge_seconds: list[float] = field(default_factory=list)
    echo_seconds: list[float] = field(default_factory=list)
    asker_late_seconds: list[float] = field(default_factory=list)
    lag_p99_seconds: float = math.nan


async def measure_beside(size: Size) -> Beside:
    """Uploads to fragment 1 while fragment 0 is merged, and while it is not."""
    found = Beside()
    sizes = [size.elements, size.beside_elements]
    schema = flat_schema(sizes)
    values = run_values(fragments={"count": 2}, quorum={"minimum": CONTRIBUTORS})
    with SyncerProcess(values) as syncer, ObserverProcess(syncer, "eye", sizes) as eye:
        async with AsyncExitStack() as stack:
            names = [f"learner-{index}" for index in range(CONTRIBUTORS)]
            learners = [await stack.enter_async_context(RigLearner(syncer, name, schema)) for name in names]
            await learners[0].initialize()
            for learner in learners[1:]:
                await learner.apply_first()
            payloads = [learners[0].payload(fragment) for fragment in range(2)]
            lag_before, is_warm = None, False
            for _ in range(size.beside_repetitions + 1):
                await _one_merge(learners, payloads, found if is_warm else Beside())
                if not is_warm:
                    lag_before, is_warm = await histogram(syncer.page, LOOP_LAG), True
                    eye.tell("echo")
            assert lag_before is not None
            found.echo_seconds, found.asker_late_seconds = eye.stop_echo()
            found.lag_p99_seconds = (await _lags_since(syncer.page, lag_before)).quantile(0.99)
    return found


async def _lags_since(page: str, before: Buckets) -> Buckets:
    """The event loop's lags since then; waits for one where a run was too short to have any."""
    while True:
        lags = (await histogram(page, LOOP_LAG)).since(before)
        if lags.counts[-1]:
            return lags
        await asyncio.sleep(0.01)


async def _one_merge(learners: Sequence[RigLearner], payloads: Sequence[memoryview], found: Beside) -> None:
    """A round of both fragments: everybody uploads fragment 0; fragment 1 beside its merge, and after it."""
    first, *others = learners
    large = [await learner.asked(0) for learner in learners]
    small = [await learner.asked(1) for learner in learners]
    for learner, ask in zip(learners, large, strict=True):
        await _contribute(learner, ask, payloads[0])
    merging = time.perf_counter()
    await _contribute(first, small[0], payloads[1])
    found.busy_seconds.append(time.perf_counter() - merging)
    await first.event(lev.RoundEnded, lambda ended: ended.round == large[0].round)
    found.merge_seconds.append(first.heard_at[lev.RoundEnded] - merging)
    for learner, ask in zip(others, small[1:], strict=True):
        started = time.perf_counter()
        await _contribute(learner, ask, payloads[1])
        found.idle_seconds.append(time.perf_counter() - started)
    for fragment, asks in enumerate((large, small)):
        for learner, ask in zip(learners, asks, strict=True):
            await learner.apply(await learner.published(fragment, after=ask.base))
    for fragment, asks in enumerate((large, small)):
        for learner, ask in zip(learners, asks, strict=True):
            await learner.asked(fragment, after_round=ask.round)


# --- figures ---


def figures_alone(ways: Ways, size_bytes: int) -> list[Figure]:
    """What the transfers came to, one after the other."""
    upload, accepted = ways["upload"], ways["upload until accepted"]
    one, four = ways["download by 1"], ways[f"download by {OBSERVERS}"]
    gib = size_bytes / GIB
    half = Target("at least", 0.5)
    figures = [
        of_repetitions("upload: share of raw TCP", upload.shares(ways["TCP up"]), "x", half, "into the buffer"),
        of_repetitions("upload: share of Flight DoPut", upload.shares(ways["Flight up"]), "x", Target("at least", 0.8)),
        of_repetitions("upload until accepted: share of raw TCP", accepted.shares(ways["TCP up"]), "x"),
        of_repetitions(
            "upload until accepted: processor time, both ends",
            [seconds / gib for seconds in accepted.cpu_seconds],
            "CPU-s/GiB",
            Target("at most", 1.1),
        ),
        of_repetitions("download by 1: share of raw TCP", one.shares(ways["TCP down"]), "x", half),
        of_repetitions(
            f"download by {OBSERVERS}: aggregate share of raw TCP",
            four.shares(ways["TCP down"], OBSERVERS),
            "x",
            half,
        ),
        of_repetitions(
            "download by 1: processor time, both ends", [seconds / gib for seconds in one.cpu_seconds], "CPU-s/GiB"
        ),
        of_repetitions(
            "upload: examination of the values, decision, answer",
            [1e3 * seconds for seconds in ways["afterwards"].seconds],
            "ms",
        ),
    ]
    names = ("TCP up", "TCP down", "Flight up", "Flight down", "upload", "download by 1")
    figures += [of_repetitions(f"rate: {name}", ways[name].rates(size_bytes), "GB/s") for name in names]
    figures.append(of_repetitions(f"rate: download by {OBSERVERS}", four.rates(OBSERVERS * size_bytes), "GB/s"))
    return figures


def figures_beside(found: Beside) -> list[Figure]:
    """What merges cost the uploads beside them, and everybody who asks something."""
    idle = float(np.median(found.idle_seconds))
    overlap = [min(1.0, merge / busy) for merge, busy in zip(found.merge_seconds, found.busy_seconds, strict=True)]
    return [
        of_repetitions(
            "upload beside a merge: share of the idle rate",
            [idle / seconds for seconds in found.busy_seconds],
            "x",
            Target("at least", 0.5),
            f"the merge lasted for {np.median(overlap):.0%} of it or longer",
        ),
        of_repetitions("merge beside it", [1e3 * seconds for seconds in found.merge_seconds], "ms"),
        Figure(
            "event-loop lag, 99th percentile",
            1e3 * found.lag_p99_seconds,
            "ms",
            Target("at most", 20),
            note="bucket's upper bound, uploads and merges all the time",
        ),
        Figure(
            "answer on the control connection, 99th percentile",
            1e3 * percentile_99(found.echo_seconds),
            "ms",
            Target("at most", 50),
            1e3 * min(found.echo_seconds),
            1e3 * max(found.echo_seconds),
            f"{len(found.echo_seconds)} questions through the driver, all the time",
        ),
        Figure(
            "how late short waits end in the process that asks, 99th percentile",
            1e3 * percentile_99(found.asker_late_seconds),
            "ms",
            note="what the load of the machine costs by itself",
        ),
    ]


def percentile_99(values: Sequence[float]) -> float:
    """The smallest value that 99 % do not exceed."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def measure(quick: bool) -> Section:
    """The benchmark."""
    size = QUICK if quick else FULL
    tune_malloc()
    mebibytes = 4 * size.elements >> 20
    alone = asyncio.run(Alone(size).measure())
    beside = asyncio.run(measure_beside(size))
    return Section(
        "wire",
        "The wire: fragments up and down",
        f"One float32 fragment of {mebibytes} MiB over the loopback, {size.repetitions} repetitions after a warm-up, "
        "in turn. Ours: gRPC messages of 1 MiB, a checksum of each chunk and a digest of the whole at both ends, into "
        "the syncer's buffer; the examination of the values follows. Raw TCP: sends "
        "of 1 MiB, received into a buffer, nothing checked. Arrow Flight: record batches of 4 MiB, copied into a "
        "buffer, nothing checked, malloc tuned. Downloads go to observers in processes of their own; the first one of "
        f"a version encodes it. Beside a merge: {4 * size.beside_elements >> 20} MiB go up while {CONTRIBUTORS} "
        f"contributions of {mebibytes} MiB are merged.",
        (*figures_alone(alone, 4 * size.elements), *figures_beside(beside)),
    )


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
