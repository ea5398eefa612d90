from fractions import Fraction

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import decoupled_diloco.arrays.kernels  # noqa: F401 (compiled before hypothesis takes the time)
from decoupled_diloco.arrays.digest import state_digest, vector_digest
from decoupled_diloco.arrays.encoding import (
    BLOCK_ELEMENTS,
    DOWNLOAD_ENCODINGS,
    ENCODINGS,
    Encoded,
    EncodingError,
    FloatVector,
    encoding_named,
    float32_elements,
)
from decoupled_diloco.arrays.merge import examine
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.wire.enums import encoding_from_wire, encoding_to_wire

vectors = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False))
BLOCKWISE = {"int8": 127, "int4": 7}
PLAIN = [name for name in ENCODINGS if name not in BLOCKWISE]
LARGEST = 2.0**127
magnitudes = st.sampled_from([LARGEST, 1e30, 1.0, 1e-3, 1e-30, 2.0**-126, 2.0**-133, 2.0**-140, 2.0**-149, 0.0])


def nearest_even_bf16(value: np.float32) -> int:
    """Round to nearest, ties to even, by integer arithmetic on the bits."""
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def decoded(name: str, flat: FloatVector) -> FloatVector:
    return Encoded(encoding_named(name).encode(flat), name, flat.size).decode()


@pytest.mark.parametrize("name", PLAIN)
@given(flat=vectors)
def test_encoding_twice_changes_nothing_more(name: str, flat: FloatVector) -> None:
    encoding = encoding_named(name)
    payload = encoding.encode(flat)
    assert payload.nbytes == encoding.payload_bytes(flat.size)
    values = decoded(name, flat)
    assert values.dtype == np.float32
    assert bytes(encoding.encode(values)) == bytes(payload)
    assert not encoding.is_exact or values.tobytes() == flat.tobytes()


@given(flat=vectors)
def test_float32_is_little_endian_ieee(flat: FloatVector) -> None:
    assert bytes(encoding_named("float32").encode(flat)) == flat.astype("<f4").tobytes()


@given(flat=vectors)
def test_bf16_rounds_to_nearest_even(flat: FloatVector) -> None:
    payload = np.frombuffer(encoding_named("bf16").encode(flat), "<u2")
    assert payload.tolist() == [nearest_even_bf16(value) for value in flat]


def test_bf16_ties_go_to_the_even_neighbour() -> None:
    flat = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], np.float32)
    assert decoded("bf16", flat).tolist() == [1.0, 1 + 2**-6, -1.0]


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_finite_stays_so(name: str) -> None:
    flat = np.array([np.nan, np.inf, -np.inf], np.float32)
    np.testing.assert_array_equal(decoded(name, flat), flat)


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_shows_in_its_whole_block(name: str, value: float) -> None:
    flat = np.ones(300, np.float32)
    flat[150] = value
    assert np.isnan(decoded(name, flat)).tolist() == [128 <= index < 256 for index in range(300)]


def block_of(seed: int, size: int, magnitude: float) -> FloatVector:
    """Values of both signs up to a magnitude, some of them zero or the magnitude itself."""
    rng = np.random.default_rng(seed)
    flat = (rng.uniform(-1, 1, size) * magnitude).astype(np.float32)
    flat[rng.uniform(size=size) < 0.1] = 0
    flat[rng.integers(size)] = magnitude
    return flat


@pytest.mark.parametrize("name", BLOCKWISE)
@given(
    size=st.integers(1, 1000),
    seed=st.integers(0, 2**32 - 1),
    scales=st.lists(magnitudes, min_size=8, max_size=8),
)
def test_a_decoded_value_is_off_by_half_a_scale_at_most(name: str, size: int, seed: int, scales: list[float]) -> None:
    flat = np.concatenate([block_of(seed, BLOCK_ELEMENTS, scale) for scale in scales])[:size]
    payload = encoding_named(name).encode(flat)
    assert payload.nbytes == encoding_named(name).payload_bytes(size)
    values = Encoded(payload, name, size).decode()
    for index, start in enumerate(range(0, size, BLOCK_ELEMENTS)):
        block = flat[start : start + BLOCK_ELEMENTS].astype(np.float64)
        scale = bf16_value(payload, index)
        assert scale * BLOCKWISE[name] >= np.abs(block).max() * (1 - 2**-16)
        assert scale <= np.abs(block).max() / BLOCKWISE[name] * (1 + 2**-7) + 2**-133  # the smallest bf16
        assert np.abs(values[start : start + block.size] - block).max() <= scale * (0.5 + 2**-18)


TABLE = {"int8": 0.004, "int4": 0.072}
"""The bounds of docs/encodings.md, as shares of the largest magnitude of a block; 2^-134 comes on top."""


@pytest.mark.parametrize("name", TABLE)
@given(size=st.integers(1, BLOCK_ELEMENTS), seed=st.integers(0, 2**32 - 1), exponent=st.floats(-150, 127))
def test_a_decoded_value_is_off_by_no_more_than_the_documented_share_of_its_block(
    name: str, size: int, seed: int, exponent: float
) -> None:
    flat = block_of(seed, size, 2.0**exponent)
    off = np.abs(decoded(name, flat).astype(np.float64) - flat)
    assert off.max() <= TABLE[name] * np.abs(flat).max().astype(np.float64) + 2.0**-134


@given(seed=st.integers(0, 2**32 - 1), exponent=st.floats(-150, 127))
def test_a_bf16_value_is_off_by_no_more_than_documented(seed: int, exponent: float) -> None:
    flat = block_of(seed, BLOCK_ELEMENTS, 2.0**exponent)
    magnitudes = np.abs(flat.astype(np.float64))
    off = np.abs(decoded("bf16", flat).astype(np.float64) - flat)
    assert np.all(off <= np.where(magnitudes < 2.0**-126, 2.0**-134, magnitudes * 2.0**-8))


def written(name: str, scale: float, codes: list[int]) -> bytes:
    """A payload of one block with a scale and codes of any kind."""
    bits = int(np.float32(scale).view(np.uint32)) >> 16
    numbers = np.array(codes, np.int8)
    if name == "int8":
        return bits.to_bytes(2, "little") + numbers.tobytes()
    half = (len(codes) + 1) // 2
    pairs = [*codes, *[5] * (2 * half - len(codes))]  # the half byte that stands for no value holds something, too
    return bits.to_bytes(2, "little") + bytes((pairs[j] & 15) | (pairs[j + half] & 15) << 4 for j in range(half))


@pytest.mark.parametrize(("name", "lowest"), [("int8", -128), ("int4", -8)])
def test_what_no_encoder_writes_is_decoded_as_written_and_judged_by_its_values(name: str, lowest: int) -> None:
    codes = [lowest, 1, -lowest - 1, 0, -3]
    for scale in (1.5, -1.5, -0.0, 2.0**-133):
        upload = Encoded(written(name, scale, codes), name, len(codes))
        values = [scale * code for code in codes]
        assert upload.decode().tolist() == values
        found = examine(upload)
        assert (found.problem, found.norm) == (None, pytest.approx(float(np.linalg.norm(values))))
    for scale in (np.inf, -np.inf, np.nan):
        with np.errstate(invalid="ignore"):
            found = examine(Encoded(written(name, scale, codes), name, len(codes)))
        assert found.problem == "the contribution contains NaN or infinite values"
    found = examine(Encoded(written(name, -(2.0**120), codes), name, len(codes)))
    assert found.problem is not None
    assert found.problem.endswith("is above 1e+18")


def bf16_value(payload: memoryview, index: int) -> float:
    """The bf16 number at the place `index` of a payload."""
    bits = int.from_bytes(payload[2 * index : 2 * index + 2], "little") << 16
    return float(np.uint32(bits).view(np.float32))


def expected_payload(flat: list[float], code_max: int) -> bytes:
    """The format as its description in fragment.proto reads, with exact fractions, one value at a time."""
    scales, codes = b"", b""
    for start in range(0, len(flat), 128):
        block = [Fraction(value) for value in flat[start : start + 128]]
        bits = int(np.float32(float(max(map(abs, block)) / code_max)).view(np.uint32))
        bits = (bits + 0xFFFF) >> 16
        scales += bits.to_bytes(2, "little")
        scale = Fraction(float(np.uint32(bits << 16).view(np.float32)))
        numbers = [round(value / scale) if scale else 0 for value in block]
        if code_max == 127:
            codes += bytes(number & 0xFF for number in numbers)
            continue
        half = (len(numbers) + 1) // 2
        numbers += [0] * (2 * half - len(numbers))
        codes += bytes((numbers[j] & 15) | (numbers[j + half] & 15) << 4 for j in range(half))
    return scales + codes


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 127, 128, 129, 200, 255, 256, 257, 1000])
def test_blocks_are_written_as_the_protocol_describes_them(name: str, size: int) -> None:
    flat = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    flat[size // 2 : size // 2 + 130] = 0
    assert bytes(encoding_named(name).encode(flat)) == expected_payload(flat.tolist(), BLOCKWISE[name])


@pytest.mark.parametrize("name", BLOCKWISE)
def test_codes_go_to_the_nearest_and_ties_to_the_even_one(name: str) -> None:
    largest = BLOCKWISE[name]
    flat = np.array([largest, -largest, 0.5, 1.5, 2.5, -0.5, -1.5, 1.25, 0.75, -0.0], np.float32)
    assert decoded(name, flat).tolist() == [largest, -largest, 0, 2, 2, 0, -2, 1, 1, 0]


@pytest.mark.parametrize("name", ENCODINGS)
def test_decoding_fills_a_given_vector(name: str) -> None:
    encoding = encoding_named(name)
    flat = np.array([0, 1, 7, -3, 4, 5], np.float32)
    received = bytearray(encoding.encode(flat))
    out = np.full(6, np.nan, np.float32)
    assert encoding.decode(memoryview(received), out) is out
    np.testing.assert_allclose(out, flat, atol=0.05)
    before = out.copy()
    received[:] = bytes(len(received))
    np.testing.assert_array_equal(out, before)


def test_a_float32_payload_is_read_in_place() -> None:
    received = bytearray(12)
    elements = float32_elements(received)
    received[:] = np.array([1, 2, 3], "<f4").tobytes()
    assert elements.tolist() == [1, 2, 3]


def test_payloads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(EncodingError, match="4 bytes per element, not 7 in all"):
        float32_elements(bytes(7))
    with pytest.raises(EncodingError, match="3 elements in bf16 take 6 bytes, the payload has 8"):
        encoding_named("bf16").decode(bytes(8), np.zeros(3, np.float32))
    with pytest.raises(EncodingError, match="129 elements in int4 take 69 bytes, the payload has 68"):
        Encoded(bytes(68), "int4", 129)
    with pytest.raises(EncodingError, match=r"float64 \(2,\)"):
        encoding_named("bf16").encode(np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(EncodingError, match="unknown encoding 'int2'; use one of float32, bf16, int8, int4"):
        encoding_named("int2")


def test_bits_per_element_agree_with_payload_sizes() -> None:
    bits = {name: encoding.bits_per_element for name, encoding in ENCODINGS.items()}
    assert bits == {"float32": 32, "bf16": 16, "int8": 8.125, "int4": 4.125}
    for name, encoding in ENCODINGS.items():
        assert encoding.payload_bytes(1024_000) == bits[name] / 8 * 1024_000
        assert encoding.payload_bytes(999_999) == pytest.approx(bits[name] / 8 * 999_999, rel=1e-4)
        assert encoding.payload_bytes(0) == 0


def test_every_encoding_has_its_number_on_the_wire() -> None:
    assert [encoding_from_wire(encoding_to_wire(name)) for name in ENCODINGS] == list(ENCODINGS)
    assert set(DOWNLOAD_ENCODINGS) < set(ENCODINGS)


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
