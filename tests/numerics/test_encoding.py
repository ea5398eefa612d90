import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from decoupled_diloco.arrays.digest import state_digest, vector_digest
from decoupled_diloco.arrays.encoding import ENCODINGS, EncodingError, FloatVector, encoding_named
from decoupled_diloco.arrays.outer import FragmentState

vectors = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False))


def nearest_even_bf16(value: np.float32) -> int:
    """Round to nearest, ties to even, by integer arithmetic on the bits."""
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


@pytest.mark.parametrize("name", ENCODINGS)
@given(flat=vectors)
def test_encoding_twice_changes_nothing_more(name: str, flat: FloatVector) -> None:
    encoding = encoding_named(name)
    payload = encoding.encode(flat)
    assert payload.nbytes == encoding.payload_bytes(flat.size)
    decoded = encoding.decode(payload)
    assert decoded.dtype == np.float32
    assert bytes(encoding.encode(decoded)) == bytes(payload)
    assert not encoding.is_exact or decoded.tobytes() == flat.tobytes()


@given(flat=vectors)
def test_float32_is_little_endian_ieee(flat: FloatVector) -> None:
    assert bytes(encoding_named("float32").encode(flat)) == flat.astype("<f4").tobytes()


@given(flat=vectors)
def test_bf16_rounds_to_nearest_even(flat: FloatVector) -> None:
    payload = np.frombuffer(encoding_named("bf16").encode(flat), "<u2")
    assert payload.tolist() == [nearest_even_bf16(value) for value in flat]


def test_bf16_ties_go_to_the_even_neighbour() -> None:
    flat = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], np.float32)
    assert encoding_named("bf16").decode(encoding_named("bf16").encode(flat)).tolist() == [1.0, 1 + 2**-6, -1.0]


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_not_finite_stays_so(name: str) -> None:
    flat = np.array([np.nan, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(encoding_named(name).decode(encoding_named(name).encode(flat)), flat)


@pytest.mark.parametrize("name", ENCODINGS)
def test_decoding_fills_a_given_vector(name: str) -> None:
    encoding = encoding_named(name)
    flat = np.arange(6, dtype=np.float32)
    received = bytearray(encoding.encode(flat))
    out = np.zeros(6, np.float32)
    assert encoding.decode(memoryview(received), out=out) is out
    np.testing.assert_array_equal(out, flat)
    received[:] = bytes(len(received))
    np.testing.assert_array_equal(out, flat)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_view_reads_the_payload_in_place(name: str) -> None:
    encoding = encoding_named(name)
    received = bytearray(encoding.payload_bytes(3))
    view = encoding.view(received)
    received[:] = encoding.encode(np.array([1, 2, 3], np.float32))
    assert view.astype(np.float32).tolist() == [1, 2, 3]


def test_payloads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(EncodingError, match="4 bytes per element, not 7 in all"):
        encoding_named("float32").decode(bytes(7))
    with pytest.raises(EncodingError, match="4 elements for a vector of 3"):
        encoding_named("bf16").decode(bytes(8), out=np.zeros(3, np.float32))
    with pytest.raises(EncodingError, match=r"float64 \(2,\)"):
        encoding_named("bf16").encode(np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(EncodingError, match="unknown encoding 'int2'; use one of float32, bf16"):
        encoding_named("int2")


def test_bits_per_element_agree_with_payload_sizes() -> None:
    for encoding in ENCODINGS.values():
        assert encoding.payload_bytes(1_000_000) == encoding.bits_per_element / 8 * 1_000_000


def test_a_version_digest_is_xxh3_of_the_bytes() -> None:
    flat = np.linspace(-1, 1, 1000, dtype=np.float32)
    assert vector_digest(flat) == xxhash.xxh3_128_hexdigest(flat.tobytes())
    assert vector_digest(np.zeros(1, np.float32)) != vector_digest(np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="float32 vector"):
        vector_digest(flat[::2])


@pytest.mark.parametrize("name", ["theta", "momentum", "residual"])
def test_a_state_digest_covers_every_part(name: str) -> None:
    parts = {part: np.zeros(3, np.float32) for part in ("theta", "momentum", "residual")}
    before = state_digest(FragmentState(**parts))
    changed = parts | {name: np.array([0, 0, 1e-30], np.float32)}
    assert state_digest(FragmentState(**changed)) != before
    assert state_digest(FragmentState(**{part: vector.copy() for part, vector in parts.items()})) == before
