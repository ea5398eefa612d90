"""The benchmark of arithmetic, tiny: what it compares does the same work."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from benchmarks import arithmetic
from decoupled_diloco.arrays.stripes import CALLING_THREAD, LoopThreads


def test_both_merges_come_to_the_same_version() -> None:
    merge = arithmetic.Merge(20_000)
    with ThreadPoolExecutor(2) as pool:
        ours, plain = merge.ours(LoopThreads(pool, 2)), merge.by_numpy()
    np.testing.assert_allclose(ours.theta, plain.theta, rtol=1e-6)
    np.testing.assert_allclose(ours.momentum, plain.momentum, rtol=1e-5, atol=1e-9)
    assert merge.byte_count == 20_000 * (16 + 38)


def test_segments_cover_the_fragment() -> None:
    segments = arithmetic.cut(1_000_003)
    assert len(segments) == arithmetic.SEGMENT_COUNT
    assert (segments[0].start, segments[-1].stop) == (0, 1_000_003)
    assert sum(segment.stop - segment.start for segment in segments if segment.rule == "avg") == 200_000


@pytest.mark.parametrize("thread_count", [1, 2])
def test_every_figure_is_there(thread_count: int) -> None:
    with ThreadPoolExecutor(thread_count) as pool:
        figures = arithmetic.merge_figures(10_000, 1, pool, thread_count)
        figures += arithmetic.encoding_figures(10_000, 1, pool, thread_count)
    assert all(figure.value >= 0 for figure in figures)
    assert len({figure.name for figure in figures}) == len(figures) == 1 + 12 * thread_count
    assert len([figure for figure in figures if figure.target]) == 3 + 6 * thread_count


def test_a_norm_is_right_to_a_billionth() -> None:
    assert arithmetic.norm_figure(arithmetic.Merge(100_000)).is_met
    arithmetic.Merge(1000).examined(CALLING_THREAD)
