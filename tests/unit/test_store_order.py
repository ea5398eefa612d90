"""The order of a commit, and long random lives of a store against a model of it in memory."""

import os
import random
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from decoupled_diloco.core.effects import CloseRound
from decoupled_diloco.runtime import failpoints
from syncer_service.store.interface import StorageError
from syncer_service.store.lock import StateError
from syncer_service.store.reader import open_ledger
from tests.unit.store_cases import FRAGMENTS, TestRun, assert_same_commits


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints.arm("")


@pytest.fixture
def trace(monkeypatch):
    """What is synced and committed, in order."""
    events = []
    sync = os.fsync

    def traced(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(f"sync {'folder ' if path.is_dir() else ''}{path.name}")
        sync(descriptor)

    monkeypatch.setattr("syncer_service.store.payloads.os.fsync", traced)
    hit = failpoints.hit
    monkeypatch.setattr(failpoints, "hit", lambda point: (events.append(point), hit(point)))
    return events


def watch_transactions(run, events):
    def statement(text):
        if text in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
            events.append(text)

    run.store._ledger.connection.set_trace_callback(statement)


def test_the_payload_is_on_the_disk_before_the_transaction_that_names_it(tmp_path, trace):
    run = TestRun(tmp_path, base_interval=2).begin()
    watch_transactions(run, trace)
    trace.clear()
    run.commit(0)
    assert trace == [
        "commit.in_payload_write",
        "commit.before_payload_sync",
        "sync 1.1.1.seg",
        "commit.after_payload_sync",
        "BEGIN IMMEDIATE",
        "commit.in_transaction",
        "COMMIT",
        "commit.after_transaction",
    ]
    trace.clear()
    run.commit(0)
    assert trace == [
        "commit.in_payload_write",
        "commit.before_payload_sync",
        "sync 1.3.1.seg",
        "commit.after_payload_sync",
        "sync folder 0000",
        "BEGIN IMMEDIATE",
        "commit.in_transaction",
        "COMMIT",
        "commit.after_transaction",
    ]
    run.close()


def test_the_first_versions_are_on_the_disk_before_they_count(tmp_path, trace):
    run = TestRun(tmp_path / "state", base_interval=2)
    run.begin()
    assert trace == [
        f"sync folder {tmp_path.name}",  # where the state directory is
        "sync folder state",
        "sync folder fragments",
        "sync 1.1.1.seg",
        "sync folder 0000",
        "sync folder fragments",
        "sync 1.1.1.seg",
        "sync folder 0001",
    ]
    run.close()


def test_transactions_are_synced(tmp_path):
    run = TestRun(tmp_path).begin()
    connection = run.store._ledger.connection

    def settings():
        return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")]

    assert settings() == ["wal", 2]
    run.store.record_abandoned(CloseRound(1, 0, False, (), 0, "nothing"))
    assert settings() == ["wal", 2]
    run.close()


def crash(run):
    """As if the process had died: nothing is written any more, the system takes the lock back."""
    run.store._lock_file.release()
    run.store._ledger.connection.close()


POINTS = ["commit.in_payload_write", "commit.before_payload_sync", "commit.after_payload_sync", "commit.in_transaction"]


@pytest.mark.parametrize("seed", range(40))
def test_a_random_life_is_that_of_a_store_that_never_fails(tmp_path, seed):
    """Commits, failures, crashes, restarts with other intervals and roll-backs, in a random order."""
    chance = random.Random(seed)
    run = TestRun(tmp_path / "state", chance.choice([1, 2, 3, 5])).begin()
    expected = dict(run.store.newest())
    committed, older = [], [expected]
    for _ in range(40):
        match chance.randrange(8):
            case 0:
                failpoints.arm(f"{chance.choice(POINTS)}=enospc@1")
                with pytest.raises(StorageError):
                    run.commit(chance.randrange(FRAGMENTS))
                failpoints.arm("")
            case 1:
                (run.close if chance.random() < 0.5 else lambda: crash(run))()
                run.base_interval = chance.choice([1, 2, 3, 5])
                restored = run.open().restored()
                assert restored.losses == ()
                assert_same_commits(expected, restored.fragments)
                before = run.state
                assert run.booked(restored).versions == before.versions
            case 2:
                run.store.save_state(run.state)
            case 3 if chance.random() < 0.3:
                states = {f: commit.state for f, commit in chance.choice(older).items()}
                expected = {commit.fragment: commit for commit in run.roll_back(states)}
            case _:
                commit = run.commit(chance.randrange(FRAGMENTS))
                expected = {**expected, commit.fragment: commit}
                committed.append(commit.version)
                older.append(expected)
        assert_same_commits(expected, run.store.newest())
    with open_ledger(run.path) as ledger:
        assert [row.version for row in ledger.rounds()] == committed
    for fragment in range(FRAGMENTS):
        assert len(list((run.path / "fragments" / f"{fragment:04d}").iterdir())) <= 2
    run.close()


def test_a_crash_while_falling_back_changes_nothing(tmp_path, monkeypatch):
    run = TestRun(tmp_path / "state", 3).begin().commits(9)
    run.close()
    path = max((tmp_path / "state/fragments/0001").iterdir(), key=lambda path: int(path.name.split(".")[1]))
    path.write_bytes(path.read_bytes()[:-1])
    shutil.copytree(tmp_path / "state", tmp_path / "twin")

    def die(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("syncer_service.store.ledger.Ledger.put_lost", die)
        with pytest.raises(KeyboardInterrupt):
            run.open()
    restored = run.open().restored()
    twin = TestRun(tmp_path / "twin", 3)
    expected = twin.open().restored()
    assert len(restored.losses) == len(expected.losses) == 1
    assert restored.state == expected.state
    assert_same_commits(expected.fragments, restored.fragments)
    run.close()
    twin.close()


@pytest.mark.parametrize("left", ["nothing", "an empty ledger", "a ledger without a run"])
def test_a_first_start_that_was_cut_short_is_made_again(tmp_path, left, monkeypatch):
    folder = tmp_path / "state"
    folder.mkdir()
    if left == "an empty ledger":
        (folder / "ledger.sqlite3").touch()
    if left == "a ledger without a run":
        with monkeypatch.context() as patched:
            patched.setattr("syncer_service.store.ledger.Ledger._begin_epoch", lambda self: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                TestRun(folder).open()
    run = TestRun(folder).begin().commits(1)
    assert run.store.epoch == 1
    run.close()


def test_a_store_that_cannot_open_lets_go_of_its_directory(tmp_path):
    run = TestRun(tmp_path).begin().commits(2)
    run.close()
    segment = next((tmp_path / "fragments/0000").iterdir())
    raw = segment.read_bytes()
    segment.write_bytes(b"")
    with pytest.raises(StateError):
        run.open()
    segment.write_bytes(raw)
    assert len(run.open().restored().fragments) == FRAGMENTS
    run.close()
    with closing(open(tmp_path / "lock")) as file:
        assert str(os.getpid()) in file.read()
