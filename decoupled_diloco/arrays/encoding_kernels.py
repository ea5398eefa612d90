"""The loops that read and write payloads; the rules of `kernels` hold here, too."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.encoding import BF16, BLOCK_ELEMENTS, FLOAT32, INT8
from decoupled_diloco.arrays.machine_code import (
    fetch,
    floats,
    halves,
    integers,
    kernel,
    octets,
    part,
    signed_bytes,
    words,
)

ROW: Final = 2048
"""Elements that go through the scratch vectors at a time; a multiple of the block of int8 and int4."""

BLOCK: Final = BLOCK_ELEMENTS
"""Also the lanes of a sum of squares."""

NOT_FINITE: Final = 0x7F800000
"""Magnitude bits of a float32 from which on it is infinite or NaN."""

_Floats = npt.NDArray[np.float32]


@part
def decode_row(address: int, kind: int, size: int, first: int, count: int, out: _Floats) -> None:
    """Elements first to first + count of a payload of `size` elements; `first` is a multiple of BLOCK."""
    if kind == FLOAT32:
        values = floats(address + 4 * first, count)
        for i in range(count):
            out[i] = values[i]
    elif kind == BF16:
        codes, bits = halves(address + 2 * first, count), out.view(np.uint32)
        for i in range(count):
            bits[i] = np.uint32(codes[i]) << np.uint32(16)
    else:
        blocks = (size + BLOCK - 1) // BLOCK
        scales = halves(address, blocks)
        scale_bits = np.empty(1, np.uint32)
        scale = scale_bits.view(np.float32)
        for start in range(0, count, BLOCK):
            scale_bits[0] = np.uint32(scales[(first + start) // BLOCK]) << np.uint32(16)
            width = min(BLOCK, size - first - start)
            values = out[start : start + width]
            if kind == INT8:
                _decode_int8(address + 2 * blocks + first + start, scale[0], values)
            else:
                _decode_int4(address + 2 * blocks + (first + start) // 2, scale[0], values)


@part
def _decode_int8(address: int, scale: np.float32, out: _Floats) -> None:
    codes = signed_bytes(address, out.size)
    for i in range(out.size):
        out[i] = np.float32(codes[i]) * scale


@part
def _decode_int4(address: int, scale: np.float32, out: _Floats) -> None:
    half = (out.size + 1) // 2
    pairs = signed_bytes(address, half)
    low, high = out[:half], out[half:]
    for i in range(half):
        low[i] = np.float32(np.int8(pairs[i] << 4) >> 4) * scale
    for i in range(high.size):
        high[i] = np.float32(pairs[i] >> 4) * scale


@part
def fetch_row(address: int, kind: int, size: int, first: int) -> None:
    """Brings the codes of a row that will soon be decoded to the caches.

    A processor does that by itself only where it has seen the reads before it, and begins anew with every row.
    """
    if kind == FLOAT32:
        fetch(address + 4 * first, 4 * ROW)
    elif kind == BF16:
        fetch(address + 2 * first, 2 * ROW)
    else:
        codes = address + 2 * ((size + BLOCK - 1) // BLOCK)
        if kind == INT8:
            fetch(codes + first, ROW)
        else:
            fetch(codes + first // 2, ROW // 2)


@kernel("void(int64, int64, int64, int64, int64, int64)")
def decode(address: int, kind: int, size: int, first: int, stop: int, out: int) -> None:
    """Decodes elements first to stop of a payload of `size` elements; `first` is a multiple of BLOCK."""
    for base in range(first, stop, ROW):
        count = min(ROW, stop - base)
        decode_row(address, kind, size, base, count, floats(out + 4 * base, count))


@part
def to_bf16(bits: npt.NDArray[np.uint32], out: npt.NDArray[np.uint16]) -> None:
    """Rounds to nearest, ties to even; NaN becomes the quiet NaN of its sign."""
    for i in range(out.size):
        x = np.uint32(bits[i])
        rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = ((x >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7FC0)
        is_nan = (x & np.uint32(0x7FFFFFFF)) > np.uint32(NOT_FINITE)
        out[i] = np.uint16(quiet) if is_nan else np.uint16(rounded)


@kernel("void(int64, int64, int64, int64)")
def encode_bf16(flat: int, first: int, stop: int, payload: int) -> None:
    """Writes elements first to stop of a vector to a bf16 payload."""
    count = stop - first
    to_bf16(words(flat + 4 * first, count), halves(payload + 2 * first, count))


@part
def _quantise(values: _Floats, scale: np.float32, codes: npt.NDArray[np.int8]) -> None:
    """Codes of a block: value / scale rounded to the nearest integer, ties to even.

    Adding 1.5 * 2^23 leaves no bits for a fraction, so the addition rounds and the integer lies in the lowest bits.
    """
    shift = np.float32(12582912.0)
    for i in range(values.size):
        codes[i] = np.int8(np.int32((values[i] / scale + shift) - shift))


@part
def _pack(codes: npt.NDArray[np.int8], width: int, address: int) -> None:
    half = (width + 1) // 2
    if width % 2:
        codes[width] = 0
    out = octets(address, half)
    low, high = codes[:half].view(np.uint8), codes[half : 2 * half].view(np.uint8)
    for i in range(half):
        out[i] = (low[i] & np.uint8(15)) | np.uint8(high[i] << np.uint8(4))


@kernel("void(int64, int64, int64, int64, int64, int64)")
def encode_blocks(flat: int, size: int, first: int, stop: int, kind: int, payload: int) -> None:
    """Writes blocks first to stop of a vector of `size` elements to an int8 or int4 payload."""
    blocks = (size + BLOCK - 1) // BLOCK
    scales = halves(payload, blocks)
    largest_code = np.float32(127) if kind == INT8 else np.float32(7)
    work, codes = np.empty(1, np.uint32), np.zeros(BLOCK, np.int8)
    number = work.view(np.float32)
    for block in range(first, stop):
        start = block * BLOCK
        width = min(BLOCK, size - start)
        values = floats(flat + 4 * start, width)
        bits = integers(flat + 4 * start, width)
        largest = np.int32(0)
        for i in range(width):
            largest = max(largest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
        work[0] = np.uint32(largest)
        number[0] = number[0] / largest_code
        scale = (work[0] + np.uint32(0xFFFF)) >> np.uint32(16)
        if largest >= NOT_FINITE:
            scales[block] = np.uint16(0x7FC0)
            codes[:] = 0
        elif largest == 0:
            scales[block] = np.uint16(0)
            codes[:] = 0
        else:
            scale = max(np.uint32(scale), np.uint32(1))
            scales[block] = np.uint16(scale)
            work[0] = np.uint32(scale) << np.uint32(16)
            _quantise(values, number[0], codes)
        if kind == INT8:
            out = signed_bytes(payload + 2 * blocks + start, width)
            for i in range(width):
                out[i] = codes[i]
        else:
            _pack(codes, width, payload + 2 * blocks + start // 2)
