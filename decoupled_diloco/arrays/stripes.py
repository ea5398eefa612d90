"""Work on a vector in stripes, by one thread or several; the same bits for any number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.fragments import Segment

PIECE_ELEMENTS: Final = 1 << 15
"""Longest range whose squares are summed to one number. The numbers are then added exactly rounded (`math.fsum`), so
who computes which does not matter."""

STRIPES_PER_THREAD: Final = 4
"""So that a thread that loses its processor for a while holds up a quarter of its share."""

INLINE_ELEMENTS_MAX: Final = 1 << 17
"""Up to here the calling thread does the work, in about 0.3 ms: to hand it over would take as long."""

T = TypeVar("T")


@dataclass(frozen=True)
class LoopThreads:
    """Threads for one piece of work at a time.

    Attributes:
        executor: runs the stripes; None: the calling thread does. Never the one whose thread is calling.
        thread_count: how many it has.
    """

    executor: Executor | None = None
    thread_count: int = 1

    def run(
        self, work: Callable[[int, int], T], count: int, *, step: int = 1, element_count: int | None = None
    ) -> list[T]:
        """Calls work(first, last) on stripes of 0 to `count` that begin at multiples of `step`, and waits for all.

        Args:
            work: what to do with a stripe.
            count: where the last stripe ends.
            step: stripes begin at multiples of it.
            element_count: elements of the vector that the stripes cover; None: `count`.

        Returns:
            What the calls returned, in order of the stripes.
        """
        if self.executor is None or (count if element_count is None else element_count) <= INLINE_ELEMENTS_MAX:
            return [work(0, count)]
        stripe = -(-count // (step * self.thread_count * STRIPES_PER_THREAD)) * step
        starts = range(0, count, stripe)
        stripes = [self.executor.submit(work, start, min(start + stripe, count)) for start in starts]
        wait(stripes)  # also where one fails: the others work on memory that the caller would let go of
        return [done.result() for done in stripes]


CALLING_THREAD: Final = LoopThreads()
"""No threads but the calling one."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """The ranges of a vector whose squares are summed; none crosses the border of a segment.

    Attributes:
        lows: first element of each.
        highs: one past the last element of each.
        segment_of: which segment it belongs to, ascending.
        bounds: the pieces of segment k are bounds[k] to bounds[k + 1].
    """

    lows: npt.NDArray[np.int64]
    highs: npt.NDArray[np.int64]
    segment_of: npt.NDArray[np.int64]
    bounds: tuple[int, ...]

    def __len__(self) -> int:
        return self.lows.size

    def per_segment(self, values: Sequence[float]) -> list[Sequence[float]]:
        """The values of the pieces, one slice per segment."""
        return [values[begin:end] for begin, end in pairwise(self.bounds)]


@lru_cache(maxsize=256)
def pieces_of(segments: tuple[Segment, ...]) -> Pieces:
    """Cuts segments into pieces; a pure function of them, so every machine cuts alike."""
    lows = [np.arange(segment.start, segment.stop, PIECE_ELEMENTS, dtype=np.int64) for segment in segments]
    highs = [np.minimum(low + PIECE_ELEMENTS, segment.stop) for low, segment in zip(lows, segments, strict=True)]
    counts = [low.size for low in lows]
    return Pieces(
        np.concatenate(lows),
        np.concatenate(highs),
        np.repeat(np.arange(len(segments), dtype=np.int64), counts),
        tuple(np.concatenate([[0], np.cumsum(counts)]).tolist()),
    )
