"""Digests that name values: of a version, and of everything the syncer keeps of a fragment."""

from __future__ import annotations

import numpy as np
import xxhash

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.outer import FragmentState


def vector_digest(flat: FloatVector) -> str:
    """xxh3_128 of a vector's little-endian bytes, 32 hexadecimal digits. This is the digest of a version.

    Raises:
        ValueError: not a contiguous float32 vector.
    """
    return str(xxhash.xxh3_128_hexdigest(_bytes_of(flat)))


def state_digest(state: FragmentState) -> str:
    """xxh3_128 over theta, momentum and residual, in this order: all that one version leaves to the next."""
    digest = xxhash.xxh3_128()
    for vector in (state.theta, state.momentum, state.residual):
        digest.update(_bytes_of(vector))
    return str(digest.hexdigest())


def _bytes_of(flat: FloatVector) -> memoryview:
    if flat.ndim != 1 or flat.dtype != np.float32 or not flat.flags.c_contiguous:
        raise ValueError(f"a digest is taken of a contiguous float32 vector, not of {flat.dtype} {flat.shape}")
    return flat.view(np.uint8).data
