"""What is left when a syncer dies in the middle of a commit."""

import os
import signal
import subprocess
import sys

import pytest

from syncer_service.store.reader import open_ledger
from tests.unit.store_cases import TestRun, assert_same_commits
from tests.unit.store_killed import COUNT

BEFORE = ("commit.in_payload_write", "commit.before_payload_sync", "commit.after_payload_sync", "commit.in_transaction")
AFTER = ("commit.after_transaction",)


def killed(folder, base_interval, point, nth):
    """Runs a syncer's store until a failpoint kills it."""
    command = [sys.executable, "-m", "tests.unit.store_killed", folder, str(base_interval), f"{point}=kill@{nth}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def undisturbed(folder, base_interval, count):
    """The same run up to a number of commits, without trouble."""
    return TestRun(folder, base_interval).begin().commits(count)


def files(folder):
    """All payload files with their bytes, but for what says which directory they are of."""
    return {
        path.relative_to(folder): path.stat().st_size for path in sorted(folder.rglob("*.seg")) if path.stat().st_size
    }


def ledger_rows(folder):
    with open_ledger(folder) as ledger:
        rounds = [(row.sequence, row.to_commit(), row.outcome) for row in ledger.rounds()]
        return rounds, list(ledger.versions()), ledger.incarnations()[0].learner, ledger.timelines()[0].origin


def check_after_kill(tmp_path, base_interval, point, nth):
    killed(tmp_path / "killed", base_interval, point, nth)
    count = nth if point in AFTER else nth - 1
    run = TestRun(tmp_path / "killed", base_interval)
    twin = undisturbed(tmp_path / "twin", base_interval, count)
    restored = run.open().restored()
    assert restored.losses == ()
    assert_same_commits(twin.store.newest(), restored.fragments)
    assert ledger_rows(run.path) == ledger_rows(twin.path)
    assert files(run.path) == files(twin.path)
    assert not (run.path / "probe").exists()
    # the round that was cut off is open again: the same work gives the same bits
    run.state = twin.state
    run.rows = list(twin.rows)
    run.commits(COUNT - count)
    twin.commits(COUNT - count)
    assert_same_commits(twin.store.newest(), run.store.newest())
    after = run.store.newest()
    run.close()
    twin.close()
    assert_same_commits(after, run.open().restored().fragments)
    run.close()


@pytest.mark.parametrize("point", BEFORE + AFTER)
def test_a_kill_in_a_commit_loses_nothing_that_was_committed(tmp_path, point):
    check_after_kill(tmp_path, base_interval=3, point=point, nth=4)


@pytest.mark.slow
@pytest.mark.parametrize("base_interval", [1, 3])
@pytest.mark.parametrize("nth", range(1, COUNT + 1))
@pytest.mark.parametrize("point", BEFORE + AFTER)
def test_a_kill_at_any_commit_loses_nothing_that_was_committed(tmp_path, point, nth, base_interval):
    check_after_kill(tmp_path, base_interval, point, nth)


def test_the_lock_goes_with_the_process(tmp_path):
    killed(tmp_path, 3, "commit.in_transaction", 1)
    assert (tmp_path / "lock").exists()
    run = TestRun(tmp_path)
    run.open()
    assert run.store.epoch == 2
    assert os.listdir(tmp_path)
    run.close()
