"""What each encoding takes on the wire, as a number, for whoever plans bandwidth without arrays.

`arrays.encoding` implements them; `tests/unit/test_bandwidth.py` holds the numbers to the sizes of its payloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

SCALE_BITS: Final = 16
"""A block's scale in int8 and int4: one bf16."""

BLOCK_ELEMENTS: Final = 128
"""Values that share a scale."""

ENCODING_BITS: Final[Mapping[str, float]] = MappingProxyType(
    {
        "float32": 32.0,
        "bf16": 16.0,
        "int8": 8 + SCALE_BITS / BLOCK_ELEMENTS,
        "int4": 4 + SCALE_BITS / BLOCK_ELEMENTS,
    }
)
"""Bits per parameter on the wire, block scales included, by the name that run files use."""
