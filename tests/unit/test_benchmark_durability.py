from benchmarks.durability import INTERVALS, measure, measure_ledger


def test_the_benchmark_compares_stores_that_come_back_with_equal_bits(tmp_path):
    results = measure(tmp_path, parameter_count=50_000, round_count=15)
    assert [result["base_interval"] for result in results] == list(INTERVALS)
    assert [result["restart_replays_deltas"] for result in results] == [0, 3, 7, 15, 15]
    per_parameter = [result["bytes_per_commit_and_parameter"] for result in results]
    assert per_parameter == sorted(per_parameter, reverse=True)
    assert 12 < per_parameter[0] < 14
    assert 4 < per_parameter[-1] < 6


def test_the_ledger_by_itself(tmp_path):
    found = measure_ledger(tmp_path, 20)
    assert (found["learners"], found["members"], found["rounds"]) == (32, 8, 20)
    assert found["ledger_bytes_per_round"] > 0
    assert found["bytes_written_per_commit_median"] > 0
