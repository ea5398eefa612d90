"""Encodings: how a flat float32 vector becomes payload bytes, little-endian like every host that we know JAX on.

Each encoding is one entry of `ENCODINGS`. A payload does not say how many elements it has: with scales per block
several numbers of elements may have payloads of one size, so who decodes brings the number along (`Encoded`, `out`).

int8 and int4 write blocks of `BLOCK_ELEMENTS` values, each as a small integer times a scale that they share:

- All scales come first, one bf16 per block, then the codes of all blocks.
- A block's scale is its largest magnitude over 127 (int8) or 7 (int4), rounded up to bf16, so that every code fits;
  0 for a block of zeros, NaN for a block with a value that is not finite. Codes are rounded to nearest, ties to even.
- int8 has one byte per value. int4 has two values per byte, in two's complement: with r values in a block (128, in the
  last one perhaps fewer) and h = ceil(r / 2), byte j holds value j in its low half and value j + h in its high one,
  which is 0 where there is no such value.

So |x - decoded| <= scale * (1/2 + 2^-18) for magnitudes up to 2^127, denormal ones included; the small term is the one
float32 rounding of x / scale, decoding itself is exact.

Payloads that no encoder writes (codes of -128 or -8, scales that are negative, infinite or NaN) are decoded as written;
`merge.examine` judges what comes out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from decoupled_diloco.core.encoding_bits import ENCODING_BITS

FloatVector: TypeAlias = npt.NDArray[np.float32]
Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


BLOCK_ELEMENTS: Final = 128
"""Values that share a scale in int8 and int4."""

FLOAT32: Final = 0
BF16: Final = 1
INT8: Final = 2
INT4: Final = 3

if sys.byteorder != "little":
    raise ImportError("fragments are computed with on little-endian hosts only")


class EncodingError(ValueError):
    """A payload does not fit its encoding, or there is no encoding of that name."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """One way to write float32 elements.

    bf16 rounds to nearest, ties to even; a value beyond its range becomes infinite, which none within the safe range of
    `merge.examine` is. NaN stays NaN.

    Attributes:
        name: as in run files and on the wire.
        kind: which one it is, for `kernels`.
        code_bits: of one element, without its share of a scale.
        has_scales: whether a bf16 scale belongs to every block of `BLOCK_ELEMENTS`.
    """

    name: str
    kind: int
    code_bits: int
    has_scales: bool = False

    @property
    def bits_per_element(self) -> float:
        """Average on the wire, scales included, for the bandwidth formula."""
        return ENCODING_BITS[self.name]

    @property
    def is_exact(self) -> bool:
        """Whether what is decoded has the bits of what was encoded."""
        return self.code_bits == 32

    def payload_bytes(self, element_count: int) -> int:
        """Size in bytes of the payload of `element_count` elements."""
        scale_bytes = 2 * block_count(element_count) if self.has_scales else 0
        return scale_bytes + -(-element_count * self.code_bits // 8)

    def encode(self, flat: FloatVector) -> memoryview:
        """The payload of a contiguous vector; in float32 it shares memory with `flat`.

        Raises:
            EncodingError: not a contiguous float32 vector.
        """
        if flat.ndim != 1 or not flat.flags.c_contiguous or flat.dtype != np.float32:
            raise EncodingError(f"{self.name} encodes a contiguous float32 vector, not {flat.dtype} {flat.shape}")
        if self.is_exact:
            return flat.view(np.uint8).data
        payload = np.empty(self.payload_bytes(flat.size), np.uint8)
        if self.has_scales:
            kernels().encode_blocks(
                address_of(flat), flat.size, 0, block_count(flat.size), self.kind, address_of(payload)
            )
        else:
            kernels().encode_bf16(address_of(flat), 0, flat.size, address_of(payload))
        return payload.data

    def decode(self, payload: Buffer, out: FloatVector) -> FloatVector:
        """Writes the elements to the contiguous float32 vector `out`, and returns it.

        Raises:
            EncodingError: the payload does not have the size that the elements of `out` take.
        """
        _check_size(self, payload, out.size)
        if out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
            raise EncodingError(f"{self.name} is decoded to a contiguous float32 vector that can be written")
        kernels().decode(address_of(payload), self.kind, out.size, 0, out.size, address_of(out))
        return out


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


def block_count(element_count: int) -> int:
    """Blocks that so many elements fill, the last one perhaps in part."""
    return -(-element_count // BLOCK_ELEMENTS)


def address_of(buffer: Buffer | npt.NDArray[Any]) -> int:
    """Where contiguous memory begins. Keep `buffer` until the address is used no more."""
    array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    return int(array.ctypes.data)


def kernels() -> ModuleType:
    """The compiled loops, loaded at the first call: seconds without a cache, a second with one.

    Who only names encodings, as the start of a learner and syncerctl do, does not pay for the compiler.
    """
    return import_module("decoupled_diloco.arrays.kernels")


def _check_size(encoding: Encoding, payload: Buffer, element_count: int) -> None:
    due = encoding.payload_bytes(element_count)
    size = payload.nbytes if isinstance(payload, np.ndarray) else len(payload)
    if size != due:
        raise EncodingError(f"{element_count} elements in {encoding.name} take {due} bytes, the payload has {size}")


def float32_elements(payload: Buffer) -> FloatVector:
    """The elements of a float32 payload, sharing its memory.

    Raises:
        EncodingError: not a whole number of elements.
    """
    raw = np.frombuffer(payload, np.uint8)
    if raw.size % 4:
        raise EncodingError(f"a float32 payload holds 4 bytes per element, not {raw.size} in all")
    return raw.view(np.float32)


ENCODINGS: Final[Mapping[str, Encoding]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Encoding("float32", FLOAT32, 32),
            Encoding("bf16", BF16, 16),
            Encoding("int8", INT8, 8, has_scales=True),
            Encoding("int4", INT4, 4, has_scales=True),
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
