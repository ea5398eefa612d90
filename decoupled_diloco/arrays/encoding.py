"""Encodings: how a flat float32 vector becomes payload bytes, little-endian on every host.

Each encoding is one entry of `ENCODINGS`; nothing else in the project asks for a name. An encoding with
scales per block is another entry: its decoder learns the number of elements from `out`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

FloatVector: TypeAlias = npt.NDArray[np.float32]
Buffer: TypeAlias = bytes | bytearray | memoryview | npt.NDArray[np.uint8]


class EncodingError(ValueError):
    """A payload does not fit its encoding, or there is no encoding of that name."""


class Encoding(Protocol):
    """One way to write float32 elements.

    Attributes:
        name: as in run files and on the wire.
        bits_per_element: average on the wire, for the bandwidth formula; without scales and padding.
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

    def view(self, payload: Buffer) -> npt.NDArray[np.generic]:
        """The elements as an array to read block by block, sharing the payload's memory where possible.

        Raises:
            EncodingError: the payload does not hold a whole number of elements.
        """
        ...

    def decode(self, payload: Buffer, out: FloatVector | None = None) -> FloatVector:
        """The elements as float32: into `out` if given (it must have the right size), else into a new array.

        Raises:
            EncodingError: the payload does not hold the elements of `out`, or not a whole number of elements.
        """
        ...


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
        if flat.ndim != 1 or not flat.flags.c_contiguous or flat.dtype != np.float32:
            raise EncodingError(f"{self.name} encodes a contiguous float32 vector, not {flat.dtype} {flat.shape}")
        return _little_endian(flat.astype(self._dtype, copy=False)).view(np.uint8).data

    def view(self, payload: Buffer) -> npt.NDArray[np.generic]:
        raw = np.frombuffer(payload, np.uint8)
        if raw.size % self._dtype.itemsize:
            raise EncodingError(
                f"a {self.name} payload holds {self._dtype.itemsize} bytes per element, not {raw.size} in all"
            )
        return _little_endian(raw.view(self._dtype))

    def decode(self, payload: Buffer, out: FloatVector | None = None) -> FloatVector:
        elements = self.view(payload)
        if out is None:
            return elements.astype(np.float32)
        if out.shape != elements.shape:
            raise EncodingError(f"{self.name} payload of {elements.size} elements for a vector of {out.size}")
        np.copyto(out, elements, casting="unsafe")
        return out


def _little_endian(array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Swaps bytes on a big-endian host; on all others the array itself."""
    return array if sys.byteorder == "little" else array.byteswap()


ENCODINGS: Final[Mapping[str, Encoding]] = MappingProxyType(
    {entry.name: entry for entry in (_PlainFloat("float32", np.float32), _PlainFloat("bf16", ml_dtypes.bfloat16))}
)
"""Every encoding by name."""


def encoding_named(name: str) -> Encoding:
    """The encoding called `name`.

    Raises:
        EncodingError: there is none; the message lists those that exist.
    """
    try:
        return ENCODINGS[name]
    except KeyError:
        raise EncodingError(f"unknown encoding {name!r}; use one of {', '.join(ENCODINGS)}") from None
