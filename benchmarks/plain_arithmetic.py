"""The arithmetic of fragments in plain NumPy: what benchmarks compare with and what tests take for right.

Written for the formulas and not for speed, but fairly: blocks that stay in the cache, no copy of a whole fragment that
could be spared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.encoding import BLOCK_ELEMENTS, Encoded, FloatVector
from decoupled_diloco.arrays.fragments import Segment
from decoupled_diloco.arrays.merge import DIRECTION_FLOOR
from decoupled_diloco.arrays.outer import FragmentState

CODE_MAX: Final = {"int8": 127, "int4": 7}
MERGE_ELEMENTS: Final = 1 << 15
STEP_ELEMENTS: Final = 1 << 16

Values = npt.NDArray[np.generic]


def encode(flat: FloatVector, name: str) -> bytes:
    """A payload in any encoding."""
    if name not in CODE_MAX:
        with np.errstate(invalid="ignore", over="ignore"):
            return flat.astype(ml_dtypes.bfloat16 if name == "bf16" else np.float32).tobytes()
    blocks = np.zeros((-(-flat.size // BLOCK_ELEMENTS), BLOCK_ELEMENTS), np.float32)
    blocks.reshape(-1)[: flat.size] = flat
    scales = _scales(blocks, CODE_MAX[name])
    divisors = scales.astype(np.float32)[:, None]
    divisors[~(divisors > 0)] = np.inf  # codes of 0
    with np.errstate(invalid="ignore"):
        quotients = np.rint(blocks / divisors)
    quotients[~np.isfinite(quotients)] = 0
    codes = quotients.astype(np.int8).reshape(-1)[: flat.size]
    return scales.tobytes() + (_packed(codes) if name == "int4" else codes).tobytes()


def elements(upload: Encoded) -> Values:
    """The elements of a payload, as they lie there if NumPy has the type, else as float32."""
    raw, size = np.frombuffer(upload.payload, np.uint8), upload.element_count
    if upload.encoding not in CODE_MAX:
        return raw.view(ml_dtypes.bfloat16 if upload.encoding == "bf16" else np.float32)
    block_count = -(-size // BLOCK_ELEMENTS)
    scales = raw[: 2 * block_count].view(ml_dtypes.bfloat16).astype(np.float32)
    codes = raw[2 * block_count :]
    values = _unpacked(codes, size) if upload.encoding == "int4" else codes.view(np.int8)
    with np.errstate(invalid="ignore", over="ignore"):
        return values * np.repeat(scales, BLOCK_ELEMENTS)[:size]


def merge(uploads: Sequence[Values], weights: Sequence[float], segments: Sequence[Segment]) -> FloatVector:
    """The merged delta."""
    shares = [weight / math.fsum(weights) for weight in weights]
    delta = np.empty(uploads[0].size, np.float32)
    for segment in segments:
        span = slice(segment.start, segment.stop)
        norms = [math.sqrt(_square_sum(upload, span)) for upload in uploads]
        factors = [share / norm if norm > 0.0 else 0.0 for share, norm in zip(shares, norms, strict=True)]
        direction = math.sqrt(_combine(uploads, factors, span, None)) if segment.rule == "rda" else 0.0
        if len(uploads) == 1 or direction < DIRECTION_FLOOR:
            _combine(uploads, shares, span, delta)
            continue
        radius = math.fsum(share * norm for share, norm in zip(shares, norms, strict=True))
        _combine(uploads, factors, span, delta, radius / direction)
    return delta


def outer_step(
    state: FragmentState, delta: FloatVector, learning_rate: float, mu: float
) -> tuple[FragmentState, Values]:
    """The new version and the bf16 step that leads to it."""
    momentum, target = np.empty_like(state.momentum), np.empty_like(state.theta)
    for block in _blocks(slice(0, delta.size), STEP_ELEMENTS):
        np.multiply(state.momentum[block], np.float32(mu), out=momentum[block])
        momentum[block] += delta[block]
        update = np.multiply(momentum[block], np.float32(mu))
        update += delta[block]
        update *= np.float32(learning_rate)
        np.add(state.theta[block], state.residual[block], out=target[block])
        target[block] -= update
    step = (target - state.theta).astype(ml_dtypes.bfloat16)
    theta = apply_delta(state.theta, step)
    return FragmentState(theta, momentum, np.subtract(target, theta, out=target)), step


def apply_delta(base: FloatVector, step: Values) -> FloatVector:
    """The version that a step leads to."""
    theta = np.empty_like(base)
    for block in _blocks(slice(0, base.size), STEP_ELEMENTS):
        np.add(base[block], step[block].astype(np.float32), out=theta[block])
    return theta


def _combine(
    uploads: Sequence[Values],
    coefficients: Sequence[float],
    span: slice,
    delta: FloatVector | None,
    scale: float = 1.0,
) -> float:
    """Writes -scale * sum_m coefficient_m * upload_m; returns the squared norm of that sum."""
    squares = []
    for block in _blocks(span, MERGE_ELEMENTS):
        total = uploads[0][block].astype(np.float64)
        total *= coefficients[0]
        for upload, coefficient in zip(uploads[1:], coefficients[1:], strict=True):
            total += np.multiply(upload[block], coefficient, dtype=np.float64)
        total *= scale
        if delta is not None:
            np.negative(total, out=delta[block], casting="same_kind")
        np.multiply(total, total, out=total)
        squares.append(float(np.add.reduce(total)))
    return math.fsum(squares)


def _square_sum(vector: Values, span: slice) -> float:
    squares = []
    for block in _blocks(span, MERGE_ELEMENTS):
        wide = vector[block].astype(np.float64)
        np.multiply(wide, wide, out=wide)
        squares.append(float(np.add.reduce(wide)))
    return math.fsum(squares)


def _blocks(span: slice, size: int) -> Iterator[slice]:
    start: int
    for start in range(span.start, span.stop, size):
        yield slice(start, min(start + size, span.stop))


def _scales(blocks: FloatVector, code_max: int) -> Values:
    largest = np.abs(blocks).max(axis=1)  # NaN where a value is
    bits = (largest / np.float32(code_max)).view(np.uint32)
    rounded_up = ((bits + 0xFFFF) >> 16).astype(np.uint16)
    rounded_up[(largest > 0) & (rounded_up == 0)] = 1
    rounded_up[~np.isfinite(largest)] = 0x7FC0
    return rounded_up.view(ml_dtypes.bfloat16)


def _packed(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """Two codes in a byte: of the full blocks, then of the short one."""
    full = codes.size // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    parts = []
    for part, width in ((codes[:full], BLOCK_ELEMENTS), (codes[full:], codes.size - full)):
        half = -(-width // 2)
        rows = np.zeros((part.size // width if width else 0, 2 * half), np.uint8)
        rows[:, :width] = part.view(np.uint8).reshape(-1, width) if width else 0
        parts.append(((rows[:, :half] & 15) | (rows[:, half:] << 4)).reshape(-1))
    return np.concatenate(parts)


def _unpacked(packed: npt.NDArray[np.uint8], element_count: int) -> npt.NDArray[np.int8]:
    """What `_packed` packed."""
    full = element_count // BLOCK_ELEMENTS * BLOCK_ELEMENTS
    parts = []
    for part, width in ((packed[: full // 2], BLOCK_ELEMENTS), (packed[full // 2 :], element_count - full)):
        half = -(-width // 2)
        rows = part.view(np.int8).reshape(-1, half) if half else np.zeros((0, 0), np.int8)
        parts.append(np.concatenate([(rows << 4) >> 4, rows >> 4], axis=1)[:, :width].reshape(-1))
    return np.concatenate(parts)
