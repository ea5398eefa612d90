import pytest

from tests.unit.store_cases import CONFIG, MODEL, TestRun, assert_same_commits


def test_a_directory_that_is_new_holds_no_run(tmp_path):
    run = TestRun(tmp_path / "state")
    assert run.open().restored() is None
    assert run.store.epoch == 1
    run.close()
    assert run.open().restored() is None
    assert run.store.epoch == 2
    run.close()


@pytest.mark.parametrize("encoding", ["bf16", "float32"])
@pytest.mark.parametrize("base_interval", [1, 2, 3, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_what_was_committed_is_there_again_bit_for_bit(tmp_path, base_interval, encoding, count):
    run = TestRun(tmp_path, base_interval, encoding).begin().commits(count)
    before = run.store.newest()
    run.close()
    restored = run.open().restored()
    assert_same_commits(before, restored.fragments)
    assert_same_commits(before, run.store.newest())
    assert restored.losses == ()
    assert restored.model == MODEL
    assert restored.config_values == CONFIG
    assert 0 <= restored.stopped_seconds < 60
    run.commits(3)
    after = run.store.newest()
    run.close()
    assert_same_commits(after, run.open().restored().fragments)
    run.close()
