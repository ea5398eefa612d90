"""Encodings: how a flat float32 vector becomes payload bytes, little-endian on every host.

Each encoding is one entry of `ENCODINGS`. A payload does not say how many elements it has: with scales per block
several numbers of elements may have payloads of one size, so who decodes brings the number along (`Encoded`, `out`).

int8 and int4 write blocks of `BLOCK_ELEMENTS` values, each as a small integer times a scale that they share:

- All scales come first, one bf16 per block, then the codes of all blocks.
- A block's scale is its largest magnitude over 127 (int8) or 7 (int4), rounded up to bf16, so that every code fits;
  0 for a block of zeros, NaN for a block with a value that is not finite. Codes are rounded to nearest, ties to even.
- int8 has one byte per value. int4 has two values per byte, in two's complement: with r values in a block (128, in the
  last one perhaps fewer) and h = ceil(r / 2), byte j holds value j in its low half and value j + h in its high one,
  which is 0 where there is no such value.

So |x - decoded| <= scale * (1/2 + 2^-18) for magnitudes up to 2^127; the small term is the one float32 rounding of
x / scale, decoding itself is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

FloatVector: TypeAlias = npt.NDArray[np.float32]
Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


BLOCK_ELEMENTS: Final = 128
"""Values that share a scale in int8 and int4."""


class EncodingError(ValueError):
    """A payload does not fit its encoding, or there is no encoding of that name."""


class Encoding(Protocol):
    """One way to write float32 elements.

    Attributes:
        name: as in run files and on the wire.
        bits_per_element: average on the wire, scales included, for the bandwidth formula.
        is_exact: whether decode(encode(x)) has the bits of x.
    """

    @property
    def name(self) -> str: ...  # noqa: D102 (attributes, documented above)
    @property
    def bits_per_element(self) -> float: ...  # noqa: D102
    @property
    def is_exact(self) -> bool: ...  # noqa: D102

    def payload_bytes(self, element_count: int) -> int:
        """Size in bytes of the payload of `element_count` elements."""
        ...

    def encode(self, flat: FloatVector) -> memoryview:
        """The payload of a contiguous vector, as a view of bytes; may share memory with `flat`."""
        ...

    def decode(self, payload: Buffer, out: FloatVector) -> FloatVector:
        """Writes the elements to the contiguous float32 vector `out`, and returns it.

        Raises:
            EncodingError: the payload does not have the size that the elements of `out` take.
        """
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload with what one needs to read it. Shares the payload's memory, and is only read.

    Attributes:
        payload: the bytes.
        encoding: a name of `ENCODINGS`.
        element_count: how many values it holds.

    Raises:
        EncodingError: no such encoding, or the payload has not the size that so many elements take.
    """

    payload: Buffer
    encoding: str
    element_count: int

    def __post_init__(self) -> None:
        _check_size(encoding_named(self.encoding), self.payload, self.element_count)

    def decode(self) -> FloatVector:
        """The elements in a new vector."""
        return encoding_named(self.encoding).decode(self.payload, np.empty(self.element_count, np.float32))


class _PlainFloat:
    """Elements of one floating-point type side by side; encoding rounds to nearest, ties to even.

    NaN stays NaN. A float32 beyond the type's range becomes infinite; a vector within the safe range of
    `merge.examine` never is.
    """

    def __init__(self, name: str, dtype: npt.DTypeLike) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self.bits_per_element = 8.0 * self._dtype.itemsize
        self.is_exact = self._dtype == np.float32

    def payload_bytes(self, element_count: int) -> int:
        return element_count * self._dtype.itemsize

    def encode(self, flat: FloatVector) -> memoryview:
        _check_vector(self.name, flat)
        return _little_endian(flat.astype(self._dtype, copy=False)).view(np.uint8).data

    def decode(self, payload: Buffer, out: FloatVector) -> FloatVector:
        _check_size(self, payload, out.size)
        np.copyto(out, _little_endian(np.frombuffer(payload, self._dtype)), casting="unsafe")
        return out


class _BlockInteger:
    """Blocks of integers that share a scale, as the module's docstring says."""

    is_exact = False

    def __init__(self, name: str, code_bits: int) -> None:
        self.name = name
        self._code_bits = code_bits
        self._code_max = (1 << (code_bits - 1)) - 1
        self.bits_per_element = code_bits + 16 / BLOCK_ELEMENTS

    def payload_bytes(self, element_count: int) -> int:
        return 2 * _block_count(element_count) + -(-element_count * self._code_bits // 8)

    def encode(self, flat: FloatVector) -> memoryview:
        _check_vector(self.name, flat)
        blocks = np.zeros((_block_count(flat.size), BLOCK_ELEMENTS), np.float32)
        blocks.reshape(-1)[: flat.size] = flat
        scales = self._scales(blocks)
        divisors = scales.astype(np.float32)[:, None]
        divisors[~(divisors > 0)] = np.inf  # codes of 0
        with np.errstate(invalid="ignore"):
            quotients = np.rint(blocks / divisors)
        quotients[~np.isfinite(quotients)] = 0
        codes = quotients.astype(np.int8).reshape(-1)[: flat.size]
        if self._code_bits == 4:
            codes = _packed(codes)
        return np.concatenate([_little_endian(scales).view(np.uint8), codes.view(np.uint8)]).data

    def decode(self, payload: Buffer, out: FloatVector) -> FloatVector:
        _check_size(self, payload, out.size)
        block_count = _block_count(out.size)
        raw = np.frombuffer(payload, np.uint8)
        scales = _little_endian(raw[: 2 * block_count].view(ml_dtypes.bfloat16)).astype(np.float32)
        codes = raw[2 * block_count :]
        values = _unpacked(codes, out.size) if self._code_bits == 4 else codes.view(np.int8)
        with np.errstate(invalid="ignore", over="ignore"):
            np.multiply(values, np.repeat(scales, BLOCK_ELEMENTS)[: out.size], out=out)
        return out

    def _scales(self, blocks: npt.NDArray[np.float32]) -> npt.NDArray[ml_dtypes.bfloat16]:
        largest = np.abs(blocks).max(axis=1)  # NaN where a value is
        bits = (largest / np.float32(self._code_max)).view(np.uint32)
        rounded_up = ((bits + 0xFFFF) >> 16).astype(np.uint16)
        rounded_up[(largest > 0) & (rounded_up == 0)] = 1
        scales = rounded_up.view(ml_dtypes.bfloat16)
        scales[~np.isfinite(largest)] = np.nan
        return np.asarray(scales)


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


def _block_count(element_count: int) -> int:
    return -(-element_count // BLOCK_ELEMENTS)


def _check_vector(name: str, flat: FloatVector) -> None:
    if flat.ndim != 1 or not flat.flags.c_contiguous or flat.dtype != np.float32:
        raise EncodingError(f"{name} encodes a contiguous float32 vector, not {flat.dtype} {flat.shape}")


def _check_size(encoding: Encoding, payload: Buffer, element_count: int) -> None:
    due = encoding.payload_bytes(element_count)
    size = payload.nbytes if isinstance(payload, np.ndarray) else len(payload)
    if size != due:
        raise EncodingError(f"{element_count} elements in {encoding.name} take {due} bytes, the payload has {size}")


def float32_elements(payload: Buffer) -> FloatVector:
    """The elements of a float32 payload, sharing its memory (on little-endian hosts).

    Raises:
        EncodingError: not a whole number of elements.
    """
    raw = np.frombuffer(payload, np.uint8)
    if raw.size % 4:
        raise EncodingError(f"a float32 payload holds 4 bytes per element, not {raw.size} in all")
    elements = raw.view(np.float32)
    return elements if sys.byteorder == "little" else elements.byteswap()


def _little_endian(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Swaps bytes on a big-endian host; on all others the array itself."""
    return array if sys.byteorder == "little" else array.byteswap()


ENCODINGS: Final[Mapping[str, Encoding]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            _PlainFloat("float32", np.float32),
            _PlainFloat("bf16", ml_dtypes.bfloat16),
            _BlockInteger("int8", 8),
            _BlockInteger("int4", 4),
        )
    }
)
"""Every encoding by name: what contributions may be written in."""

DOWNLOAD_ENCODINGS: Final = ("float32", "bf16")
"""What published versions may be written in: a whole one in float32, a step from the version before in bf16, too."""


def encoding_named(name: str) -> Encoding:
    """The encoding called `name`.

    Raises:
        EncodingError: there is none; the message lists those that exist.
    """
    try:
        return ENCODINGS[name]
    except KeyError:
        raise EncodingError(f"unknown encoding {name!r}; use one of {', '.join(ENCODINGS)}") from None
