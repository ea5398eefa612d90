"""The arithmetic of fragments next to memcpy and to plain NumPy.

    python -m benchmarks.arithmetic [--quick] [--json PATH]

Work is counted in the bytes that it must read and write, as if the caches held nothing: a memcpy of n bytes counts 2 n.
A merge of M bf16 contributions with its outer step reads them once (2 M bytes per element) and theta, momentum and
residual (12), writes and reads the unscaled sum (8), and writes the merged delta, the new theta, momentum and residual
and the bf16 step (18). The norms of contributions, which the syncer takes while they arrive, are a figure of their own.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from benchmarks import plain_arithmetic as plain
from benchmarks.figures import Figure, Section, Target, of_repetitions, run
from decoupled_diloco.arrays.encoding import Encoded, FloatVector, encoding_named, kernels
from decoupled_diloco.arrays.fragments import Segment
from decoupled_diloco.arrays.merge import combine, examine
from decoupled_diloco.arrays.outer import FragmentState, apply_delta, merged_outer_step
from decoupled_diloco.arrays.stripes import CALLING_THREAD, LoopThreads
from decoupled_diloco.runtime.malloc import tune_malloc

CONTRIBUTION_COUNT: Final = 8
SEGMENT_COUNT: Final = 100
AVG_SHARE: Final = 0.2
"""Part of the elements that belongs to Avg tensors, the embeddings."""

LOSSY: Final = ("bf16", "int8", "int4")
STEP_BYTES: Final = 12 + 8 + 18
"""Bytes per element of a merge with its outer step, without the contributions."""


@dataclass(frozen=True)
class Work:
    """One thing to time.

    Attributes:
        name: unique.
        byte_count: bytes that it must read and write.
        call: does it.
    """

    name: str
    byte_count: float
    call: Callable[[], object]


def timed(works: Sequence[Work], repetitions: int) -> dict[str, list[float]]:
    """Bytes per second of each, all taking turns; a first turn is not counted."""
    rates: dict[str, list[float]] = {work.name: [] for work in works}
    for repetition in range(repetitions + 1):
        for work in works:
            began = time.perf_counter()
            work.call()
            seconds = time.perf_counter() - began
            if repetition:
                rates[work.name].append(work.byte_count / seconds)
    return rates


def cut(size: int) -> tuple[Segment, ...]:
    """Two Avg segments, then RDA segments of equal length, whose borders lie anywhere."""
    avg = int(size * AVG_SHARE)
    borders = [0, avg // 3, avg, *np.linspace(avg, size, SEGMENT_COUNT - 1).astype(int).tolist()[1:]]
    return tuple(
        Segment(start, stop, "avg" if index < 2 else "rda") for index, (start, stop) in enumerate(pairwise(borders))
    )


def vector(seed: int, size: int, scale: float) -> FloatVector:
    """Normally distributed values; a short sample, repeated, because drawing them takes long."""
    sample = (np.random.default_rng(seed).standard_normal(min(size, 1 << 20)) * scale).astype(np.float32)
    return np.resize(sample, size)


class Merge:
    """The merge of one fragment with its outer step, as the syncer makes it.

    Args:
        size: elements of the fragment.
    """

    def __init__(self, size: int) -> None:
        bf16 = encoding_named("bf16")
        self.size = size
        self.segments = cut(size)
        self.uploads = [
            Encoded(bf16.encode(vector(seed, size, 1e-3)), "bf16", size) for seed in range(CONTRIBUTION_COUNT)
        ]
        self.weights = [1.0 + 0.1 * index for index in range(CONTRIBUTION_COUNT)]
        self.squares = [examine(upload, self.segments).squares for upload in self.uploads]
        self.stops = np.array([segment.stop for segment in self.segments])
        self.state = FragmentState(*(vector(9, size, scale) for scale in (1.0, 1e-3, 1e-6)))

    @property
    def byte_count(self) -> int:
        """Bytes of contributions, state and results."""
        return self.size * (2 * CONTRIBUTION_COUNT + STEP_BYTES)

    def ours(self, threads: LoopThreads) -> FragmentState:
        """By the compiled loops."""
        combined = combine(self.uploads, self.squares, self.weights, self.segments, threads)
        hyper = {"learning_rate": 0.7, "mu": 0.9, "download_encoding": "bf16"}
        return merged_outer_step(self.state, combined, self.stops, **hyper, threads=threads)[1].state  # type: ignore[arg-type]

    def by_numpy(self) -> FragmentState:
        """By plain NumPy; it takes the norms itself."""
        delta = plain.merge([plain.elements(upload) for upload in self.uploads], self.weights, self.segments)
        return plain.outer_step(self.state, delta, 0.7, 0.9)[0]

    def examined(self, threads: LoopThreads) -> None:
        """The norms of all contributions."""
        for upload in self.uploads:
            examine(upload, self.segments, threads)


def memcpy(size: int, pool: ThreadPoolExecutor, thread_count: int) -> Callable[[], None]:
    """Copies a float32 vector, in as many parts as there are threads."""
    source, copy = vector(0, size, 1.0), np.zeros(size, np.float32)
    borders = np.linspace(0, size, thread_count + 1).astype(int).tolist()
    spans = [slice(*borders[index : index + 2]) for index in range(thread_count)]

    def call() -> None:
        if thread_count == 1:
            np.copyto(copy, source)
        else:
            list(pool.map(lambda span: np.copyto(copy[span], source[span]), spans))

    return call


def encoding_works(size: int, pool: ThreadPoolExecutor, thread_count: int) -> list[Work]:
    """Encoding and decoding, by one thread, and by all threads on a vector each."""
    works = []
    flats = [vector(seed, size, 1e-3) for seed in range(thread_count)]
    outs = [np.zeros(size, np.float32) for _ in flats]
    for name in LOSSY:
        encoding = encoding_named(name)
        payloads = [encoding.encode(flat) for flat in flats]
        byte_count = size * (4 + encoding.bits_per_element / 8)
        for count, label in counts(thread_count):

            def encode(encoding=encoding, count=count) -> None:  # type: ignore[no-untyped-def]
                list(pool.map(encoding.encode, flats[:count]))

            def decode(encoding=encoding, payloads=payloads, count=count) -> None:  # type: ignore[no-untyped-def]
                list(pool.map(encoding.decode, payloads[:count], outs[:count]))

            works.append(Work(f"encode {name}, {label}", count * byte_count, encode))
            works.append(Work(f"decode {name}, {label}", count * byte_count, decode))
    return works


def counts(thread_count: int) -> list[tuple[int, str]]:
    """One thread and all, with how to call them."""
    found = [(1, "1 thread")]
    return found if thread_count == 1 else [*found, (thread_count, f"{thread_count} threads")]


def ratios(rates: Mapping[str, Sequence[float]], name: str, reference: str) -> list[float]:
    """Repetition by repetition, so that what slows both down cancels."""
    return [ours / theirs for ours, theirs in zip(rates[name], rates[reference], strict=True)]


def measure(quick: bool) -> Section:
    """All figures; `quick` works on an eighth of the elements and repeats less."""
    tune_malloc()
    kernels()
    size, repetitions = (1 << 23, 3) if quick else (1 << 26, 7)
    thread_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(thread_count) as pool:
        figures = [
            *merge_figures(size, repetitions, pool, thread_count),
            *encoding_figures(1 << 23 if quick else 1 << 24, repetitions, pool, thread_count),
        ]
    return Section(
        name="arithmetic",
        title="Merge, outer step and encodings, beside memcpy",
        conditions=(
            f"{size / 2**20:g} Mi parameters, {CONTRIBUTION_COUNT} bf16 contributions, {SEGMENT_COUNT} segments "
            f"({AVG_SHARE:.0%} of the elements Avg, the rest RDA), {repetitions} repetitions, taking turns. Bytes are "
            "those that must be read and written (see the module); plain NumPy takes the norms in the same call, which "
            "ours has from the examination at arrival."
        ),
        figures=tuple(figures),
    )


def merge_figures(size: int, repetitions: int, pool: ThreadPoolExecutor, thread_count: int) -> list[Figure]:
    """The merge with its outer step, examination, and applying a delta."""
    merge = Merge(size)
    plain_merge = Merge(min(size, 1 << 22))
    step = encoding_named("bf16").encode(vector(1, size, 1e-3))
    threads = {1: CALLING_THREAD, thread_count: LoopThreads(pool, thread_count)} if thread_count > 1 else {}
    threads.setdefault(1, CALLING_THREAD)
    works, figures = [], []
    for count, label in counts(thread_count):
        crew = threads[count]
        works += [
            Work(f"memcpy, {label}", 8.0 * size, memcpy(size, pool, count)),
            Work(f"merge, {label}", merge.byte_count, lambda crew=crew: merge.ours(crew)),  # type: ignore[misc]
            Work(f"examine, {label}", 2 * size * CONTRIBUTION_COUNT, lambda crew=crew: merge.examined(crew)),  # type: ignore[misc]
            Work(f"apply, {label}", 10.0 * size, lambda crew=crew: apply_delta(merge.state.theta, step, "bf16", crew)),  # type: ignore[misc]
        ]
    works.append(Work("plain", plain_merge.byte_count, plain_merge.by_numpy))
    rates = timed(works, repetitions)
    best = f"memcpy, {counts(thread_count)[0][1]}"
    for count, label in counts(thread_count):
        is_all = count == thread_count
        figures += [
            of_repetitions(f"memcpy, {label}", [rate / 1e9 for rate in rates[f"memcpy, {label}"]], "GB/s"),
            of_repetitions(f"merge and outer step, {label}", [rate / 1e9 for rate in rates[f"merge, {label}"]], "GB/s"),
            of_repetitions(
                f"merge and outer step, {label}: share of memcpy",
                ratios(rates, f"merge, {label}", best),
                "x",
                Target("at least", 0.6) if is_all else None,
                "memcpy by 1 thread",
            ),
            of_repetitions(
                f"merge and outer step, {label}: over plain NumPy",
                ratios(rates, f"merge, {label}", "plain"),
                "x",
                Target("at least", 5) if is_all else None,
                f"NumPy on {plain_merge.size / 2**20:g} Mi parameters",
            ),
            of_repetitions(
                f"examination at arrival, {label}: share of memcpy", ratios(rates, f"examine, {label}", best), "x"
            ),
            of_repetitions(
                f"applying a bf16 delta, {label}: share of memcpy", ratios(rates, f"apply, {label}", best), "x"
            ),
        ]
    figures.append(norm_figure(merge))
    return figures


def norm_figure(merge: Merge) -> Figure:
    """How many bits of a norm are right, beside the exactly rounded sum of float64 squares of a part of it."""
    part = min(merge.size, 1 << 20)
    upload = Encoded(encoding_named("bf16").encode(vector(0, part, 1e-3)), "bf16", part)
    exact = math.sqrt(math.fsum(np.square(plain.elements(upload).astype(np.float64)).tolist()))
    error = abs(examine(upload, cut(part)).norm / exact - 1)
    right = -math.log2(max(error, 2.0**-53))
    return Figure("norm of a contribution: bits that are right", right, "", Target("at least", 30))


def encoding_figures(size: int, repetitions: int, pool: ThreadPoolExecutor, thread_count: int) -> list[Figure]:
    """Encoding and decoding beside memcpy by as many threads."""
    works = encoding_works(size, pool, thread_count)
    for count, label in counts(thread_count):
        works.insert(0, Work(f"memcpy, {label}", 8.0 * size, memcpy(size, pool, count)))
    rates = timed(works, repetitions)
    return [
        of_repetitions(
            f"{work.name}: share of memcpy",
            ratios(rates, work.name, "memcpy, " + work.name.split(", ")[1]),
            "x",
            Target("at least", 0.5),
            f"{statistics.median(rates[work.name]) / 1e9:.1f} GB/s",
        )
        for work in works
        if not work.name.startswith("memcpy")
    ]


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
