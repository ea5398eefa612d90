"""The tape's writing: files that follow one another, what is missed, full disks, sudden ends."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.clock import ManualClock
from syncer_service import tape as tape_module
from syncer_service.replay.comparison import replay
from syncer_service.tape import EventTape, open_tape
from syncer_service.tape_file import Beginning, TapeError, TapeFile, TapeHeader, tape_files

ROOT = Path(__file__).parents[2]
POLICY = Policy(fragment_count=2, interval_steps=4)


def until(condition) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.001)


class Run:
    """A machine on tape, with learners that report and report."""

    def __init__(self, folder: Path, **options) -> None:
        self.folder = folder
        self.clock = ManualClock(100.0)
        self.machine = SyncerMachine(POLICY)
        header = TapeHeader("1.2", 5, self.clock.wall_time(), POLICY, Beginning("new", 100.0))
        self.tape = EventTape(folder, self.machine, header, self.clock, **options)
        self.step = 0
        for request, name in enumerate("abc", 1):
            self.handle(ev.JoinRequested(request, name))
            self.handle(ev.LearnerAttached(name, request, (), ev.Progress(0, 0)))

    def handle(self, event: ev.Event) -> None:
        now = self.clock.now()
        self.tape.event(now, event)
        self.tape.effects(self.machine.handle(event, now))

    def report(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.advance(0.125)
            self.step += 1
            for incarnation, name in enumerate("abc", 1):
                progress = ev.Progress(self.step, 64 * self.step, loss=1.0 / self.step)
                self.handle(ev.ProgressReported(name, incarnation, progress))

    def drained(self) -> None:
        until(lambda: self.tape.figures().waiting_count == 0)

    def files(self) -> list[Path]:
        return tape_files(self.folder)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_module, "WRITE_SECONDS", 0.001)
    monkeypatch.setattr(tape_module, "CAPTURE_SECONDS_MIN", 0.0)


def replayed(path: Path):
    tape = TapeFile(path)
    result = replay(tape)
    assert result.difference is None
    return tape, result


def events_on_disk(run) -> int:
    try:
        return replayed(run.files()[0])[1].event_count
    except (IndexError, TapeError):
        return 0  # the file, or its first line, is not there yet


def test_a_file_with_its_share_is_followed_by_one_that_stands_alone_and_the_oldest_goes(tmp_path):
    run = Run(tmp_path, bytes_max=80_000)
    first = None
    while first is None or first.exists():
        run.report(20)
        run.drained()
        first = first or next(iter(run.files()), None)
        assert sum(path.stat().st_size for path in run.files()) < 100_000
    run.tape.close()
    files = run.files()
    assert len(files) >= 4
    assert run.tape.figures().missed_count == 0
    before = None
    for path in files:
        tape, result = replayed(path)
        assert tape.is_whole
        assert (tape.header.beginning.began, tape.header.missed_count) == ("captured", 0)
        if before is not None:
            assert tape.machine().run_state() == before
        before = result.machine.run_state()
    assert before == run.machine.run_state()


def test_the_next_start_of_a_syncer_counts_its_file_on(tmp_path):
    machine, clock = SyncerMachine(POLICY), ManualClock()
    for epoch in (1, 2):
        beginning = Beginning("new", 0.0)
        open_tape(tmp_path, machine, beginning, epoch=epoch, software_version="1", clock=clock).close()
    assert [path.name for path in tape_files(tmp_path / "tape")] == ["000001-1.tape", "000002-2.tape"]
    assert open_tape(tmp_path, machine, beginning, epoch=3, software_version="1", clock=clock, bytes_max=0) is None


def test_events_beyond_the_queue_are_missed_and_counted_and_a_new_file_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(tape_module, "WRITE_SECONDS", 30.0)
    run = Run(tmp_path, queue_events_max=10)
    run.report(10)  # 36 events with those of the joins
    assert run.tape.figures().missed_count == 26
    monkeypatch.setattr(tape_module, "WRITE_SECONDS", 0.001)
    run.tape._stopping.set()  # the one long wait of the writing thread
    run.tape._thread.join(20)
    (path,) = run.files()
    tape, result = replayed(path)
    assert result.event_count == 10
    assert "missed" in tape.ended


def test_once_there_is_room_the_tape_goes_on_with_the_machine_of_then(tmp_path):
    run = Run(tmp_path, queue_events_max=10)
    run.drained()
    while run.tape.figures().missed_count == 0:
        run.report(1000)
    with capture_logs() as logs:
        missed = -1
        while missed < run.tape.figures().missed_count or len(run.files()) < 2:
            missed = run.tape.figures().missed_count
            run.report()
            run.drained()
    run.tape.close()
    first, *others = run.files()
    assert "missed" in replayed(first)[0].ended
    missed = sum(TapeFile(path).header.missed_count for path in others)
    assert missed == run.tape.figures().missed_count > 0
    assert [line["event"] for line in logs].count("tape_missed_events") >= 1
    _, result = replayed(others[-1])
    assert result.machine.run_state() == run.machine.run_state()


def test_a_full_disk_loses_nothing_that_the_queue_can_hold(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.report(50)
    run.drained()
    write, is_full = os.write, [True]

    def write_a_little(file: int, content: bytes) -> int:
        if is_full[0] and len(content) < 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, content[: len(content) // 2] if is_full[0] else content)

    monkeypatch.setattr("syncer_service.tape_file.os.write", write_a_little)
    with capture_logs() as logs:
        run.report(50)
        until(lambda: any(line["event"] == "tape_not_written" for line in logs))
        run.report(50)
        is_full[0] = False
        run.drained()
    run.tape.close()
    assert [line["event"] for line in logs].count("tape_not_written") == 1
    (path,) = run.files()
    tape, result = replayed(path)
    assert tape.is_whole
    assert result.event_count == 6 + 450
    assert run.tape.figures().missed_count == 0


def test_a_disk_that_stays_full_ends_the_tape_and_not_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path, queue_events_max=20)
    run.report(3)
    until(lambda: events_on_disk(run) > 0)

    def full(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("syncer_service.tape_file.os.write", full)
    while run.tape.figures().missed_count == 0:
        run.report(5)
    run.tape.close()
    (path,) = run.files()
    tape, result = replayed(path)
    assert not tape.is_whole
    assert 0 < result.event_count < 100


def test_a_folder_that_cannot_be_made_is_logged_and_counted(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with capture_logs() as logs:
        run = Run(tmp_path / "file")
        run.report(2)
        run.tape.close()
    assert any(line["event"] == "tape_not_written" for line in logs)
    assert run.tape.figures().missed_count == 12
    assert run.tape.figures().written_bytes == 0


def test_an_event_that_cannot_be_written_down_costs_that_event_alone(tmp_path):
    run = Run(tmp_path)
    run.report(2)
    with capture_logs() as logs:
        run.handle(ev.ProgressReported("a", 1, ev.Progress(9, 9, loss=np.float32(1.5))))
        while len(run.files()) < 2:
            run.report()
            run.drained()
    run.tape.close()
    assert any("float32" in line.get("reason", "") for line in logs)
    first, second = run.files()
    tape, result = replayed(first)
    assert result.event_count == 12
    assert "could not be written down" in tape.ended
    assert replayed(second)[1].machine.run_state() == run.machine.run_state()
    assert TapeFile(second).header.missed_count >= 1


def test_a_machine_that_cannot_be_captured_does_not_end_the_run(tmp_path):
    run = Run(tmp_path, bytes_max=8_000)
    run.machine.in_the_way = lambda: None
    with capture_logs() as logs:
        while not any(line["event"] == "tape_machine_not_captured" for line in logs):
            run.report(10)
            run.drained()
    run.tape.close()
    assert run.tape.figures().missed_count == 0


def test_an_event_that_never_came_back_is_the_last_one_without_effects(tmp_path):
    run = Run(tmp_path)
    run.tape.event(run.clock.now(), ev.ResumeRequested(7))
    run.tape.close()
    (path,) = run.files()
    *_, last = list(TapeFile(path))
    assert last.event == ev.ResumeRequested(7)
    assert last.effects is None
    assert replayed(path)[1].event_count == 7


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.test_tape import Run
run = Run(Path(sys.argv[1]))
run.report(300)
run.drained()
run.report()
run.drained()  # so what was taken before is written
run.report(300)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_flushed_survives_a_sigkill(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (path,) = tape_files(tmp_path)
    tape, result = replayed(path)
    assert result.event_count >= 906
    assert not tape.is_whole


def test_a_replay_needs_neither_grpc_nor_arrays():
    code = (
        "import sys, syncer_service.replay.__main__\n"
        "print(sorted({'grpc', 'numpy', 'jax', 'aiohttp', 'google'} & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True, capture_output=True)
    assert done.stdout.decode().strip() == "[]"
