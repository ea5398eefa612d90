"""The outer step: Nesterov momentum on the merged delta, and what is published of it.

All arithmetic is float32 and elementwise, each operation rounded by itself: one pass over the fragment, in any number
of threads, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.encoding import (
    BLOCK_ELEMENTS,
    DOWNLOAD_ENCODINGS,
    Buffer,
    Encoded,
    EncodingError,
    FloatVector,
    address_of,
    encoding_named,
    kernels,
)
from decoupled_diloco.arrays.merge import Combined
from decoupled_diloco.arrays.recycled import RECYCLER
from decoupled_diloco.arrays.stripes import CALLING_THREAD, LoopThreads


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
            if not vector.flags.c_contiguous:
                raise ValueError(f"{name} is not contiguous; make a copy of the vector")
            read_only = vector.view()
            read_only.flags.writeable = False
            object.__setattr__(self, name, read_only)

    @classmethod
    def initial(cls, theta: FloatVector) -> FragmentState:
        """The state before the first round: no momentum, no residual."""
        zeros = RECYCLER.take(4 * theta.size).view(np.float32)
        zeros.fill(0)
        return cls(theta, zeros, zeros)


@dataclass(frozen=True)
class OuterStep:
    """The result of one outer step.

    Attributes:
        state: the new version.
        delta_payload: the step as a delta in the download encoding, for holders of exactly the previous
            version; None if the encoding is exact, in which case everybody is served Theta itself.
        finite: whether every value of the new version is.
    """

    state: FragmentState
    delta_payload: memoryview | None
    finite: bool


def outer_step(
    state: FragmentState,
    delta: FloatVector,
    *,
    learning_rate: float,
    mu: float,
    download_encoding: str,
    threads: LoopThreads = CALLING_THREAD,
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
        threads: who computes.

    Raises:
        EncodingError: not such an encoding.
        ValueError: `delta` has another length than the fragment.
    """
    if delta.dtype != np.float32 or not delta.flags.c_contiguous:
        raise ValueError(f"delta is {delta.dtype}, contiguous: {delta.flags.c_contiguous}; a contiguous float32 vector")
    stops, factors = np.array([delta.size], np.int64), np.ones(1)
    hyper = (learning_rate, mu, download_encoding)
    return _step(state, delta, None, stops, factors, hyper, threads)


def merged_outer_step(
    state: FragmentState,
    combined: Combined,
    stops: npt.NDArray[np.int64],
    *,
    learning_rate: float,
    mu: float,
    download_encoding: str,
    threads: LoopThreads = CALLING_THREAD,
) -> tuple[FloatVector, OuterStep]:
    """The last multiplication of a merge and `outer_step` in one pass; the same bits as one after the other.

    Args:
        state: version v; left untouched.
        combined: what `merge.combine` gave; its vector becomes the merged delta.
        stops: where each segment ends.
        learning_rate: see `outer_step`.
        mu: see `outer_step`.
        download_encoding: see `outer_step`.
        threads: who computes.

    Returns:
        The merged delta, and the step.
    """
    hyper = (learning_rate, mu, download_encoding)
    delta = combined.unscaled
    return delta, _step(state, delta, delta, stops, combined.factors, hyper, threads)


def _step(
    state: FragmentState,
    source: FloatVector,
    delta: FloatVector | None,
    stops: npt.NDArray[np.int64],
    factors: npt.NDArray[np.float64],
    hyper: tuple[float, float, str],
    threads: LoopThreads,
) -> OuterStep:
    learning_rate, mu, download_encoding = hyper
    if download_encoding not in DOWNLOAD_ENCODINGS:
        raise EncodingError(f"download encoding {download_encoding!r}; use one of {', '.join(DOWNLOAD_ENCODINGS)}")
    if source.shape != state.theta.shape:
        raise ValueError(f"delta has {source.shape} elements, the fragment {state.theta.shape}")
    size, is_exact = source.size, encoding_named(download_encoding).is_exact
    theta, momentum = (RECYCLER.take(4 * size).view(np.float32) for _ in range(2))
    residual = payload = None
    if not is_exact:
        residual, payload = RECYCLER.take(4 * size).view(np.float32), RECYCLER.take(2 * size)
    inputs = (state.theta, state.momentum, state.residual, source)
    outputs = (theta, momentum, residual, payload, delta)
    sources = np.array([address_of(vector) for vector in inputs], np.int64)
    results = np.array([0 if vector is None else address_of(vector) for vector in outputs], np.int64)
    loops = kernels()

    def work(first: int, last: int) -> int:
        largest: int = loops.outer_step(
            sources, results, np.float32(learning_rate), np.float32(mu), stops, factors, first, last
        )
        return largest

    largest = max(threads.run(work, size, step=loops.ROW))
    if residual is None:
        residual = state.residual if not state.residual.any() else np.zeros(size, np.float32)
    return OuterStep(
        FragmentState(theta, momentum, residual),
        payload.data if payload is not None else None,
        largest < loops.NOT_FINITE,
    )


def apply_delta(
    base: FloatVector, payload: Buffer, download_encoding: str, threads: LoopThreads = CALLING_THREAD
) -> FloatVector:
    """fl32(base + d): the next version, bit for bit the syncer's, for a holder of exactly the version before.

    Plain IEEE additions on the host, so that no compiler can fuse or flush them on one side only.

    Raises:
        EncodingError: the payload has another number of elements than `base`.
        ValueError: `base` is not a contiguous float32 vector.
    """
    if base.dtype != np.float32 or base.ndim != 1 or not base.flags.c_contiguous:
        raise ValueError(f"a delta is added to a contiguous float32 vector, not to {base.dtype} {base.shape}")
    delta = Encoded(payload, download_encoding, base.size)
    theta, kind = np.empty(base.size, np.float32), encoding_named(delta.encoding).kind
    addresses = address_of(base), address_of(payload), address_of(theta)
    loops = kernels()

    def work(first: int, last: int) -> None:
        loops.add_decoded(addresses[0], addresses[1], kind, theta.size, first, last, addresses[2])

    threads.run(work, theta.size, step=BLOCK_ELEMENTS)
    return theta
