"""The merge: contributions of several learners become one delta per fragment.

With uploads u_m = theta_m - Theta and weights w_m, per segment (one tensor, or one slice of a stacked one):

    Delta_m = -u_m
    Avg = sum_m w_m Delta_m / sum_m w_m
    RDA = (sum_m w_m ||Delta_m|| / sum_m w_m) * phi(sum_m w_m phi(Delta_m) / sum_m w_m)
    phi(x) = x / ||x||, phi(0) = 0

(the paper's radial-directional averaging; outer gradients of different learners are nearly orthogonal, so
the plain mean of M of them shrinks like 1/sqrt(M), which RDA undoes). Where the mean direction nearly
vanishes (norm below `DIRECTION_FLOOR`) its direction is noise and Avg is taken instead.

Sums run in float64, in the order in which the contributions are given (the caller sorts them by learner id), each
contribution decoded straight from its payload. One pass over all of them gives the sum of a segment and its norm; the
norms of the single contributions, which the factors of RDA need, come from their examination at arrival. What is
summed first and what later is fixed (`stripes`, `kernels.square_sums`), so the same contributions give the same bits
whatever the number of threads. The sum is rounded to float32 once, and once more when RDA scales it.

Memory beyond the contributions: the result, and less than 1 MiB per thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.encoding import ENCODINGS, Encoded, FloatVector, address_of, kernels
from decoupled_diloco.arrays.fragments import Segment
from decoupled_diloco.arrays.recycled import RECYCLER
from decoupled_diloco.arrays.stripes import CALLING_THREAD, PIECE_ELEMENTS, LoopThreads, Pieces, pieces_of

DIRECTION_FLOOR: Final = 1e-6
"""Norm of the mean direction below which RDA falls back to Avg; 1 means that all contributors agree."""

NORM_MAX: Final = 1e18
"""Largest norm of a contribution that is merged. Its square still fits float32 (3.4e38), so that no
element, no norm and no outer step that follows can overflow."""

WEIGHT_MAX: Final = 1e30
"""Largest merge weight, so that weights and their sums fit float32 too; 1e12 tokens in one step would weigh
1e24."""


@dataclass(frozen=True, slots=True)
class Examination:
    """What a look at a received contribution tells.

    Attributes:
        norm: Euclidean norm in float64; NaN or infinite if an element is.
        problem: why the contribution must not be merged, in words for the ledger, or None.
        squares: squared norm of each segment.
    """

    norm: float
    problem: str | None
    squares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MergeStats:
    """Figures of one merge, for metrics and ledger.

    Attributes:
        norms: norm of each contribution over the whole fragment, in the order given.
        delta_norm: norm of the merged delta.
        rda_norm: norm of the merged delta over the RDA segments.
        rda_avg_norm: norm that Avg would have given there.
        fallback_count: RDA segments whose mean direction vanished, so that Avg was taken.
    """

    norms: tuple[float, ...]
    delta_norm: float
    rda_norm: float
    rda_avg_norm: float
    fallback_count: int

    @property
    def rda_to_avg_ratio(self) -> float:
        """||RDA|| / ||Avg|| over the RDA segments; 1.0 where there are none or nobody moved."""
        return self.rda_norm / self.rda_avg_norm if self.rda_avg_norm > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class Combined:
    """A merge that is all but done.

    Attributes:
        unscaled: the sum of each segment, with the sign of an upload.
        factors: what each segment of it is to be multiplied by to give the merged delta.
        stats: the figures of the merge.
    """

    unscaled: FloatVector
    factors: npt.NDArray[np.float64]
    stats: MergeStats


def examine(
    upload: Encoded, segments: Sequence[Segment] | None = None, threads: LoopThreads = CALLING_THREAD
) -> Examination:
    """Verifies a received contribution: every element finite, norm within the safe range.

    Args:
        upload: theta - Theta_base of a fragment.
        segments: the fragment's merge units; None: one, for who wants to know no more than whether it is usable.
        threads: who computes.
    """
    pieces = pieces_of(tuple(segments) if segments is not None else (Segment(0, upload.element_count, "avg"),))
    found = np.empty(len(pieces), np.float64)
    address, kind = address_of(upload.payload), ENCODINGS[upload.encoding].kind

    def look(first: int, last: int) -> None:
        kernels().square_sums(address, kind, upload.element_count, pieces.lows, pieces.highs, first, last, found)

    threads.run(look, len(pieces), element_count=upload.element_count)
    squares = tuple(map(_total, pieces.per_segment(found.tolist())))
    norm = math.sqrt(_total(squares))
    if not math.isfinite(norm):
        return Examination(norm, "the contribution contains NaN or infinite values", squares)
    if norm > NORM_MAX:
        return Examination(norm, f"the contribution's norm {norm:.3g} is above {NORM_MAX:.0e}", squares)
    return Examination(norm, None, squares)


def _total(squares: Sequence[float]) -> float:
    """Their exactly rounded sum; NaN if one is, infinite if one is or the sum is too large."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def weight_problem(weight: float) -> str | None:
    """Why a merge weight cannot be used, or None: it must be finite, above 0 and at most `WEIGHT_MAX`."""
    if math.isfinite(weight) and 0.0 < weight <= WEIGHT_MAX:
        return None
    return f"the merge weight {weight!r} is not between 0 (exclusive) and {WEIGHT_MAX:.0e}"


def merge(
    contributions: Sequence[Encoded],
    weights: Sequence[float],
    segments: Sequence[Segment],
    threads: LoopThreads = CALLING_THREAD,
) -> tuple[FloatVector, MergeStats]:
    """Merges the contributions to one fragment.

    Args:
        contributions: theta_m - Theta of every contributor, in the fixed order of their learner ids; of equal
            length, in any encoding, each found usable by `examine`. They are only read.
        weights: merge weights, one per contribution, each usable by `weight_problem`; only their ratios
            matter.
        segments: the merge units; together they cover the vectors.
        threads: who computes.

    Returns:
        The merged Delta = Theta - theta (float32; the opposite sign of an upload), and the figures of the
        merge.

    Raises:
        ValueError: no contribution, a weight that is not usable, or lengths that do not agree.
    """
    squares = [examine(contribution, segments, threads).squares for contribution in contributions]
    combined = combine(contributions, squares, weights, segments, threads)
    vector = combined.unscaled
    for segment, factor in zip(segments, combined.factors.tolist(), strict=True):
        address = address_of(vector)

        def scale(first: int, last: int, begin: int = segment.start, factor: float = factor) -> None:
            kernels().scale(address, begin + first, begin + last, factor)  # noqa: B023

        threads.run(scale, segment.stop - segment.start)
    return vector, combined.stats


def combine(
    contributions: Sequence[Encoded],
    squares: Sequence[Sequence[float]],
    weights: Sequence[float],
    segments: Sequence[Segment],
    threads: LoopThreads = CALLING_THREAD,
) -> Combined:
    """A merge up to the last multiplication, which the outer step does in passing; as `merge` otherwise.

    Args:
        contributions: see `merge`.
        squares: squared norm of each segment of each contribution, from `examine`.
        weights: see `merge`.
        segments: see `merge`.
        threads: who computes.
    """
    size = _checked_size(contributions, squares, weights, segments)
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    norms = np.sqrt(np.array(squares, np.float64)).T  # by segment, then contribution
    work = _Work(
        contributions, shares, norms, pieces_of(tuple(segments)), RECYCLER.take(4 * size).view(np.float32), threads
    )
    wants_direction = np.array([len(weights) > 1 and segment.rule == "rda" for segment in segments], np.bool_)
    plain, directed = work.sums(wants_direction, range(len(segments)))
    fallen = [
        index for index in np.flatnonzero(wants_direction).tolist() if math.sqrt(directed[index]) < DIRECTION_FLOOR
    ]
    if fallen:
        work.sums(np.zeros(len(segments), np.bool_), fallen)
    factors = np.full(len(segments), -1.0)
    deltas = list(plain)  # squared norm of the merged delta by segment
    for index in set(np.flatnonzero(wants_direction).tolist()) - set(fallen):
        radius = math.fsum(share * norm for share, norm in zip(shares, norms[index].tolist(), strict=True))
        factors[index] = -radius / math.sqrt(directed[index])
        deltas[index] = radius * radius
    is_rda = [segment.rule == "rda" for segment in segments]
    stats = MergeStats(
        norms=tuple(math.sqrt(_total(own)) for own in squares),
        delta_norm=math.sqrt(_total(deltas)),
        rda_norm=math.sqrt(_total([square for square, rda in zip(deltas, is_rda, strict=True) if rda])),
        rda_avg_norm=math.sqrt(_total([square for square, rda in zip(plain, is_rda, strict=True) if rda])),
        fallback_count=sum(bool(norms[index].any()) for index in fallen),
    )
    return Combined(work.out, factors, stats)


@dataclass(frozen=True)
class _Work:
    """The arguments that every pass over the contributions of a merge has in common."""

    contributions: Sequence[Encoded]
    shares: Sequence[float]
    norms: npt.NDArray[np.float64]
    pieces: Pieces
    out: FloatVector
    threads: LoopThreads

    def sums(self, directional: npt.NDArray[np.bool_], segments: Sequence[int]) -> tuple[list[float], list[float]]:
        """Writes the sums of some segments, and returns squared norms by segment: of the mean, of the mean direction.

        Args:
            directional: by segment, whether the mean direction is to be written and not the mean.
            segments: which.
        """
        pieces, count = self.pieces, len(self.contributions)
        addresses = np.array([address_of(upload.payload) for upload in self.contributions], np.int64)
        kinds = np.array([ENCODINGS[upload.encoding].kind for upload in self.contributions], np.int64)
        shares = np.zeros(-(-count // 4) * 4)  # the kernel takes four at a time
        shares[:count] = self.shares
        directions = np.zeros((len(self.norms), shares.size))
        np.divide(self.shares, self.norms, out=directions[:, :count], where=self.norms > 0.0)
        found = np.zeros((len(pieces), 2))
        size, out = self.out.size, address_of(self.out)
        loops = kernels()

        def work(first: int, last: int) -> None:
            loops.combine(
                addresses,
                kinds,
                size,
                shares,
                directions,
                pieces.lows,
                pieces.highs,
                pieces.segment_of,
                directional,
                first,
                last,
                out,
                found,
            )

        if len(segments) == len(self.norms):
            self.threads.run(work, len(pieces), element_count=size)
        else:
            for segment in segments:
                begin, end = pieces.bounds[segment : segment + 2]

                def shifted(first: int, last: int, begin: int = begin) -> None:
                    work(begin + first, begin + last)

                self.threads.run(shifted, end - begin, element_count=(end - begin) * PIECE_ELEMENTS)
        plain, directed = found.T.tolist()
        return list(map(_total, pieces.per_segment(plain))), list(map(_total, pieces.per_segment(directed)))


def _checked_size(
    uploads: Sequence[Encoded],
    squares: Sequence[Sequence[float]],
    weights: Sequence[float],
    segments: Sequence[Segment],
) -> int:
    if not uploads or len(uploads) != len(weights):
        raise ValueError(f"{len(uploads)} contributions and {len(weights)} weights; one weight each, at least one")
    problem = next((found for found in map(weight_problem, weights) if found), None)
    if problem:
        raise ValueError(problem)
    size = uploads[0].element_count
    if any(upload.element_count != size for upload in uploads):
        raise ValueError(f"contributions differ in length: {[upload.element_count for upload in uploads]}")
    if [len(own) for own in squares] != [len(segments)] * len(uploads):
        raise ValueError(f"squared norms of {[len(own) for own in squares]} segments; {len(segments)} for each upload")
    covered = 0
    for segment in segments:
        if segment.start != covered or segment.stop <= segment.start:
            raise ValueError(f"segments do not cover the vector without gap: {segment} after element {covered}")
        covered = segment.stop
    if covered != size:
        raise ValueError(f"segments cover {covered} elements, contributions have {size}")
    return size
