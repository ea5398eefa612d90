"""A disk that is full or fails: it is said, what was durable still is, and work goes on when there is room again."""

import errno
import os
import re
import shutil
import sqlite3
import subprocess
from pathlib import Path

import numpy as np
import pytest

from decoupled_diloco.runtime import failpoints
from syncer_service.store.interface import StorageError
from syncer_service.store.lock import StateError
from syncer_service.store.reader import open_ledger
from tests.unit.store_cases import TestRun, assert_same_commits, booked

ROOM_BYTES = 4 << 20


class SmallDisk:
    """A file system of its own with room for so many bytes."""

    def __init__(self, folder):
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self, left_bytes=0):
        """Leaves so much room."""
        status = os.statvfs(self.folder)
        with self.filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_frsize - left_bytes))

    def free(self):
        self.filler.unlink()


class DiskByFailpoint:
    """Where no file system can be mounted: a failpoint that says what a full disk would."""

    def __init__(self, folder):
        self.folder = folder
        self.filler = folder / "full"

    def fill(self, left_bytes=0):
        self.filler.touch()
        point = "commit.before_payload_sync" if left_bytes < 8192 else "commit.in_transaction"
        failpoints.arm(f"{point}=enospc@{self.filler}")

    def free(self):
        self.filler.unlink()


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "none", folder]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        yield DiskByFailpoint(folder)
        failpoints.arm("")
        return
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoints.arm("")


@pytest.mark.parametrize("left_bytes", [0, 4096, 8192, 12288, 16384, 32768])
@pytest.mark.parametrize("base_interval", [1, 4])
def test_a_full_disk_stops_commits_until_there_is_room(disk, base_interval, left_bytes):
    run = TestRun(disk.folder / "state", base_interval).begin().commits(5)
    before = run.store.newest()
    rounds = len(run.rows)
    disk.fill(left_bytes)
    failures = []
    for _ in range(40):  # what is left of the room may take some rounds
        commit, delta, row, state = run.next_round()
        try:
            run.store.commit_round(commit, delta, row, state)
        except StorageError as error:
            failures.append(str(error))
        else:
            assert not failures
            run.rows.append(row)
            run.state = booked(state, row)
            before = run.store.newest()
            rounds += 1
    assert len(failures) > 3
    path = re.escape(str(run.path))
    assert re.fullmatch(rf"cannot write to {path}: .*; \d+ bytes are free, \d+ are needed", failures[0])
    assert re.search("No space left on device|database or disk is full", failures[0])
    assert_same_commits(before, run.store.newest())
    disk.free()
    run.store.probe()
    run.commits(4)
    after = run.store.newest()
    run.close()
    restored = run.open().restored()
    assert restored.losses == ()
    assert_same_commits(after, restored.fragments)
    with open_ledger(run.path) as ledger:
        assert [row.round for row in ledger.rounds()] == list(range(1, rounds + 5))
    run.close()


def test_a_full_disk_is_seen_by_the_probe_and_leaves_nothing(disk):
    run = TestRun(disk.folder / "state").begin().commits(2)
    run.store.probe()
    if isinstance(disk, SmallDisk):
        disk.fill()
        with pytest.raises(StorageError, match="No space left on device"):
            run.store.probe()
        disk.free()
        run.store.probe()
    assert not (run.path / "probe").exists()
    run.close()


def test_the_probe_asks_for_as_much_as_what_failed_needs(tmp_path, monkeypatch):
    """The initial parameters of all fragments are more than any one commit."""
    run = TestRun(tmp_path)
    run.open()
    big = [np.ones(200_000, np.float32), np.ones(400_000, np.float32)]
    for fragment, theta in enumerate(big):
        run.store.stage_initial("alpha", 1, fragment, theta)
    monkeypatch.setattr("syncer_service.store.durable.FragmentFiles.append", fails_for_want_of_room)
    with pytest.raises(StorageError, match=r"No space left on device; \d+ bytes are free, 7200000 are needed"):
        run.store.commit_initial("alpha", 1, 2)
    monkeypatch.undo()
    assert probed_bytes(run, monkeypatch) == 7_200_000
    run.store.commit_initial("alpha", 1, 2)
    assert probed_bytes(run, monkeypatch) == 4 * 400_000 + 4096
    run.close()


def fails_for_want_of_room(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def probed_bytes(run, monkeypatch):
    sizes = []
    sync = os.fsync

    def traced(descriptor):
        sizes.append(os.fstat(descriptor).st_size)
        sync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr("syncer_service.store.durable.os.fsync", traced)
        run.store.probe()
    return sizes[0]


@pytest.mark.parametrize(
    "point",
    ["commit.in_payload_write", "commit.before_payload_sync", "commit.after_payload_sync", "commit.in_transaction"],
)
@pytest.mark.parametrize("base_interval", [1, 3])
def test_a_commit_that_fails_anywhere_can_be_made_again(tmp_path, point, base_interval):
    run = TestRun(tmp_path / "failing", base_interval).begin().commits(4)
    before = run.store.newest()
    for _ in range(3):
        failpoints.arm(f"{point}=enospc@1")
        with pytest.raises(StorageError, match="No space left on device"):
            run.commit()
        assert_same_commits(before, run.store.newest())
        failpoints.arm("")
        run.commit()
        before = run.store.newest()
    run.commits(3)
    twin = TestRun(tmp_path / "twin", base_interval).begin().commits(10)
    assert_same_commits(twin.store.newest(), run.store.newest())
    run.close()
    assert_same_commits(twin.store.newest(), run.open().restored().fragments)
    run.close()
    twin.close()


@pytest.mark.parametrize("base_interval", [1, 3])
def test_a_crash_after_a_failure_leaves_what_was_committed(tmp_path, base_interval):
    run = TestRun(tmp_path, base_interval).begin().commits(4)
    before = run.store.newest()
    failpoints.arm("commit.before_payload_sync=enospc@1")
    with pytest.raises(StorageError):
        run.commit()
    run.close()
    restored = run.open().restored()
    assert restored.losses == ()
    assert_same_commits(before, restored.fragments)
    run.close()


def test_a_file_whose_sync_failed_is_never_written_to_again(tmp_path, monkeypatch):
    run = TestRun(tmp_path, base_interval=8).begin().commits(4)
    before = run.store.newest()
    size = sizes(tmp_path)
    sync = os.fsync

    def fail(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("syncer_service.store.payloads.os.fsync", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        run.commit()
    monkeypatch.setattr("syncer_service.store.payloads.os.fsync", sync)
    assert_same_commits(before, run.store.newest())
    run.commit()
    assert sorted(set(sizes(tmp_path)) - set(size)) == ["0000/1.4.1.seg"]
    after = run.store.newest()
    run.close()
    assert_same_commits(after, run.open().restored().fragments)
    run.close()


def sizes(folder):
    fragments = Path(folder) / "fragments"
    return {str(path.relative_to(fragments)): path.stat().st_size for path in fragments.rglob("*.seg")}


def test_a_transaction_of_which_it_is_not_known_whether_it_is_durable_keeps_its_payload(tmp_path, monkeypatch):
    """Its rows may be found committed after a crash; then they need the record."""
    run = TestRun(tmp_path, base_interval=8).begin().commits(4)
    before = sizes(tmp_path)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC

    def fail(*arguments):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("syncer_service.store.ledger.Ledger.put_state", fail)
        with pytest.raises(StorageError, match="disk I/O error"):
            run.commit()
    assert sizes(tmp_path)["0000/1.1.1.seg"] > before["0000/1.1.1.seg"]
    run.commits(2)
    after = run.store.newest()
    run.close()
    restored = run.open().restored()
    assert restored.losses == ()
    assert_same_commits(after, restored.fragments)
    run.close()


def test_a_record_of_an_attempt_that_failed_is_not_taken_for_a_round_that_was_lost(tmp_path, monkeypatch):
    run = TestRun(tmp_path, base_interval=8).begin().commits(4)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
    with monkeypatch.context() as patched:
        patched.setattr("syncer_service.store.ledger.Ledger.put_state", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(StorageError):
            run.commit()
    run.commits(2)
    after = run.store.newest()
    with monkeypatch.context() as patched:  # a commit that is cut short
        patched.setattr("syncer_service.store.ledger.Ledger.transaction", lambda self: 1 / 0)
        patched.setattr("syncer_service.store.payloads.FragmentFiles.undo", lambda *_: None)
        with pytest.raises(ZeroDivisionError):
            run.commit()
    run.close()
    restored = run.open().restored()
    assert restored.losses == ()
    assert_same_commits(after, restored.fragments)
    run.close()


def test_a_segment_that_somebody_removed_or_changed_is_not_appended_to(tmp_path):
    run = TestRun(tmp_path, base_interval=8).begin().commits(4)
    folder = tmp_path / "fragments"
    (folder / "0000" / "1.1.1.seg").unlink()
    with (folder / "0001" / "1.1.1.seg").open("ab") as file:
        file.write(b"something")
    run.commits(2)
    assert {"0000/1.4.1.seg", "0001/1.4.1.seg"} <= set(sizes(tmp_path))
    after = run.store.newest()
    run.close()
    assert_same_commits(after, run.open().restored().fragments)
    run.close()


@pytest.mark.parametrize("name", ["file", "file/state", "link"])
def test_a_directory_that_cannot_be_made_is_said(tmp_path, name):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StateError, match=f"cannot write to .*/{name}: Not a directory$"):
        TestRun(tmp_path / name).open()


def test_a_disk_that_is_full_at_the_start_is_said(disk):
    if isinstance(disk, DiskByFailpoint):
        pytest.skip("needs a file system of its own")
    path = disk.folder / "state"
    TestRun(path).begin().commits(3).close()
    disk.fill()
    with pytest.raises(StateError, match="(No space left on device|database or disk is full|disk I/O error); 0 bytes"):
        TestRun(path).open()
    disk.free()
    assert TestRun(path).open().restored().state.versions[0].number > 1


def take_away(path):
    path.rename(path.with_name("aside"))


def take_the_ledger_away(path):
    (path / "ledger.sqlite3").rename(path / "aside")


def put_a_copy_in_place(path):
    take_away(path)
    shutil.copytree(path.with_name("aside"), path)


@pytest.mark.parametrize("disturb", [take_away, take_the_ledger_away, put_a_copy_in_place])
def test_nothing_is_committed_into_a_directory_that_was_taken_away(tmp_path, disturb):
    path = tmp_path / "state"
    run = TestRun(path).begin().commits(3)
    before = run.store.newest()
    disturb(path)
    commit, delta, row, state = run.next_round()
    with pytest.raises(StorageError, match="was moved, removed or replaced under this syncer"):
        run.store.commit_round(commit, delta, row, state)
    for write in (run.store.probe, lambda: run.store.save_state(state)):
        with pytest.raises(StorageError, match="was moved, removed or replaced"):
            write()
    assert_same_commits(before, run.store.newest())
    if disturb is take_away:
        assert not path.exists()
        path.with_name("aside").rename(path)
        run.store.probe()
        run.commits(2)
        after = run.store.newest()
        run.close()
        assert_same_commits(after, run.open().restored().fragments)
    run.close()
