"""Loops over fragments, compiled to machine code; `merge`, `outer` and `encoding` say what they mean.

Why numba. Plain NumPy makes a pass over memory per operation and converts bf16 element by element: one thread of these
loops is about three times as fast at a merge with its outer step (`python -m benchmarks.arithmetic`), and they divide
among threads. jax.jit fuses, too, but its compiler contracts a * b + c to one rounding where the processor can (23 % of
the float32 results differed from NumPy's on an x86 with AVX-512), so bits would depend on the processor; and the syncer
would need JAX. Numba compiles the loops as they stand: fastmath is off, so nothing is contracted or reordered, and the
same inputs give the same bits on every processor.

Rules that hold for all kernels:

- Inputs and outputs are addresses of little-endian, contiguous memory, so that contributions in any number and in any
  mix of encodings need one compiled form. Who calls keeps the memory alive; `arrays` are checked there.
- They let go of Python's lock, so threads can work on different ranges at once. What a range gives never depends on
  the other ranges.
- A row of `ROW` elements at a time goes through scratch vectors that stay in the first-level cache; every loop has few
  operands, because the compiler vectorises only loops in which it can rule out that operands overlap, and an index
  that counts from 0, because it makes sure of every other one that it is not negative.
- Large results are written past the caches (`put`): they are next read when a whole fragment later, and a plain store
  would first read each line that it overwrites.

Signatures are explicit, so importing this module compiles everything, or loads it from numba's cache: `import` is the
warm-up (seconds without a cache, a second with one).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.encoding_kernels import (
    BLOCK,
    NOT_FINITE,
    ROW,
    decode,
    decode_row,
    encode_bf16,
    encode_blocks,
    fetch_row,
    to_bf16,
)
from decoupled_diloco.arrays.machine_code import fence, fetch, floats, kernel, part, put

__all__ = [
    "NOT_FINITE",
    "ROW",
    "add_decoded",
    "combine",
    "decode",
    "encode_bf16",
    "encode_blocks",
    "outer_step",
    "scale",
    "square_sums",
]

_Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Indices = npt.NDArray[np.int64]


# --- merging ---


@part
def _add_squares(values: Any, lanes: _Doubles) -> None:
    """Adds the squares of whole blocks lane by lane, a fixed order that a processor can work off several at a time."""
    for start in range(0, values.size, BLOCK):
        block = values[start : start + BLOCK]
        for lane in range(BLOCK):
            value = np.float64(block[lane])
            lanes[lane] += value * value


@part
def _sum_of(lanes: _Doubles) -> float:
    """The sum of the lanes by halves; clears them."""
    width = BLOCK // 2
    while width:
        for lane in range(width):
            lanes[lane] += lanes[lane + width]
        width //= 2
    total = lanes[0]
    lanes[:] = 0.0
    return float(total)


@part
def _clear_outside(row: Any, begin: int, end: int, whole: int) -> None:
    """Zeros before `begin` and from `end` up to `whole`."""
    for i in range(begin):
        row[i] = 0
    for i in range(end, whole):
        row[i] = 0


@kernel("void(int64, int64, int64, int64[::1], int64[::1], int64, int64, float64[::1])")
def square_sums(
    address: int, kind: int, size: int, lows: _Indices, highs: _Indices, first: int, last: int, squares: _Doubles
) -> None:
    """Writes the sum of squares of pieces first to last of a payload; NaN or infinite if an element is."""
    row, lanes = np.empty(ROW, np.float32), np.zeros(BLOCK, np.float64)
    for piece in range(first, last):
        low, high = lows[piece], highs[piece]
        for base in range(low // BLOCK * BLOCK, high, ROW):
            count = min(ROW, high - base)
            whole = (count + BLOCK - 1) // BLOCK * BLOCK
            # A block is decoded whole, because the place of an int4 code depends on the block's width.
            decode_row(address, kind, size, base, min(whole, size - base), row)
            _clear_outside(row, max(low - base, 0), count, whole)
            _add_squares(row[:whole], lanes)
        squares[piece] = _sum_of(lanes)


@part
def _add_four(sums: _Doubles, rows: Any, factors: _Doubles) -> None:
    a, b, c, d = factors[0], factors[1], factors[2], factors[3]
    for i in range(ROW):
        sums[i] = (((sums[i] + a * rows[0, i]) + b * rows[1, i]) + c * rows[2, i]) + d * rows[3, i]


@part
def _add_four_twice(sums: Any, rows: Any, factors: _Doubles, others: _Doubles) -> None:
    """As `_add_four` for two sums at once: loading and widening the rows is half of the work."""
    a, b, c, d = factors[0], factors[1], factors[2], factors[3]
    e, f, g, h = others[0], others[1], others[2], others[3]
    for i in range(ROW):
        w, x = np.float64(rows[0, i]), np.float64(rows[1, i])
        y, z = np.float64(rows[2, i]), np.float64(rows[3, i])
        sums[0, i] = (((sums[0, i] + a * w) + b * x) + c * y) + d * z
        sums[1, i] = (((sums[1, i] + e * w) + f * x) + g * y) + h * z


@kernel(
    "void(int64[::1], int64[::1], int64, float64[::1], float64[:, ::1], int64[::1], int64[::1], int64[::1],"
    " boolean[::1], int64, int64, int64, float64[:, ::1])"
)
def combine(
    addresses: _Indices,
    kinds: _Indices,
    size: int,
    shares: _Doubles,
    directions: _Doubles,
    lows: _Indices,
    highs: _Indices,
    segments: _Indices,
    directional: npt.NDArray[np.bool_],
    first: int,
    last: int,
    out: int,
    squares: _Doubles,
) -> None:
    """Weighted sums of all contributions over pieces first to last, in float64, contributor by contributor.

    Writes to `out` the sum with the factors `directions` of the piece's segment where that is `directional`, else the
    one with the factors `shares`; and to `squares` the squared norm of the sum with `shares`, then of the other.
    Factors are padded with zeros to a multiple of four.
    """
    rows, sums = np.zeros((4, ROW), np.float32), np.empty((2, ROW), np.float64)
    lanes, result = np.zeros((2, BLOCK), np.float64), np.empty(ROW, np.float32)
    for piece in range(first, last):
        low, high, both = lows[piece], highs[piece], directional[segments[piece]]
        factors = directions[segments[piece]]
        for base in range(low // BLOCK * BLOCK, high, ROW):
            begin, count = max(low - base, 0), min(ROW, high - base)
            whole = (count + BLOCK - 1) // BLOCK * BLOCK
            sums[0, :] = -0.0  # the one number that changes no other when it is added to
            if both:
                sums[1, :] = -0.0
            for group in range(0, addresses.size, 4):
                members = min(4, addresses.size - group)
                for member in range(members):
                    one = group + member
                    decode_row(addresses[one], kinds[one], size, base, min(whole, size - base), rows[member])
                    fetch_row(addresses[one], kinds[one], size, base + ROW)
                for member in range(members, 4):
                    rows[member, :] = 0
                if both:
                    _add_four_twice(sums, rows, shares[group : group + 4], factors[group : group + 4])
                else:
                    _add_four(sums[0], rows, shares[group : group + 4])
            chosen = sums[1] if both else sums[0]
            for i in range(ROW):
                result[i] = np.float32(chosen[i])
            put(out + 4 * (base + begin), result.ctypes.data + 4 * begin, 4 * (count - begin))
            _clear_outside(sums[0], begin, count, whole)
            _add_squares(sums[0, :whole], lanes[0])
            if both:
                _clear_outside(sums[1], begin, count, whole)
                _add_squares(sums[1, :whole], lanes[1])
        squares[piece, 0] = _sum_of(lanes[0])
        squares[piece, 1] = _sum_of(lanes[1])
    fence()


@kernel("void(int64, int64, int64, float64)")
def scale(vector: int, first: int, stop: int, factor: float) -> None:
    """Multiplies elements first to stop of a float32 vector in place, with one rounding."""
    values = floats(vector + 4 * first, stop - first)
    for i in range(values.size):
        values[i] = np.float32(factor * np.float64(values[i]))


# --- the outer step ---


@part
def _momentum(
    delta: _Floats, momentum: _Floats, mu: np.float32, after: _Floats, update: _Floats, learning_rate: np.float32
) -> None:
    """After = mu * momentum + delta and update = lr * (delta + mu * after), rounded at every operation."""
    for i in range(delta.size):
        after[i] = momentum[i] * mu + delta[i]
    for i in range(delta.size):
        update[i] = (after[i] * mu + delta[i]) * learning_rate


@part
def _largest_bits(vector: _Floats, largest: np.int32) -> np.int32:
    """The larger one of `largest` and the magnitude bits of the elements."""
    bits = vector.view(np.int32)
    for i in range(vector.size):
        largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return largest


@part
def _scaled(unscaled: _Floats, base: int, stops: _Indices, factors: _Doubles, out: _Floats) -> None:
    """The merged delta from element `base` on: each segment times its factor, rounded once."""
    segment, begin = np.searchsorted(stops, base, side="right"), 0
    while begin < unscaled.size:
        end = min(unscaled.size, stops[segment] - base)
        factor, own, scaled = factors[segment], unscaled[begin:end], out[begin:end]
        for i in range(own.size):
            scaled[i] = np.float32(factor * np.float64(own[i]))
        begin = end
        segment += 1


@part
def _published(
    theta: _Floats, target: _Floats, step: npt.NDArray[np.uint16], scratch: _Floats, residual: _Floats
) -> None:
    """The step bf16(target - theta) and residual = target - (theta + step); `target` becomes theta + step."""
    for i in range(theta.size):
        residual[i] = target[i] - theta[i]
    to_bf16(residual.view(np.uint32), step)
    wide = scratch.view(np.uint32)
    for i in range(theta.size):
        wide[i] = np.uint32(step[i]) << np.uint32(16)
    for i in range(theta.size):
        residual[i] = target[i]
        target[i] = theta[i] + scratch[i]
    for i in range(theta.size):
        residual[i] = residual[i] - target[i]


@kernel("int64(int64[::1], int64[::1], float32, float32, int64[::1], float64[::1], int64, int64)")
def outer_step(
    sources: _Indices,
    results: _Indices,
    learning_rate: np.float32,
    mu: np.float32,
    stops: _Indices,
    factors: _Doubles,
    first: int,
    last: int,
) -> int:
    """One outer step of elements first to last.

    Args:
        sources: theta, momentum, residual and the unscaled merged delta.
        results: the new theta, momentum and residual, the bf16 step, and the merged delta. 0 instead of residual and
            step: theta takes the target itself. 0 instead of the delta: it is not wanted.
        learning_rate: of the outer step.
        mu: momentum coefficient.
        stops: where each segment ends, ascending.
        factors: what the unscaled delta is to be multiplied by, per segment.
        first: first element.
        last: one past the last element.

    Returns:
        The largest magnitude bits of the new state.
    """
    delta, after, update = np.empty(ROW, np.float32), np.empty(ROW, np.float32), np.empty(ROW, np.float32)
    target, step, rest = np.empty(ROW, np.float32), np.empty(ROW, np.uint16), np.empty(ROW, np.float32)
    largest = np.int32(0)
    for base in range(first, last, ROW):
        count = min(ROW, last - base)
        theta, momentum = floats(sources[0] + 4 * base, count), floats(sources[1] + 4 * base, count)
        residual, unscaled = floats(sources[2] + 4 * base, count), floats(sources[3] + 4 * base, count)
        for source in sources:
            fetch(source + 4 * (base + ROW), 4 * ROW)
        _scaled(unscaled, base, stops, factors, delta)
        if results[4]:
            put(results[4] + 4 * base, delta.ctypes.data, 4 * count)
        _momentum(delta[:count], momentum, mu, after, update, learning_rate)
        for i in range(count):
            target[i] = (theta[i] + residual[i]) - update[i]
        if results[3]:
            _published(theta, target[:count], step[:count], update[:count], rest[:count])
            largest = _largest_bits(rest[:count], largest)
            put(results[2] + 4 * base, rest.ctypes.data, 4 * count)
            put(results[3] + 2 * base, step.ctypes.data, 2 * count)
        largest = _largest_bits(target[:count], _largest_bits(after[:count], largest))
        put(results[0] + 4 * base, target.ctypes.data, 4 * count)
        put(results[1] + 4 * base, after.ctypes.data, 4 * count)
    fence()
    return int(largest)


@kernel("void(int64, int64, int64, int64, int64, int64, int64)")
def add_decoded(base: int, payload: int, kind: int, size: int, first: int, stop: int, out: int) -> None:
    """Out = fl32(base + decoded) over elements first to stop; `first` is a multiple of BLOCK."""
    for begin in range(first, stop, ROW):
        count = min(ROW, stop - begin)
        held = floats(base + 4 * begin, count)
        result = floats(out + 4 * begin, count)
        decode_row(payload, kind, size, begin, count, result)
        for i in range(count):
            result[i] = held[i] + result[i]
