import pytest

from benchmarks.memory import MIB, Large, growth_mib, measure_large, measure_small


def test_growth_is_the_slope_once_caches_are_filled():
    flat = [10 * MIB, 50 * MIB] + [60 * MIB] * 8
    assert growth_mib(flat, 500) == pytest.approx(0, abs=1e-6)
    growing = [10 * MIB, 50 * MIB] + [(60 + 2 * step) * MIB for step in range(8)]
    assert growth_mib(growing, 500) == pytest.approx(20)


def test_the_peak_counts_above_what_the_run_itself_is():
    found = Large("bf16", 1 << 20, peaks=[200 * MIB, 250 * MIB], settled_bytes=220 * MIB, library_bytes=40 * MIB)
    peak, kept, library = found.figures()
    assert (peak.value, peak.low, kept.value, library.value) == (250 - 12, 200 - 12, 220 - 12, 40)
    assert peak.target.value == 10 * 4 + 200
    assert peak.is_met


def test_a_syncer_is_measured_over_rounds_of_eight():
    found = measure_large("bf16", 1 << 12, 2)
    assert len(found.peaks) == 2
    assert min(*found.peaks, found.start_bytes) > MIB
    assert found.settled_bytes > found.library_bytes > MIB


def test_a_syncer_is_measured_over_many_small_rounds():
    resident = measure_small(20)
    assert len(resident) == 10
    assert min(resident) > MIB
