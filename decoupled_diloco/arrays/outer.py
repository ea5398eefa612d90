"""The outer step: Nesterov momentum on the merged delta, and what is published of it.

All arithmetic is float32 and elementwise, in blocks that stay in the cache; the block size does not touch
the bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from decoupled_diloco.arrays.encoding import (
    DOWNLOAD_ENCODINGS,
    Buffer,
    Encoded,
    EncodingError,
    FloatVector,
    encoding_named,
)

BLOCK_ELEMENTS: Final = 1 << 16
"""Elements handled at a time: 256 KiB of float32, so that the temporaries of a block stay in the
second-level cache."""


@dataclass(frozen=True)
class FragmentState:
    """What the syncer keeps of one fragment: three float32 vectors of equal length, held as read-only views.

    Attributes:
        theta: the global value Theta.
        momentum: the outer momentum b.
        residual: the downlink residual e, the part of Theta's last step that the published delta could not
            express; all zeros where downloads are exact.
    """

    theta: FloatVector
    momentum: FloatVector
    residual: FloatVector

    def __post_init__(self) -> None:
        for name in ("theta", "momentum", "residual"):
            vector = getattr(self, name)
            if vector.dtype != np.float32 or vector.ndim != 1 or vector.shape != self.theta.shape:
                raise ValueError(
                    f"{name} is {vector.dtype} {vector.shape}; all three are float32 vectors as long as theta"
                )
            read_only = vector.view()
            read_only.flags.writeable = False
            object.__setattr__(self, name, read_only)

    @classmethod
    def initial(cls, theta: FloatVector) -> FragmentState:
        """The state before the first round: no momentum, no residual."""
        zeros = np.zeros(theta.size, np.float32)
        return cls(theta, zeros, zeros)


@dataclass(frozen=True)
class OuterStep:
    """The result of one outer step.

    Attributes:
        state: the new version.
        delta_payload: the step as a delta in the download encoding, for holders of exactly the previous
            version; None if the encoding is exact, in which case everybody is served Theta itself.
    """

    state: FragmentState
    delta_payload: memoryview | None


def outer_step(
    state: FragmentState, delta: FloatVector, *, learning_rate: float, mu: float, download_encoding: str
) -> OuterStep:
    """One Nesterov step, and the new version exactly as holders of the old one will reconstruct it.

    The momentum takes the merged delta, b <- mu*b + Delta, and Theta moves by -lr*(Delta + mu*b).
    With an exact encoding Theta takes the target T = Theta_v + e - lr*(Delta + mu*b) itself and the
    residual is zero. Otherwise d = encode(T - Theta_v), Theta_{v+1} = fl32(Theta_v + d) and e = T -
    Theta_{v+1}: both sides hold the same bits, and what the delta could not express is not lost but part of
    the next step.

    Args:
        state: version v; left untouched.
        delta: merged delta of the round.
        learning_rate: outer learning rate, above 0.
        mu: momentum coefficient, 0 to below 1.
        download_encoding: one of `DOWNLOAD_ENCODINGS`.

    Raises:
        EncodingError: not such an encoding.
        ValueError: `delta` has another length than the fragment.
    """
    if download_encoding not in DOWNLOAD_ENCODINGS:
        raise EncodingError(f"download encoding {download_encoding!r}; use one of {', '.join(DOWNLOAD_ENCODINGS)}")
    encoding = encoding_named(download_encoding)
    if delta.shape != state.theta.shape:
        raise ValueError(f"delta has {delta.shape} elements, the fragment {state.theta.shape}")
    momentum = np.empty_like(state.momentum)
    target = np.empty_like(state.theta)
    for block in _blocks(target.size):
        update = _nesterov_update(state.momentum[block], delta[block], learning_rate, mu, out=momentum[block])
        np.add(state.theta[block], state.residual[block], out=target[block])
        target[block] -= update
    if encoding.is_exact:
        residual = state.residual if not state.residual.any() else np.zeros(target.size, np.float32)
        return OuterStep(FragmentState(target, momentum, residual), None)
    payload = encoding.encode(target - state.theta)
    theta = apply_delta(state.theta, payload, download_encoding)
    residual = np.subtract(target, theta, out=target)
    return OuterStep(FragmentState(theta, momentum, residual), payload)


def apply_delta(base: FloatVector, payload: Buffer, download_encoding: str) -> FloatVector:
    """fl32(base + d): the next version, bit for bit the syncer's, for a holder of exactly the version before.

    Plain IEEE additions on the host, so that no compiler can fuse or flush them on one side only.

    Raises:
        EncodingError: the payload has another number of elements than `base`.
    """
    theta = Encoded(payload, download_encoding, base.size).decode()
    return np.add(base, theta, out=theta)


def _nesterov_update(
    momentum: FloatVector, delta: FloatVector, learning_rate: float, mu: float, *, out: FloatVector
) -> FloatVector:
    """Writes mu*b + Delta to `out` and returns lr*(Delta + mu*out), rounded at every operation."""
    np.multiply(momentum, np.float32(mu), out=out)
    out += delta
    update = np.multiply(out, np.float32(mu))
    update += delta
    update *= np.float32(learning_rate)
    return update


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK_ELEMENTS, size)) for start in range(0, size, BLOCK_ELEMENTS))
