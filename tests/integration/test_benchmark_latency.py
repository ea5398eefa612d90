"""The benchmark of latency wraps functions of the programs from outside; this is where it shows if one has changed."""

import pytest

from benchmarks.latency import measure_ways


@pytest.mark.slow
def test_versions_are_followed_from_their_rounds_to_a_learner(tmp_path):
    assert len(measure_ways(tmp_path, ["alpha"], seconds=3.0)) >= 1
