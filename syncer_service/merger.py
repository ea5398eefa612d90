"""The arithmetic of a round: looks at contributions, merges them, takes the outer step. For executor threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import Encoded, FloatVector
from decoupled_diloco.arrays.fragments import Segment
from decoupled_diloco.arrays.merge import combine, examine
from decoupled_diloco.arrays.outer import FragmentState, merged_outer_step
from decoupled_diloco.arrays.stripes import CALLING_THREAD, LoopThreads


@dataclass(frozen=True, slots=True)
class MergeInput:
    """One contribution in its buffer.

    Attributes:
        upload: theta - Theta_base as received.
        weight: w_m.
        squares: Squared norm of each segment, as found when it arrived; None: to be found now.
    """

    upload: Encoded
    weight: float
    squares: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class MergeResult:
    """A merge that is done and not published.

    Attributes:
        state: The new Theta, momentum and residual.
        delta: The merged delta that they follow from.
        delta_payload: The step in the download encoding, for holders of the base; None where downloads are exact.
        digest: xxh3-128 of the new Theta.
        finite: Whether every value of the new state is.
        rda_over_avg: Norm of the merged delta over that of the plain average, over the RDA tensors.
        norms: Norm of each contribution, in the order given.
    """

    state: FragmentState
    delta: FloatVector
    delta_payload: memoryview | None
    digest: str
    finite: bool
    rda_over_avg: float
    norms: tuple[float, ...]


def merge_round(
    state: FragmentState,
    contributions: Sequence[MergeInput],
    segments: Sequence[Segment],
    *,
    learning_rate: float,
    momentum: float,
    download_encoding: str,
    threads: LoopThreads = CALLING_THREAD,
    read: Callable[[], None] = lambda: None,
) -> MergeResult:
    """Merges contributions to a fragment and takes the outer step; `state` is left as it is.

    Args:
        state: The version that all contributions are based on.
        contributions: In the order of their learner ids.
        segments: The fragment's merge units.
        learning_rate: Outer learning rate.
        momentum: Outer momentum (mu).
        download_encoding: How the new version is handed to holders of the old one.
        threads: Who computes.
        read: Called once the contributions have been read: their memory may be that of the results.

    Raises:
        ValueError: Lengths or weights that do not fit.
    """
    squares = [
        item.squares if item.squares is not None else examine(item.upload, segments, threads).squares
        for item in contributions
    ]
    combined = combine(
        [item.upload for item in contributions], squares, [item.weight for item in contributions], segments, threads
    )
    read()
    delta, step = merged_outer_step(
        state,
        combined,
        np.array([segment.stop for segment in segments], np.int64),
        learning_rate=learning_rate,
        mu=momentum,
        download_encoding=download_encoding,
        threads=threads,
    )
    stats = combined.stats
    return MergeResult(
        state=step.state,
        delta=delta,
        delta_payload=step.delta_payload,
        digest=vector_digest(step.state.theta),
        finite=step.finite and math.isfinite(stats.delta_norm),
        rda_over_avg=stats.rda_to_avg_ratio,
        norms=stats.norms,
    )
