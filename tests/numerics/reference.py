"""Merge and outer step once more, in float64 and as simply as the formulas can be written; slow on
purpose."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


def weight(tokens: float, steps: float) -> float:
    return tokens * (tokens / steps)


def avg(deltas: Sequence[Vector], weights: Sequence[float]) -> Vector:
    return np.sum([w * d for w, d in zip(weights, deltas, strict=True)], axis=0) / sum(weights)


def direction(x: Vector) -> Vector:
    norm = np.linalg.norm(x)
    return x / norm if norm > 0 else np.zeros_like(x)


def rda(deltas: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Deltas of one tensor."""
    mean_direction = avg([direction(d) for d in deltas], weights)
    if len(deltas) == 1 or np.linalg.norm(mean_direction) < 1e-6:
        return avg(deltas, weights)
    radius = sum(w * np.linalg.norm(d) for w, d in zip(weights, deltas, strict=True)) / sum(weights)
    return radius * direction(mean_direction)


def nesterov(theta: Vector, momentum: Vector, delta: Vector, lr: float, mu: float) -> tuple[Vector, Vector]:
    momentum = mu * momentum + delta
    return theta - lr * (delta + mu * momentum), momentum
