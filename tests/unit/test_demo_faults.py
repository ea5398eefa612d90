"""The demo undoes its faults by time: with a quorum of everybody no step is made until the killed learner is back."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from demo.__main__ import _note_rejoins, _undo
from demo.plan import Plan


def test_a_killed_learner_is_started_again_though_the_run_makes_no_steps():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    started, marks = [], []
    processes = SimpleNamespace(running={"b": ended}, start_learner=started.append)
    sample = SimpleNamespace(learner=lambda name: None)
    watch = SimpleNamespace(seconds=lambda: 10.0, samples=[sample], mark=lambda *mark: marks.append(mark))
    screen = SimpleNamespace(say=lambda text: None)
    undo_at, rejoining = {"b": 11.0}, {}
    _undo(processes, watch, screen, rejoining, undo_at)
    assert started == []
    undo_at["b"] = 9.0
    _undo(processes, watch, screen, rejoining, undo_at)
    assert started == ["b"]
    assert marks == [("start", "b")]
    assert rejoining == {"b": (10.0, 0)}
    assert undo_at == {}


def test_every_planned_fault_is_one_that_is_undone():
    plan = Plan(Path("runs"), ("a", "b", "c"), quorum=3, seconds=100.0, total_steps=1000)
    assert [fault.action for fault in plan.faults] == ["kill", "kill", "suspend"]


def test_a_killed_syncer_is_started_again_on_its_state():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    started = []
    processes = SimpleNamespace(running={"syncer": ended}, start_syncer=lambda: started.append("syncer"))
    sample = SimpleNamespace(run=SimpleNamespace(rounds_committed_count=7))
    watch = SimpleNamespace(seconds=lambda: 10.0, samples=[sample], mark=lambda *mark: None, syncer_back_seconds=[])
    screen = SimpleNamespace(say=lambda text: None)
    rejoining = {}
    _undo(processes, watch, screen, rejoining, {"syncer": 9.0})
    assert started == ["syncer"]
    assert rejoining == {"syncer": (10.0, 7)}
    _note_rejoins(watch, processes, rejoining, [], screen)
    assert watch.syncer_back_seconds == []
    sample.run.rounds_committed_count = 8
    _note_rejoins(watch, processes, rejoining, [], screen)
    assert watch.syncer_back_seconds == [0.0]
    assert rejoining == {}
