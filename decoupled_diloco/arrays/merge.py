"""The merge: contributions of several learners become one delta per fragment.

With uploads u_m = theta_m - Theta and weights w_m, per segment (one tensor, or one slice of a stacked one):

    Delta_m = -u_m
    Avg = sum_m w_m Delta_m / sum_m w_m
    RDA = (sum_m w_m ||Delta_m|| / sum_m w_m) * phi(sum_m w_m phi(Delta_m) / sum_m w_m)
    phi(x) = x / ||x||, phi(0) = 0

(the paper's radial-directional averaging; outer gradients of different learners are nearly orthogonal, so
the plain mean of M of them shrinks like 1/sqrt(M), which RDA undoes). Where the mean direction nearly
vanishes (norm below `DIRECTION_FLOOR`) its direction is noise and Avg is taken instead.

Sums run in float64, block by block, in the order in which the contributions are given (the caller sorts
them by learner id), with elementwise operations and NumPy's own pairwise sums only: the same contributions
give the same bits. Memory beyond the inputs and the result: three blocks of `BLOCK_ELEMENTS` float64,
whatever the sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.encoding import Encoded, FloatVector
from decoupled_diloco.arrays.fragments import Segment

BLOCK_ELEMENTS: Final = 1 << 15
"""Elements handled at a time: 256 KiB of float64, so that the few blocks in use stay in the second-level
cache."""

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
    """

    norm: float
    problem: str | None


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


def examine(upload: Encoded) -> Examination:
    """Verifies a received contribution: every element finite, norm within the safe range.

    Args:
        upload: theta - Theta_base of a fragment.
    """
    square_sum = math.fsum(_square_sums(upload.decode(), slice(0, upload.element_count)))
    norm = math.sqrt(square_sum) if square_sum >= 0.0 else math.nan
    if not math.isfinite(norm):
        return Examination(norm, "the contribution contains NaN or infinite values")
    if norm > NORM_MAX:
        return Examination(norm, f"the contribution's norm {norm:.3g} is above {NORM_MAX:.0e}")
    return Examination(norm, None)


def weight_problem(weight: float) -> str | None:
    """Why a merge weight cannot be used, or None: it must be finite, above 0 and at most `WEIGHT_MAX`."""
    if math.isfinite(weight) and 0.0 < weight <= WEIGHT_MAX:
        return None
    return f"the merge weight {weight!r} is not between 0 (exclusive) and {WEIGHT_MAX:.0e}"


def merge(
    contributions: Sequence[Encoded], weights: Sequence[float], segments: Sequence[Segment]
) -> tuple[FloatVector, MergeStats]:
    """Merges the contributions to one fragment.

    Args:
        contributions: theta_m - Theta of every contributor, in the fixed order of their learner ids; of equal
            length, in any encoding, each found usable by `examine`.
        weights: merge weights, one per contribution, each usable by `weight_problem`; only their ratios
            matter.
        segments: the merge units; together they cover the vectors.

    Returns:
        The merged Delta = Theta - theta (float32; the opposite sign of an upload), and the figures of the
        merge.

    Raises:
        ValueError: no contribution, a weight that is not usable, or lengths that do not agree.
    """
    uploads = [contribution.decode() for contribution in contributions]
    size = _checked_size(uploads, weights, segments)
    total = math.fsum(weights)
    shares = [weight / total for weight in weights]
    delta = np.empty(size, np.float32)
    norm_squares = [0.0] * len(uploads)
    rda_square = rda_avg_square = avg_square = 0.0
    fallback_count = 0
    for segment in segments:
        span = slice(segment.start, segment.stop)
        norms = [math.sqrt(math.fsum(_square_sums(upload, span))) for upload in uploads]
        norm_squares = [square + norm * norm for square, norm in zip(norm_squares, norms, strict=True)]
        if segment.rule == "avg":
            avg_square += _combine(uploads, shares, span, delta)
            continue
        outcome = _radial_directional(uploads, shares, norms, span, delta)
        rda_square += outcome.square
        rda_avg_square += outcome.avg_square
        fallback_count += outcome.fell_back
    stats = MergeStats(
        norms=tuple(math.sqrt(square) for square in norm_squares),
        delta_norm=math.sqrt(avg_square + rda_square),
        rda_norm=math.sqrt(rda_square),
        rda_avg_norm=math.sqrt(rda_avg_square),
        fallback_count=fallback_count,
    )
    return delta, stats


@dataclass(frozen=True, slots=True)
class _SegmentOutcome:
    square: float
    avg_square: float
    fell_back: bool


def _radial_directional(
    uploads: Sequence[npt.NDArray[np.generic]],
    shares: Sequence[float],
    norms: Sequence[float],
    span: slice,
    delta: FloatVector,
) -> _SegmentOutcome:
    """RDA of one segment into `delta`; Avg to the bit with one contributor or where directions cancel."""
    directional = [share / norm if norm > 0.0 else 0.0 for share, norm in zip(shares, norms, strict=True)]
    avg_square = _combine(uploads, shares, span, None)
    direction_norm = math.sqrt(_combine(uploads, directional, span, None))
    if len(uploads) == 1 or direction_norm < DIRECTION_FLOOR:
        square = _combine(uploads, shares, span, delta)
        return _SegmentOutcome(square, avg_square, fell_back=len(uploads) > 1 and any(norms))
    radius = math.fsum(share * norm for share, norm in zip(shares, norms, strict=True))
    square = _combine(uploads, directional, span, delta, scale=radius / direction_norm)
    return _SegmentOutcome(square, avg_square, fell_back=False)


def _combine(
    uploads: Sequence[npt.NDArray[np.generic]],
    coefficients: Sequence[float],
    span: slice,
    delta: FloatVector | None,
    scale: float = 1.0,
) -> float:
    """Writes -scale * sum_m coefficient_m * upload_m over `span` of `delta`, if there is one.

    Returns:
        The squared norm of that sum.
    """
    squares = []
    for block in _blocks(span):
        total = uploads[0][block].astype(np.float64)
        total *= coefficients[0]
        for upload, coefficient in zip(uploads[1:], coefficients[1:], strict=True):
            total += np.multiply(upload[block], coefficient, dtype=np.float64)
        if scale != 1.0:
            total *= scale
        if delta is not None:
            np.negative(total, out=delta[block], casting="same_kind")  # one rounding, float64 to float32
        np.multiply(total, total, out=total)
        squares.append(float(np.add.reduce(total)))
    return math.fsum(squares)


def _square_sums(vector: npt.NDArray[np.generic], span: slice) -> Iterator[float]:
    """The sum of squares of each block of `span`, in float64."""
    for block in _blocks(span):
        elements = vector[block].astype(np.float64)
        np.multiply(elements, elements, out=elements)
        yield float(np.add.reduce(elements))


def _blocks(span: slice) -> Iterator[slice]:
    start: int
    for start in range(span.start, span.stop, BLOCK_ELEMENTS):
        yield slice(start, min(start + BLOCK_ELEMENTS, span.stop))


def _checked_size(
    uploads: Sequence[npt.NDArray[np.generic]], weights: Sequence[float], segments: Sequence[Segment]
) -> int:
    if not uploads or len(uploads) != len(weights):
        raise ValueError(f"{len(uploads)} contributions and {len(weights)} weights; one weight each, at least one")
    problem = next((found for found in map(weight_problem, weights) if found), None)
    if problem:
        raise ValueError(problem)
    size = uploads[0].size
    if any(upload.shape != (size,) for upload in uploads):
        raise ValueError(f"contributions differ in shape: {[upload.shape for upload in uploads]}")
    covered = 0
    for segment in segments:
        if segment.start != covered or segment.stop <= segment.start:
            raise ValueError(f"segments do not cover the vector without gap: {segment} after element {covered}")
        covered = segment.stop
    if covered != size:
        raise ValueError(f"segments cover {covered} elements, contributions have {size}")
    return size
