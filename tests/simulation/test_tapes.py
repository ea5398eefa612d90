"""Walks go through the tape's files and replay bit for bit: whole, restored, captured, cut, with a changed decision."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
from pathlib import Path

import pytest

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity
from decoupled_diloco.core.plain import from_plain, to_plain
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.clock import ManualClock
from syncer_service.replay.__main__ import main
from syncer_service.replay.comparison import replay
from syncer_service.tape import open_tape
from syncer_service.tape_file import Beginning, TapeError, TapeFile, captured
from tests.simulation.taped_walk import Taped, busy_walk_on_tape, files_of, walk_on_tape


def replay_command(*arguments: object) -> tuple[int, str]:
    out = io.StringIO()
    code = main([str(argument) for argument in arguments], out)
    return code, out.getvalue()


@pytest.mark.parametrize("seed", range(40, 52))
def test_a_walk_replays_bit_for_bit(seed: int, tmp_path: Path) -> None:
    walk, files = walk_on_tape(seed, tmp_path), files_of(tmp_path)
    assert len(files) == len(walk)
    for taped, path in zip(walk, files, strict=True):
        tape, events = TapeFile(path), []
        result = replay(tape, watch=lambda record, effects, kept=events: kept.append((record.at, record.event)))
        assert result.difference is None
        assert events == taped.events
        assert (tape.is_whole, tape.ended) == (True, "the syncer stopped")
        assert result.effect_count == len(taped.effects)
        assert result.machine.run_state() == taped.machine.run_state()
        figures = taped.tape.figures()
        assert (figures.missed_count, figures.written_bytes) == (0, path.stat().st_size)


def test_a_file_of_many_gzip_members_reads_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncer_service.tape_file.MEMBER_BYTES", 10_000)
    monkeypatch.setattr("syncer_service.tape.LINES_TEXT_MAX", 5_000)
    path, taped = busy_walk_on_tape(tmp_path)
    assert path.read_bytes().count(b"\x1f\x8b\x08") > 5
    assert [(record.at, record.event) for record in TapeFile(path)] == taped.events
    assert gzip.decompress(path.read_bytes()).count(b"\n") == len(taped.events) + 2


def interrupted(taped: Taped) -> tuple[RunState, tuple[fx.CommitRound, ...], float]:
    """A state from the middle of a walk, the rounds that were committed later, and when it stopped."""
    machine = SyncerMachine(taped.machine.policy)
    middle = len(taped.events) // 2
    for now, event in taped.events[:middle]:
        machine.handle(event, now)
    cut, known = machine.run_state(), machine.rounds.committed_count
    rows: list[fx.CommitRound] = []
    for now, event in taped.events[middle:]:
        rows += [effect for effect in machine.handle(event, now) if isinstance(effect, fx.CommitRound)]
    return cut, tuple(rows[: machine.rounds.committed_count - known]), now


def start_again(cut: RunState, newer: tuple[fx.CommitRound, ...], now: float, policy: Policy, folder: Path) -> None:
    """A syncer that is started again: its learners come back, step and join anew; nobody answers the rounds."""
    state = from_plain(RunState, json.loads(json.dumps(to_plain(cut))))
    beginning, clock = Beginning("restored", now, state=state, newer=newer), ManualClock(now)
    machine = SyncerMachine(policy)
    machine.restore(state, newer, now)
    tape = open_tape(folder, machine, beginning, epoch=4, software_version="1.2", clock=clock)
    assert tape is not None

    def handle(event: ev.Event) -> None:
        tape.event(now, event)
        tape.effects(machine.handle(event, now))

    there = [account for account in state.learners if not account.left]
    for account in there:
        progress = ev.Progress(account.local_step, account.seen_token_count, step_seconds=0.5)
        handle(ev.LearnerAttached(account.learner, account.incarnation, (), progress))
    for step in range(200):
        now += 0.25
        deadline = machine.next_deadline()
        if deadline is not None and deadline <= now:
            handle(ev.TimerFired())
        for account in there:
            local_step, tokens = account.local_step + step, account.seen_token_count + 512 * step
            progress = ev.Progress(local_step, tokens, step_seconds=0.25, spans=((Activity.COMPUTE, 0.25),))
            handle(ev.ProgressReported(account.learner, account.incarnation, progress))
    handle(ev.JoinRequested(1, "late"))
    tape.close()


def test_a_restarted_syncer_replays_from_the_state_and_the_rounds_that_are_newer(tmp_path: Path) -> None:
    _, taped = busy_walk_on_tape(tmp_path)
    cut, newer, now = interrupted(taped)
    assert newer
    start_again(cut, newer, now, taped.machine.policy, tmp_path)
    (path,) = files_of(tmp_path)
    assert path.name == "000001-4.tape"
    result = replay(TapeFile(path))
    assert result.difference is None
    assert result.event_count > 200
    assert result.machine.rounds.committed_count == cut.committed_count + len(newer)
    # without the newer rounds it is another machine, and the replay finds that
    forgetful = TapeFile(path)
    object.__setattr__(forgetful.header.beginning, "newer", ())
    assert replay(forgetful).difference is not None


def test_reading_the_machine_changes_nothing(tmp_path: Path) -> None:
    """Only events change it; or a tape would not be all that a replay needs."""
    _, taped = busy_walk_on_tape(tmp_path)
    machine = SyncerMachine(taped.machine.policy)
    for now, event in taped.events:
        machine.handle(event, now)
        before = captured(machine)
        machine.status(now + 1.0)
        machine.learners(now + 1.0)
        machine.list_rounds(1000, now=now + 1.0)
        machine.run_state()
        machine.published()
        machine.next_deadline()
        machine.rounds_in_flight_max()
        for record in machine.membership.everybody():
            machine.admits(record.learner, record.incarnation)
        machine.admits("nobody", 1)
        assert captured(machine) == before


@pytest.mark.parametrize("cut_share", [0.15, 0.4, 0.77, 0.999])
def test_a_file_that_was_cut_off_replays_as_far_as_it_goes(cut_share: float, tmp_path: Path) -> None:
    path, _ = busy_walk_on_tape(tmp_path)
    whole = replay(TapeFile(path)).event_count
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * cut_share)])
    tape = TapeFile(path)
    result = replay(tape)
    assert result.difference is None
    assert whole * cut_share * 0.5 < result.event_count <= whole
    assert not tape.is_whole
    assert "cut off" in tape.ended


def test_a_damaged_file_replays_up_to_the_damage_and_says_so(tmp_path: Path) -> None:
    path, _ = busy_walk_on_tape(tmp_path)
    whole = replay(TapeFile(path)).event_count
    content = bytearray(path.read_bytes())
    at = len(content) * 9 // 10
    content[at : at + 64] = b"\xff" * 64
    path.write_bytes(content)
    tape = TapeFile(path)
    count = sum(1 for _ in tape)
    assert 0 < count < whole
    assert not tape.is_whole
    assert "damaged" in tape.ended


def test_what_is_no_tape_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.tape"
    for content, message in (
        (b"", "this is no tape"),
        (b"\x1f\x8b\x08 and so on", "this is no tape"),
        (b'{"format":99}\n', "it has the format 99, and this release reads 1"),
        (b"[1]\n", "this is no tape"),
    ):
        path.write_bytes(content)
        with pytest.raises(TapeError, match=message):
            TapeFile(path)
    assert replay_command(path)[0] == 2
    assert "no tape" in capsys.readouterr().err
    assert replay_command(tmp_path / "absent.tape")[0] == 2


def test_a_changed_decision_is_found_and_told_with_what_came_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = busy_walk_on_tape(tmp_path)
    code, text = replay_command(path)
    assert code == 0
    assert "all as recorded" in text
    open_round = SyncerMachine.open_round
    monkeypatch.setattr(SyncerMachine, "open_round", lambda *arguments: open_round(*arguments)[1:])  # one is not asked
    code, text = replay_command(path)
    assert code == 1
    assert "NOT as recorded" in text
    assert "events before it:" in text
    assert "AskContribution" in text.split("effects then")[1]


def test_a_changed_field_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = busy_walk_on_tape(tmp_path)
    monkeypatch.setattr("decoupled_diloco.core.round.contribution_weight", lambda tokens, steps: float(tokens))
    code, text = replay_command(path)
    assert code == 1
    assert "they differ in contributions" in text


def test_a_machine_that_raises_is_told_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = busy_walk_on_tape(tmp_path)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(SyncerMachine, "open_round", fail)
    code, text = replay_command(path)
    assert code == 1
    assert "the machine raises (then it did not)" in text
    assert "ZeroDivisionError: planted" in text


def test_a_tape_can_be_looked_into_up_to_an_instant(tmp_path: Path) -> None:
    path, _ = busy_walk_on_tape(tmp_path)
    code, text = replay_command(path, "--until", "+12.5", "--show", "CommitRound", "--show", "JoinRequested")
    assert code == 0
    shown = [line for line in text.splitlines() if line[:1].isdigit() and "  " in line]
    assert shown
    assert all(float(line.split()[0]) <= 12.5 for line in shown if "events," not in line)
    assert "-> CommitRound(round=" in text
    assert "TimerFired" not in text
    assert "goodput" in text


def test_a_tape_becomes_a_text_that_replays_the_same(tmp_path: Path) -> None:
    path, _ = busy_walk_on_tape(tmp_path)
    kept = tmp_path / "kept.tape"
    code, _ = replay_command(path, "--as-scenario", kept, "--until", "+15")
    assert code == 0
    assert json.loads(kept.read_text().splitlines()[0])["beginning"]["began"] == "new"
    tape = TapeFile(kept)
    events = [(record.at, record.event) for record in tape]
    assert tape.is_whole
    assert events == [(record.at, record.event) for record in TapeFile(path) if record.at <= 15.0]
    assert replay(TapeFile(kept)).difference is None


class Stranger:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("executed",))


def test_a_captured_machine_is_made_of_the_core_alone(capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy()
    for content in (pickle.dumps(Stranger()), b"not a pickle", pickle.dumps({"a": 1})):
        beginning = Beginning("captured", 0.0, captured=base64.b64encode(content).decode())
        with pytest.raises(TapeError, match="captured machine"):
            beginning.machine(policy)
    assert capsys.readouterr().out == ""
