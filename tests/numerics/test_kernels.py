"""The compiled loops: the bits of plain NumPy where those are promised, in any number of threads, at any address."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import decoupled_diloco
from benchmarks import plain_arithmetic as plain
from decoupled_diloco.arrays.encoding import ENCODINGS, Encoded, FloatVector, encoding_named
from decoupled_diloco.arrays.fragments import Segment
from decoupled_diloco.arrays.merge import combine, examine, merge
from decoupled_diloco.arrays.outer import FragmentState, apply_delta, merged_outer_step, outer_step
from decoupled_diloco.arrays.stripes import PIECE_ELEMENTS, LoopThreads, pieces_of

SIZES = [1, 63, 64, 65, 127, 128, 129, 1000, 1023, 1024, 1025, 5000, 2 * PIECE_ELEMENTS + 77]
HYPER = {"learning_rate": 0.6, "mu": 0.9, "download_encoding": "bf16"}


def values(seed: int, size: int) -> FloatVector:
    """Values over the whole range of what is merged, with zeros and denormal numbers."""
    rng = np.random.default_rng(seed)
    flat = (rng.standard_normal(size) * 10.0 ** rng.uniform(-42, 3, size)).astype(np.float32)
    flat[rng.uniform(size=size) < 0.05] = 0
    return flat


def any_bits(seed: int, size: int) -> FloatVector:
    return np.random.default_rng(seed).integers(0, 1 << 32, size, np.uint32).view(np.float32)


def state_of(seed: int, size: int) -> FragmentState:
    return FragmentState(values(seed, size), values(seed + 1, size), values(seed + 2, size) * np.float32(1e-3))


def sent(size: int, count: int) -> list[Encoded]:
    names = list(ENCODINGS)
    return [
        Encoded(encoding_named(name).encode(values(seed, size)), name, size)
        for seed, name in ((seed, names[seed % len(names)]) for seed in range(count))
    ]


def cut(size: int) -> list[Segment]:
    """Segments of odd lengths, by both rules."""
    borders = sorted({0, size, *(border for border in (1, 100, 130, 1024, 40_000) if border < size)})
    return [
        Segment(start, stop, "avg" if index % 3 == 1 else "rda")
        for index, (start, stop) in enumerate(pairwise(borders))
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ENCODINGS)
def test_payloads_have_the_bits_of_plain_numpy(name: str, size: int) -> None:
    for flat in (values(size, size), any_bits(size, size)) if name != "int8" and name != "int4" else (values(1, size),):
        payload = encoding_named(name).encode(flat)
        assert bytes(payload) == plain.encode(flat, name)
        upload = Encoded(payload, name, size)
        with np.errstate(invalid="ignore"):
            assert upload.decode().tobytes() == plain.elements(upload).astype(np.float32).tobytes()


def test_every_number_that_is_not_finite_becomes_bf16_as_ml_dtypes_writes_it() -> None:
    bits = np.concatenate(
        [np.arange(0x7F7F0000, 0x7F820000), np.arange(0xFF7F0000, 0xFF820000), [0x7FC00001, 0xFFFFFFFF]]
    )
    flat = bits.astype(np.uint32).view(np.float32)
    assert bytes(encoding_named("bf16").encode(flat)) == plain.encode(flat, "bf16")


@pytest.mark.parametrize("size", SIZES)
def test_an_outer_step_has_the_bits_of_plain_numpy(size: int) -> None:
    state, delta = state_of(size, size), values(7, size)
    step = outer_step(state, delta, **HYPER)
    wanted, payload = plain.outer_step(state, delta, 0.6, 0.9)
    for name in ("theta", "momentum", "residual"):
        assert getattr(step.state, name).tobytes() == getattr(wanted, name).tobytes(), name
    assert step.delta_payload == payload.tobytes()
    assert apply_delta(state.theta, payload.tobytes(), "bf16").tobytes() == wanted.theta.tobytes()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("size", SIZES)
def test_a_merge_is_that_of_plain_numpy(size: int, count: int) -> None:
    uploads, weights, segments = sent(size, count), [1.0 + index for index in range(count)], cut(size)
    delta, _ = merge(uploads, weights, segments)
    wanted = plain.merge([plain.elements(upload) for upload in uploads], weights, segments)
    np.testing.assert_allclose(delta, wanted, rtol=2**-22, atol=1e-40)  # the mean direction may be denormal there


@pytest.mark.parametrize("thread_count", [1, 2, 3, 7])
def test_the_number_of_threads_does_not_show(thread_count: int) -> None:
    size = 9 * PIECE_ELEMENTS + 1001
    uploads, weights, segments, state = sent(size, 6), [3.0, 1.0, 4.0, 1.0, 5.0, 9.0], cut(size), state_of(3, size)
    squares = [examine(upload, segments).squares for upload in uploads]
    stops = np.array([segment.stop for segment in segments])
    alone = combine(uploads, squares, weights, segments)
    alone_delta, alone_step = merged_outer_step(state, alone, stops, **HYPER)
    with ThreadPoolExecutor(thread_count) as pool:
        threads = LoopThreads(pool, thread_count)
        assert [examine(upload, segments, threads).squares for upload in uploads] == squares
        combined = combine(uploads, squares, weights, segments, threads)
        delta, step = merged_outer_step(state, combined, stops, **HYPER, threads=threads)
        applied = apply_delta(state.theta, step.delta_payload, "bf16", threads)
    assert combined.stats == alone.stats
    assert delta.tobytes() == alone_delta.tobytes()
    assert step.delta_payload == alone_step.delta_payload
    assert applied.tobytes() == step.state.theta.tobytes()
    for name in ("theta", "momentum", "residual"):
        assert getattr(step.state, name).tobytes() == getattr(alone_step.state, name).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_merge_and_outer_step_in_one_pass_are_the_two_after_each_other(size: int) -> None:
    uploads, weights, segments, state = sent(size, 3), [1.0, 2.0, 3.0], cut(size), state_of(5, size)
    wanted, stats = merge(uploads, weights, segments)
    squares = [examine(upload, segments).squares for upload in uploads]
    combined = combine(uploads, squares, weights, segments)
    delta, step = merged_outer_step(state, combined, np.array([segment.stop for segment in segments]), **HYPER)
    after = outer_step(state, wanted, **HYPER)
    assert combined.stats == stats
    assert delta.tobytes() == wanted.tobytes()
    assert step.delta_payload == after.delta_payload
    assert step.state.theta.tobytes() == after.state.theta.tobytes()


@pytest.mark.parametrize("offset", [1, 2, 3, 63])
@pytest.mark.parametrize("name", ENCODINGS)
def test_a_payload_may_begin_at_any_address(name: str, offset: int) -> None:
    flat = values(1, 3000)
    payload = encoding_named(name).encode(flat)
    room = bytearray(offset + len(payload))
    room[offset:] = payload
    moved = Encoded(memoryview(room)[offset:], name, flat.size)
    straight = Encoded(payload, name, flat.size)
    assert moved.decode().tobytes() == straight.decode().tobytes()
    assert examine(moved) == examine(straight)
    segments = cut(3000)
    assert (
        merge([moved] * 2, [1.0, 2.0], segments)[0].tobytes()
        == merge([straight] * 2, [1.0, 2.0], segments)[0].tobytes()
    )


@pytest.mark.parametrize("part", ["theta", "momentum", "residual"])
@pytest.mark.parametrize("place", [0, 1023, 1500, 2999])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_new_version_that_is_not_finite_says_so(part: str, place: int, value: float) -> None:
    parts = {name: np.ones(3000, np.float32) for name in ("theta", "momentum", "residual")}
    assert outer_step(FragmentState(**parts), np.ones(3000, np.float32), **HYPER).finite
    parts[part][place] = value
    assert not outer_step(FragmentState(**parts), np.ones(3000, np.float32), **HYPER).finite


def test_pieces_cover_the_segments_and_cross_no_border() -> None:
    segments = (
        Segment(0, 5, "avg"),
        Segment(5, 5 + 3 * PIECE_ELEMENTS, "rda"),
        Segment(5 + 3 * PIECE_ELEMENTS, 100_000, "rda"),
    )
    pieces = pieces_of(segments)
    assert pieces.bounds == (0, 1, 4, 5)
    assert pieces.highs.tolist()[:-1] == pieces.lows.tolist()[1:]
    for index, segment in enumerate(segments):
        own = pieces.segment_of == index
        assert (pieces.lows[own][0], pieces.highs[own][-1]) == segment[:2]


def test_loops_are_compiled_where_no_cache_can_be_written() -> None:
    """As in a container whose file system is read only, for a user without a home."""
    program = """
import numba.core.caching as caching
(getattr(caching, "CacheImpl", None) or caching._CacheImpl)._locator_classes = []
from decoupled_diloco.arrays.encoding import Encoded, encoding_named
import numpy as np
flat = np.arange(5, dtype=np.float32)
print(Encoded(encoding_named("bf16").encode(flat), "bf16", 5).decode().tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert (done.stdout.strip(), done.stderr) == ("[0.0, 1.0, 2.0, 3.0, 4.0]", "")


@pytest.mark.slow
def test_compiled_loops_of_another_text_are_not_used(tmp_path: Path) -> None:
    """Numba by itself would use them: the file of the kernel that calls the changed part is the same."""
    package = tmp_path / "decoupled_diloco"
    shutil.copytree(Path(decoupled_diloco.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    program = """
import numpy as np
from decoupled_diloco.arrays.encoding import Encoded
print(Encoded(np.array([0x3F80], "<u2").view(np.uint8), "bf16", 1).decode().tolist())
"""

    def decoded() -> str:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=100
        )
        assert not done.stderr
        return done.stdout.strip()

    assert decoded() == "[1.0]"
    assert len(list((tmp_path / "cache").iterdir())) == 1
    changed = package / "arrays" / "machine_code.py"
    text = changed.read_text()
    assert "_carray(pointer(address, np.uint16), count)" in text
    changed.write_text(text.replace("pointer(address, np.uint16), count", "pointer(address, np.uint16), count * 1"))
    assert decoded() == "[1.0]"
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_who_does_not_compute_does_not_load_the_compiler() -> None:
    program = """
import sys
import decoupled_diloco, syncerctl.__main__, learner_service.syncer_client, learner_service.app
from decoupled_diloco.arrays.encoding import encoding_named
encoding_named("int4").payload_bytes(1000)
print([name for name in sys.modules if name.split(".")[0] in ("numba", "llvmlite")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr
