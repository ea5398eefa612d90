"""What the benchmark suite leaves behind, however it ends."""

import ast
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import figures, places
from benchmarks.ending import Ended, ended_by_signals, undisturbed
from benchmarks.record import Failure, Results
from benchmarks.suite import run_members
from benchmarks.syncer_rig import SyncerProcess, run_values
from benchmarks.tied import tied
from tests.unit.benchmark_members import GOOD, SECTION, littering, member, results_of

WAIT_SECONDS = 30

SUITE = """
import sys
from benchmarks import __main__ as program
from tests.unit.benchmark_members import member
members = [member(name, text) for name, text in {members!r}]
program.chosen = lambda only, is_quick: members
sys.exit(program.main(sys.argv[1:]))
"""


def wait_until(is_so):
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid):
    """Whether a process is there and has not ended; whoever adopts an orphan may reap it late."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextlib.contextmanager
def suite(tmp_path, *members, **settings):
    """The suite as a program with these members, as (name, text)."""
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", SUITE.format(members=members), "--quick", "--output", str(tmp_path / "results")]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=places.ROOT, env=environment, text=True, **pipes, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda item: str(item),
)
def test_an_interrupted_suite_ends_its_processes_removes_its_files_and_keeps_earlier_results(tmp_path, number, status):
    folder, note = tmp_path / "results" / "quick", tmp_path / "note"
    folder.mkdir(parents=True)
    program.write(results_of(SECTION, is_quick=True), folder)
    (folder / "wire.png").write_bytes(b"a picture")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with suite(tmp_path, ("endless", littering(note))) as process:
        wait_until(note.exists)
        process.send_signal(number)
        output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == status, output
    assert "Nothing was measured" in output
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    left = json.loads(note.read_text())
    wait_until(lambda: not any(is_alive(pid) for pid in left["pids"]))
    assert [path for path in left["folders"] if Path(path).exists()] == []
    assert list((tmp_path / "tmp").iterdir()) == []


def test_nothing_outlives_a_suite_that_is_killed(tmp_path):
    note = tmp_path / "note"
    with suite(tmp_path, ("endless", littering(note))) as process:
        wait_until(note.exists)
        left = json.loads(note.read_text())
        assert all(is_alive(pid) for pid in left["pids"])
        process.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in left["pids"]))
    for folder in left["folders"]:
        place = next(part for part in Path(folder).parents if part.name.startswith("benchmarks-"))
        places.shutil.rmtree(place, ignore_errors=True)


def test_an_interrupted_suite_keeps_what_it_has_measured(tmp_path):
    interrupting = littering(tmp_path / "note", "os.kill(os.getppid(), 15); threading.Event().wait()")
    with suite(tmp_path, ("good", GOOD), ("endless", interrupting)) as process:
        output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 143, output
    found = Results.from_json(json.loads((tmp_path / "results" / "quick" / "latest.json").read_text()))
    assert found.sections == [SECTION]
    assert "interrupted" in found.failures[0].reason


def test_a_reader_of_the_output_that_goes_away_loses_no_figures(tmp_path):
    note = tmp_path / "note"
    waiting = f"import pathlib, time\nwhile not pathlib.Path({str(note)!r}).exists(): time.sleep(0.01)\n" + GOOD
    with suite(tmp_path, ("good", waiting)) as process:
        process.stdout.readline()
        process.stdout.close()
        note.touch()
        process.wait(timeout=WAIT_SECONDS)
    found = Results.from_json(json.loads((tmp_path / "results" / "quick" / "latest.json").read_text()))
    assert found.sections == [SECTION]
    assert "Broken pipe" in found.failures[0].reason
    assert process.returncode == 1
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_member_that_is_ended_for_time_leaves_no_files(tmp_path, monkeypatch):
    note = tmp_path / "note"

    class Impatient(subprocess.Popen):
        """Its time is over once there is something to leave behind."""

        def wait(self, timeout=None):
            if timeout is not None:
                wait_until(note.exists)
            return super().wait(timeout and 0.01)

    monkeypatch.setattr(subprocess, "Popen", Impatient)
    results = Results(is_quick=True)
    with places.temporary_places() as (folder, environment):
        slow = member("slow", littering(note))
        run_members([slow], results, folder, {}, lambda who, outcome: None, environment)
        left = json.loads(note.read_text())
        assert not Path(left["folders"][0]).exists()
    assert "it was ended after 90 seconds" in results.failures[0].reason
    assert [path for path in left["folders"] if Path(path).exists()] == []
    wait_until(lambda: not any(is_alive(pid) for pid in left["pids"]))


def test_a_syncer_does_not_outlive_whoever_has_started_it():
    text = """
import threading
from benchmarks.syncer_rig import SyncerProcess, run_values
syncer = SyncerProcess(run_values()).__enter__()
print(syncer.process.pid, syncer.folder, flush=True)
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", text], cwd=places.ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid, folder = parent.stdout.readline().split()
        assert is_alive(pid)
        parent.kill()
    wait_until(lambda: not is_alive(pid))
    places.shutil.rmtree(folder)


def test_a_tied_command_is_the_same_process_and_gets_what_it_is_given():
    text = "import os, sys; print(os.getpid(), sys.argv[1:])"
    with subprocess.Popen(tied([sys.executable, "-c", text, "a b", ""]), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.read().strip() == f"{child.pid} ['a b', '']"
    command = tied(["true"])
    command[command.index(str(os.getpid()))] = "1"
    assert "the parent 1 has ended" in subprocess.run(command, capture_output=True, text=True).stderr


def test_every_process_that_a_benchmark_leaves_running_is_tied_to_it():
    started = []
    for path in sorted((places.ROOT / "benchmarks").rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        popens = [call for call in calls if ast.unparse(call.func).endswith("Popen")]
        started += [(path.name, ast.unparse(call.args[0])) for call in popens]
    assert len(started) >= 8
    assert [(name, command) for name, command in started if not command.startswith("tied(")] == []


def test_signals_are_raised_within_and_as_before_after_it():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)  # nohup
            with undisturbed():
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(Ended, match="SIGTERM"):
                signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before[1])
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_benchmark_by_itself_that_is_told_to_end_tidies_up(tmp_path, capsys):
    def measure(quick):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            (tmp_path / "tidied").touch()

    assert figures.run(measure, None, ["--json", str(tmp_path / "out.json")]) == 143
    assert (tmp_path / "tidied").exists()
    assert "there are no figures" in capsys.readouterr().err


def test_a_partial_run_replaces_what_it_measures_and_keeps_the_rest(tmp_path):
    one, two, three = (dataclasses.replace(SECTION, name=name, title=name) for name in ("wire", "capacity", "start"))
    names = ["wire", "capacity", "start", "quality"]
    full = results_of(one, two, three, seconds={"wire": 1.0, "capacity": 2.0})
    for section in full.sections:
        full.origins[section.name] = dataclasses.replace(
            full.origins[section.name], taken_at="2020-01-01T00:00:00+00:00", versions=full.versions | {"numpy": "0.9"}
        )
    new = dataclasses.replace(two, title="measured again")
    again = results_of(new, seconds={"capacity": 3.0}, failures=[Failure("start", "no", "")])
    merged = again.over(full, names)
    assert merged.sections == [one, new, three]
    assert merged.seconds == {"wire": 1.0, "capacity": 3.0}
    assert merged.left_out == ["quality"]
    assert [origin.taken_at[:4] == "2020" for origin in merged.origins.values()] == [True, False, True]
    program.write(merged, tmp_path)
    assert Results.from_json(json.loads((tmp_path / "latest.json").read_text())) == merged
    page = (tmp_path / "latest.md").read_text()
    assert page.count("Taken at 2020-01-01T00:00:00+00:00 with numpy 0.9") == 2
    assert again.over(None, names).left_out == ["wire", "quality"]


def test_results_that_a_run_must_not_replace_are_refused_beforehand(tmp_path, capsys):
    def refused(*arguments):
        with pytest.raises(SystemExit) as ended:
            program.main(["--only", "wire", *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    quick = tmp_path / "quick"
    quick.mkdir()
    program.write(results_of(SECTION, is_quick=False), quick)
    said = refused("--quick", "--output", str(tmp_path))
    assert "latest.json is of a full run, and a quick run would take its place" in said
    (quick / "latest.json").write_text('{"format": 0}')
    said = refused("--output", str(quick))
    assert "format = 0: this program reads 2" in said
    assert "move it away" in said


def test_a_folder_that_cannot_be_written_is_noticed_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "run_members", lambda *_: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    for act, option, why in (
        (program.main, "--output", "Not a directory"),
        (lambda rest: figures.run(pytest.fail, None, rest), "--json", "it is no folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            act([option, str(tmp_path / "file" / "results")])
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert option in said
        assert f"cannot be written: {why}" in said


def test_a_temporary_folder_that_is_full_is_noticed_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "run_members", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(places, "free_mib", lambda folder: 199)
    for option, needed in ((["--quick"], 200), ([], 2048)):
        with pytest.raises(SystemExit) as ended:
            program.main([*option, "--output", str(tmp_path)])
        assert ended.value.code == 2
        assert (
            f"199 MiB free, a {'quick' if option else 'full'} run takes up to {needed} MiB" in capsys.readouterr().err
        )
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    with pytest.raises(places.PlaceError, match="TMPDIR=.*absent: cannot be written"):
        places.check_temporary(True)


def test_a_disk_that_is_full_meanwhile_is_named_where_a_member_or_a_syncer_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "free_mib", lambda folder: 3)
    results = Results(is_quick=True)
    run_members([member("bad", "raise SystemExit(1)")], results, tmp_path, {}, lambda who, outcome: None)
    assert f"status 1; {tmp_path / 'bad'} is full: 3 MiB free" in results.failures[0].reason
    with pytest.raises(RuntimeError, match="not started; .* is full: 3 MiB free"), SyncerProcess(run_values()):
        pass
