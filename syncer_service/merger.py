"""The arithmetic of a round: looks at contributions, merges them, takes the outer step. For executor threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import Encoded, FloatVector
from decoupled_diloco.arrays.fragments import Segment
from decoupled_diloco.arrays.merge import merge
from decoupled_diloco.arrays.outer import FragmentState, outer_step


@dataclass(frozen=True, slots=True)
class MergeInput:
    """One contribution in its buffer.

    Attributes:
        upload: theta - Theta_base as received.
        weight: w_m.
    """

    upload: Encoded
    weight: float


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
) -> MergeResult:
    """Merges contributions to a fragment and takes the outer step; `state` is left as it is.

    Args:
        state: The version that all contributions are based on.
        contributions: In the order of their learner ids.
        segments: The fragment's merge units.
        learning_rate: Outer learning rate.
        momentum: Outer momentum (mu).
        download_encoding: How the new version is handed to holders of the old one.

    Raises:
        ValueError: Lengths or weights that do not fit.
    """
    uploads = [item.upload for item in contributions]
    delta, stats = merge(uploads, [item.weight for item in contributions], segments)
    step = outer_step(state, delta, learning_rate=learning_rate, mu=momentum, download_encoding=download_encoding)
    vectors = (step.state.theta, step.state.momentum, step.state.residual)
    finite = math.isfinite(stats.delta_norm) and all(bool(np.isfinite(vector).all()) for vector in vectors)
    return MergeResult(
        state=step.state,
        delta=delta,
        delta_payload=step.delta_payload,
        digest=vector_digest(step.state.theta),
        finite=finite,
        rda_over_avg=stats.rda_to_avg_ratio,
        norms=stats.norms,
    )
