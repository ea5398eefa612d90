"""The outer step and what is published of it: both sides hold the same bits, and nothing gets lost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import DOWNLOAD_ENCODINGS, ENCODINGS, EncodingError, FloatVector
from decoupled_diloco.arrays.outer import FragmentState, apply_delta, outer_step
from tests.numerics import reference

LOSSY = [name for name in DOWNLOAD_ENCODINGS if not ENCODINGS[name].is_exact]
vectors = hnp.arrays(np.float32, 6, elements=st.floats(-100, 100, width=32))


def random_state(seed: int = 0, size: int = 1000) -> FragmentState:
    rng = np.random.default_rng(seed)
    theta, momentum, residual = ((rng.standard_normal(size) * scale).astype(np.float32) for scale in (1.0, 1e-3, 1e-6))
    return FragmentState(theta, momentum, residual)


def random_delta(seed: int, size: int = 1000) -> FloatVector:
    return (np.random.default_rng(seed).standard_normal(size) * 1e-3).astype(np.float32)


@given(theta=vectors, momentum=vectors, delta=vectors, lr=st.floats(0.01, 1.0), mu=st.floats(0.0, 0.99))
def test_nesterov_is_the_formula_to_float32_rounding(
    theta: FloatVector, momentum: FloatVector, delta: FloatVector, lr: float, mu: float
) -> None:
    state = FragmentState(theta, momentum, np.zeros(6, np.float32))
    after = outer_step(state, delta, learning_rate=lr, mu=mu, download_encoding="float32").state
    wide = (vector.astype(np.float64) for vector in (theta, momentum, delta))
    wanted_theta, wanted_momentum = reference.nesterov(*wide, lr, mu)
    np.testing.assert_allclose(after.momentum, wanted_momentum, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(after.theta, wanted_theta, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("lr", [0.4, 0.7, 1.0])
@pytest.mark.parametrize("mu", [0.0, 0.5, 0.9])
def test_many_exact_rounds_follow_the_reference(lr: float, mu: float) -> None:
    state = FragmentState.initial(random_state().theta)
    theta, momentum = state.theta.astype(np.float64), np.zeros(1000)
    for round_number in range(50):
        delta = random_delta(round_number)
        state = outer_step(state, delta, learning_rate=lr, mu=mu, download_encoding="float32").state
        theta, momentum = reference.nesterov(theta, momentum, delta.astype(np.float64), lr, mu)
    np.testing.assert_allclose(state.theta, theta, rtol=0, atol=50 * 2**-23)
    np.testing.assert_allclose(state.momentum, momentum, rtol=1e-5, atol=1e-8)
    assert not state.residual.any()


def test_an_exact_download_needs_no_delta() -> None:
    step = outer_step(random_state(), random_delta(1), learning_rate=0.7, mu=0.9, download_encoding="float32")
    assert step.delta_payload is None


@pytest.mark.parametrize("encoding", LOSSY)
def test_a_holder_of_the_previous_version_gets_the_same_bits(encoding: str) -> None:
    state = FragmentState.initial(random_state().theta)
    held = state.theta
    for round_number in range(200):
        step = outer_step(state, random_delta(round_number), learning_rate=0.6, mu=0.5, download_encoding=encoding)
        assert step.delta_payload is not None
        assert step.delta_payload.nbytes == ENCODINGS[encoding].payload_bytes(held.size)
        held = apply_delta(held, bytes(step.delta_payload), encoding)
        assert vector_digest(held) == vector_digest(step.state.theta)
        state = step.state


@pytest.mark.parametrize("encoding", LOSSY)
def test_what_a_delta_cannot_express_is_kept_and_made_up_for(encoding: str) -> None:
    """Theta + e of the lossy run stays at the exact run's Theta, so rounding never piles up."""
    exact = lossy = FragmentState.initial(random_state().theta)
    settings = {"learning_rate": 0.6, "mu": 0.5}
    for round_number in range(200):
        delta = random_delta(round_number)
        exact = outer_step(exact, delta, download_encoding="float32", **settings).state
        lossy = outer_step(lossy, delta, download_encoding=encoding, **settings).state
        np.testing.assert_array_equal(lossy.momentum, exact.momentum)
    kept = lossy.theta.astype(np.float64) + lossy.residual
    np.testing.assert_allclose(kept, exact.theta, rtol=0, atol=200 * 2**-24)
    assert np.abs(lossy.residual).max() < 2**-8 * 1e-2


@pytest.mark.parametrize("encoding", LOSSY)
@given(theta=vectors, residual=vectors, delta=vectors)
def test_the_published_step_and_the_residual_add_up_to_the_target(
    encoding: str, theta: FloatVector, residual: FloatVector, delta: FloatVector
) -> None:
    state = FragmentState(theta, np.zeros(6, np.float32), residual / np.float32(1e4))
    step = outer_step(state, delta / np.float32(1e3), learning_rate=0.5, mu=0.0, download_encoding=encoding)
    target = state.theta + state.residual - np.float32(0.5) * (delta / np.float32(1e3))
    np.testing.assert_allclose(step.state.theta.astype(np.float64) + step.state.residual, target, rtol=1e-7, atol=1e-7)


def test_switching_to_exact_downloads_pays_the_residual_out() -> None:
    state = random_state()
    step = outer_step(state, np.zeros(1000, np.float32), learning_rate=0.5, mu=0.0, download_encoding="float32")
    np.testing.assert_array_equal(step.state.theta, state.theta + state.residual)
    assert not step.state.residual.any()


@pytest.mark.parametrize("encoding", DOWNLOAD_ENCODINGS)
def test_the_old_version_is_left_as_it_was(encoding: str) -> None:
    state = random_state()
    before = [vector.copy() for vector in (state.theta, state.momentum, state.residual)]
    outer_step(state, random_delta(1), learning_rate=0.7, mu=0.9, download_encoding=encoding)
    for vector, copy in zip((state.theta, state.momentum, state.residual), before, strict=True):
        np.testing.assert_array_equal(vector, copy)
        assert not vector.flags.writeable


def test_a_callers_vector_stays_writable() -> None:
    theta = np.zeros(3, np.float32)
    FragmentState.initial(theta)
    theta[0] = 1.0


def test_vectors_that_do_not_fit_are_refused() -> None:
    zeros = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"momentum is float64 \(3,\)"):
        FragmentState(zeros, np.zeros(3), zeros)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"residual is float32 \(2,\)"):
        FragmentState(zeros, zeros, np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="theta is not contiguous"):
        FragmentState(np.zeros(6, np.float32)[::2], zeros, zeros)
    state = FragmentState.initial(zeros)
    with pytest.raises(ValueError, match=r"delta has \(4,\) elements, the fragment \(3,\)"):
        outer_step(state, np.zeros(4, np.float32), learning_rate=1.0, mu=0.0, download_encoding="bf16")
    with pytest.raises(EncodingError, match="download encoding 'int4'; use one of float32, bf16"):
        outer_step(state, zeros, learning_rate=1.0, mu=0.0, download_encoding="int4")
    with pytest.raises(EncodingError, match="3 elements in bf16 take 6 bytes, the payload has 4"):
        apply_delta(zeros, bytes(4), "bf16")
