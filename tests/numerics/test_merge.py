"""The merge against a float64 implementation that is as simple as the formulas."""

import tracemalloc
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.arrays import merge as merge_module
from decoupled_diloco.arrays.encoding import ENCODINGS, Encoded, FloatVector, encoding_named
from decoupled_diloco.arrays.fragments import Segment
from decoupled_diloco.arrays.merge import (
    NORM_MAX,
    WEIGHT_MAX,
    Examination,
    MergeStats,
    weight_problem,
)
from decoupled_diloco.arrays.schema import MergeRule
from tests.numerics import reference

RULES: tuple[MergeRule, ...] = ("avg", "rda")
REFERENCE = {"avg": reference.avg, "rda": reference.rda}


def as_sent(upload: FloatVector, encoding: str = "float32") -> Encoded:
    return Encoded(encoding_named(encoding).encode(upload), encoding, upload.size)


def merge(
    uploads: Sequence[FloatVector], weights: Sequence[float], segments: Sequence[Segment]
) -> tuple[FloatVector, MergeStats]:
    """The merge of float32 contributions."""
    return merge_module.merge([as_sent(upload) for upload in uploads], weights, segments)


def examine(upload: FloatVector, encoding: str = "float32") -> Examination:
    return merge_module.examine(as_sent(upload, encoding))


def one_segment(size: int, rule: MergeRule) -> list[Segment]:
    return [Segment(0, size, rule)]


def expected(
    uploads: Sequence[npt.NDArray[np.generic]], weights: Sequence[float], segments: Sequence[Segment]
) -> reference.Vector:
    deltas = [-upload.astype(np.float64) for upload in uploads]
    return np.concatenate(
        [REFERENCE[rule]([delta[start:stop] for delta in deltas], weights) for start, stop, rule in segments]
    )


def assert_float32_close(actual: FloatVector, wanted: reference.Vector, scale: float = 1.0) -> None:
    """Equal up to two roundings to float32 (and to float64 noise `scale` times the largest element)."""
    assert actual.dtype == np.float32
    noise = scale * 1e-15 * float(np.abs(wanted).max(initial=0.0))
    np.testing.assert_allclose(actual, wanted, rtol=2**-23 * 1.01, atol=noise + 1e-45)


def random_uploads(rng: np.random.Generator, count: int, size: int) -> list[FloatVector]:
    scales = 10.0 ** rng.uniform(-5, 1, count)
    return [(rng.standard_normal(size) * scale).astype(np.float32) for scale in scales]


@pytest.mark.parametrize("count", range(1, 17))
def test_any_number_of_contributors_with_unequal_weights(count: int) -> None:
    rng = np.random.default_rng(count)
    segments = [
        Segment(0, 7, "rda"),
        Segment(7, 8, "rda"),
        Segment(8, 300, "avg"),
        Segment(300, 1000, "rda"),
        Segment(1000, 1001, "avg"),
    ]
    uploads = random_uploads(rng, count, 1001)
    weights = [
        reference.weight(tokens, steps)
        for tokens, steps in zip(rng.integers(1, 10**6, count), rng.integers(1, 40, count), strict=True)
    ]
    delta, stats = merge(uploads, weights, segments)
    wanted = expected(uploads, weights, segments)
    assert_float32_close(delta, wanted)
    assert stats.norms == pytest.approx([np.linalg.norm(upload.astype(np.float64)) for upload in uploads], rel=1e-12)
    assert stats.delta_norm == pytest.approx(np.linalg.norm(wanted), rel=1e-12)


@pytest.mark.parametrize("rule", RULES)
@given(
    rows=st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=4, max_size=4), min_size=1, max_size=16),
    data=st.data(),
)
def test_merge_is_the_formula_for_any_contributions(
    rule: MergeRule, rows: list[list[float]], data: st.DataObject
) -> None:
    uploads = [np.array(row, np.float32) for row in rows]
    weights = data.draw(st.lists(st.floats(1.0, 1e9), min_size=len(rows), max_size=len(rows)))
    mean_direction = reference.avg([reference.direction(upload.astype(np.float64)) for upload in uploads], weights)
    norm = float(np.linalg.norm(mean_direction))
    if rule == "rda" and 5e-7 < norm < 2e-6:
        return  # on the edge between RDA and Avg, rounding decides
    delta, _ = merge(uploads, weights, one_segment(4, rule))
    assert_float32_close(delta, expected(uploads, weights, one_segment(4, rule)), scale=10 / max(norm, 1e-6))


@pytest.mark.parametrize("rule", RULES)
def test_a_learner_that_did_not_move_counts_with_its_weight(rule: MergeRule) -> None:
    moved, still = np.array([3, 4], np.float32), np.zeros(2, np.float32)
    delta, stats = merge([moved, still], [1.0, 3.0], one_segment(2, rule))
    np.testing.assert_allclose(delta, -moved / 4, rtol=1e-7)
    assert stats.norms == (5.0, 0.0)


@pytest.mark.parametrize("rule", RULES)
def test_a_learner_that_is_absent_does_not_count_at_all(rule: MergeRule) -> None:
    present = random_uploads(np.random.default_rng(2), 2, 10)
    absent, _ = merge(present, [1.0, 2.0], one_segment(10, rule))
    still, _ = merge([*present, np.zeros(10, np.float32)], [1.0, 2.0, 3.0], one_segment(10, rule))
    np.testing.assert_allclose(still, absent / 2, rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_nobody_moved(rule: MergeRule) -> None:
    delta, stats = merge([np.zeros(3, np.float32)] * 4, [1.0, 2.0, 3.0, 4.0], one_segment(3, rule))
    assert delta.tolist() == [0, 0, 0]
    assert stats.rda_to_avg_ratio == 1.0
    assert stats.fallback_count == 0


def test_opposite_directions_fall_back_to_avg() -> None:
    upload = np.array([1, 2, 3], np.float32)
    delta, stats = merge([upload, -upload], [2.0, 2.0], one_segment(3, "rda"))
    assert delta.tolist() == [0, 0, 0]
    assert stats.fallback_count == 1
    delta, stats = merge([3 * upload, -upload], [2.0, 2.0], one_segment(3, "rda"))
    np.testing.assert_allclose(delta, -upload, rtol=1e-7)
    assert stats.fallback_count == 1


@pytest.mark.parametrize(("angle", "falls_back"), [(1e-3, False), (2e-5, False), (1e-7, True), (1e-12, True)])
def test_nearly_cancelling_directions(angle: float, falls_back: bool) -> None:
    """Two unit vectors that are opposite up to `angle`: their mean direction has the norm angle / 2."""
    first = np.array([1.0, 0.0], np.float32)
    second = np.array([-np.cos(angle), np.sin(angle)], np.float32)
    delta, stats = merge([first, second], [5.0, 5.0], one_segment(2, "rda"))
    assert_float32_close(delta, expected([first, second], [5.0, 5.0], one_segment(2, "rda")), scale=10 / angle)
    assert stats.fallback_count == falls_back
    if not falls_back:
        assert stats.delta_norm == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_one_contributor_is_taken_as_it_is(rule: MergeRule) -> None:
    upload = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    delta, stats = merge([upload], [7.3], one_segment(1000, rule))
    np.testing.assert_array_equal(delta, -upload)
    assert stats.rda_to_avg_ratio == pytest.approx(1.0)


@pytest.mark.parametrize("count", [2, 3, 8, 16])
@pytest.mark.parametrize("rule", RULES)
def test_identical_contributions_merge_to_one_of_them(rule: MergeRule, count: int) -> None:
    rng = np.random.default_rng(count)
    upload = rng.standard_normal(1000).astype(np.float32)
    weights = rng.uniform(1, 100, count).tolist()
    delta, stats = merge([upload] * count, weights, one_segment(1000, rule))
    np.testing.assert_allclose(delta, -upload, rtol=2e-7)
    assert stats.rda_to_avg_ratio == pytest.approx(1.0)


def test_rda_keeps_the_length_that_orthogonal_contributions_lose_in_a_mean() -> None:
    uploads = list(np.eye(16, dtype=np.float32))
    delta, stats = merge(uploads, [1.0] * 16, one_segment(16, "rda"))
    assert np.linalg.norm(delta) == pytest.approx(1.0)
    assert stats.rda_to_avg_ratio == pytest.approx(4.0)
    assert stats.rda_avg_norm == pytest.approx(0.25)


def test_each_segment_has_its_own_norm() -> None:
    """Merged as one tensor, the long half would decide the direction of the short one."""
    uploads = [np.array([1e-3, 0, 5, 0], np.float32), np.array([0, 1e-3, 0, 1], np.float32)]
    segments = [Segment(0, 2, "rda"), Segment(2, 4, "rda")]
    delta, _ = merge(uploads, [1.0, 1.0], segments)
    np.testing.assert_allclose(delta[:2], -1e-3 / np.sqrt(2), rtol=1e-6)
    np.testing.assert_allclose(delta[2:], -3 / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_only_ratios_of_weights_matter(rule: MergeRule) -> None:
    uploads = random_uploads(np.random.default_rng(3), 5, 50)
    small, _ = merge(uploads, [1e-20, 2e-20, 3e-20, 4e-20, 5e-20], one_segment(50, rule))
    large, _ = merge(uploads, [1e29, 2e29, 3e29, 4e29, 5e29], one_segment(50, rule))
    np.testing.assert_allclose(small, large, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_the_same_contributions_give_the_same_bits(rule: MergeRule) -> None:
    uploads = random_uploads(np.random.default_rng(4), 7, 70_001)
    weights = [float(index + 1) for index in range(7)]
    first, first_stats = merge(uploads, weights, one_segment(70_001, rule))
    copies = [np.concatenate([np.zeros(1, np.float32), upload])[1:] for upload in uploads]  # other alignment
    second, second_stats = merge(copies, weights, one_segment(70_001, rule))
    assert first.tobytes() == second.tobytes()
    assert first_stats == second_stats


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 127, 500, 70_001])
def test_contributions_in_any_encoding_are_merged_as_what_they_decode_to(rule: MergeRule, size: int) -> None:
    uploads = random_uploads(np.random.default_rng(6), 8, size)
    sent = [as_sent(upload, name) for upload, name in zip(uploads, [*ENCODINGS] * 2, strict=True)]
    third = size // 3
    segments = [Segment(0, third, "avg"), Segment(third, size, rule)][third == 0 :]
    weights = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    delta, stats = merge_module.merge(sent, weights, segments)
    wide, wide_stats = merge([contribution.decode() for contribution in sent], weights, segments)
    assert delta.tobytes() == wide.tobytes()
    assert stats == wide_stats


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_merge_needs_little_memory_beyond_its_result(encoding: str, rule: MergeRule) -> None:
    size = 1 << 20
    sent = [as_sent(np.full(size, value, np.float32), encoding) for value in (1, 2, 3, 4)]
    tracemalloc.start()
    try:
        merge_module.merge(sent, [1.0] * 4, one_segment(size, rule))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * size + 131_072


def test_contributions_are_only_read() -> None:
    uploads = random_uploads(np.random.default_rng(7), 3, 100)
    for upload in uploads:
        upload.flags.writeable = False
    merge(uploads, [1.0, 1.0, 1.0], [Segment(0, 50, "rda"), Segment(50, 100, "avg")])


def test_calls_that_make_no_sense_are_refused() -> None:
    one = np.ones(2, np.float32)
    with pytest.raises(ValueError, match="0 contributions"):
        merge([], [], one_segment(2, "avg"))
    with pytest.raises(ValueError, match="2 contributions and 1 weights"):
        merge([one, one], [1.0], one_segment(2, "avg"))
    with pytest.raises(ValueError, match="merge weight 0.0 is not between"):
        merge([one], [0.0], one_segment(2, "avg"))
    with pytest.raises(ValueError, match="differ in length"):
        merge([one, np.ones(3, np.float32)], [1.0, 1.0], one_segment(2, "avg"))
    with pytest.raises(ValueError, match="segments cover 1 elements, contributions have 2"):
        merge([one], [1.0], one_segment(1, "avg"))
    with pytest.raises(ValueError, match="without gap"):
        merge([one], [1.0], [Segment(1, 2, "avg")])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 99_999])
def test_values_that_are_not_finite_are_found(value: float, place: int, encoding: str) -> None:
    upload = np.zeros(100_000, np.float32)
    upload[place] = value
    assert examine(upload, encoding).problem == "the contribution contains NaN or infinite values"


def test_norms_beyond_the_safe_range_are_found() -> None:
    assert examine(np.array([NORM_MAX / 2], np.float32)).problem is None
    too_long = np.full(10, NORM_MAX, np.float32)
    assert examine(too_long).problem == "the contribution's norm 3.16e+18 is above 1e+18"
    assert examine(np.full(2, np.finfo(np.float32).max)).problem is not None


def test_the_norm_of_an_examination_is_accurate() -> None:
    upload = np.random.default_rng(8).standard_normal(200_001).astype(np.float32)
    assert examine(upload).norm == pytest.approx(np.linalg.norm(upload.astype(np.float64)), rel=1e-14)
    assert examine(np.zeros(3, np.float32)).norm == 0.0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 2 * WEIGHT_MAX])
def test_weights_that_cannot_be_used_are_found(weight: float) -> None:
    assert weight_problem(weight) is not None
    assert weight_problem(1.0) is None


@pytest.mark.parametrize("rule", RULES)
def test_the_longest_permitted_contributions_do_not_overflow(rule: MergeRule) -> None:
    upload = np.array([NORM_MAX * 0.99, 0], np.float32)
    with np.errstate(all="raise"):
        delta, _ = merge([upload] * 16, [WEIGHT_MAX] * 16, one_segment(2, rule))
    assert np.isfinite(delta).all()
