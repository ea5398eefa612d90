"""What docs/encodings.md says of bytes is what the code writes."""

import math
from pathlib import Path

import numpy as np
import pytest

from decoupled_diloco.arrays.encoding import DOWNLOAD_ENCODINGS, ENCODINGS, Encoded, encoding_named

PAGE = (Path(__file__).parents[2] / "docs" / "encodings.md").read_text(encoding="utf-8")
EXAMPLE = np.array([8.0, 1.25, -1.0], np.float32)
TERMS = {"4n": lambda n: 4 * n, "2n": lambda n: 2 * n, "n": lambda n: n}
TERMS |= {"2 ceil(n / 128)": lambda n: 2 * math.ceil(n / 128), "ceil(n / 2)": lambda n: math.ceil(n / 2)}


def row_of(name: str) -> list[str]:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", list(ENCODINGS))
def test_the_bytes_of_the_example(name: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"    {name} ") and "=" not in line]
    assert bytes.fromhex(line.split(name)[1]) == bytes(encoding_named(name).encode(EXAMPLE))


@pytest.mark.parametrize("name", list(ENCODINGS))
def test_the_table_of_sizes_and_directions(name: str) -> None:
    _, up, down, bits, payload, _ = row_of(name)
    assert up == "yes"
    assert (down != "no") == (name in DOWNLOAD_ENCODINGS)
    assert float(bits) == encoding_named(name).bits_per_element
    for n in (1, 2, 127, 128, 129, 100_001):
        size = sum(TERMS[term](n) for term in payload.removesuffix(" bytes").split(" + "))
        assert size == encoding_named(name).payload_bytes(n)


@pytest.mark.parametrize(("name", "codes"), [("int8", 127), ("int4", 7)])
def test_the_errors_of_the_table_are_upper_bounds_and_not_much_above(name: str, codes: int) -> None:
    stated = float(row_of(name)[5].split(" %")[0]) / 100
    assert (1 + 2**-7) * (0.5 + 2**-18) / codes == pytest.approx(stated, rel=0.01)
    flat = np.random.default_rng(3).uniform(-1, 1, 128 * 200).astype(np.float32)
    error = np.abs(flat - Encoded(encoding_named(name).encode(flat), name, flat.size).decode()).reshape(-1, 128)
    shares = error.max(axis=1) / np.abs(flat).reshape(-1, 128).max(axis=1)
    assert stated * 0.9 < shares.max() <= stated


def test_the_error_of_bf16_is_an_upper_bound() -> None:
    assert "2^-8 of its magnitude" in row_of("bf16")[5]
    flat = np.random.default_rng(3).uniform(1, 2, 10_000).astype(np.float32)
    read = Encoded(encoding_named("bf16").encode(flat), "bf16", flat.size).decode()
    assert 0.9 * 2**-8 < (np.abs(read - flat) / flat).max() <= 2**-8
