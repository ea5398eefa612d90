"""The learner's journal: what a reader finds, also after a sudden end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Activity, Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.learner_effects import Apply, Copy
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.clock import ManualClock
from decoupled_diloco.runtime.config import ConfigError
from learner_service import journal as journal_module
from learner_service.activity import ActivityAccount
from learner_service.handover import Handover
from learner_service.journal import Journal

VERSION = Version(1, 4, "d4")


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_line_says_when_and_what_and_arrays_become_digests(tmp_path):
    clock = ManualClock(5.0)
    path = tmp_path / "deep" / "a.jsonl"
    journal = Journal(path, "a", clock)
    values = np.arange(7, dtype=np.float32)
    journal.step(1, 3, 9, 64)
    clock.advance(0.25)
    journal.boundary(1, None)
    journal.boundary(1, "paused")  # another look within the same boundary is no second one
    journal.contribution(1, 17, Copy(2, VERSION, 3, 192, 2, 128, 9))
    journal.fate(1, 17, 2, "accepted")
    journal.applied(1, Apply(2, VERSION, 40, "carry", None, 64), values, 3, 192)
    journal.close()
    journal.step(1, 4, 10, 64)  # after the end: nothing
    started, step, boundary, contribution, fate, applied, ended = lines_of(path)
    assert ended["kind"] == "ended"
    assert (started["kind"], started["learner"], started["process"]) == ("started", "a", os.getpid())
    assert step == {"t": 5.0, "kind": "step", "generation": 1, "local_step": 3, "cursor": 9, "tokens": 64}
    assert boundary == {"t": 5.25, "kind": "boundary", "generation": 1, "seconds": 0.25, "hold": None}
    assert contribution["base"] == [1, 4, "d4"]
    assert (contribution["step_count"], contribution["total_token_count"], contribution["cursor"]) == (2, 192, 9)
    assert (fate["round"], fate["fragment"], fate["fate"]) == (17, 2, "accepted")
    assert applied["digest"] == vector_digest(values)
    assert (applied["version"], applied["kept_token_count"], applied["rule"]) == ([1, 4, "d4"], 64, "carry")


def test_without_a_path_nothing_is_written_and_no_thread_runs(tmp_path):
    journal = Journal()
    journal.recovery(1, "no reason")
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_queue_drops_lines_and_says_how_many(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "LINES_MAX", 0)
    journal = Journal(tmp_path / "a.jsonl", "a")
    for step in range(5):
        journal.step(1, step, step, 1)
    monkeypatch.setattr(journal_module, "LINES_MAX", 10)
    journal.recovery(1, "room again")
    journal.close()
    kinds = {line["kind"]: line for line in lines_of(tmp_path / "a.jsonl")}
    assert kinds["dropped"]["count"] == 6  # the line of the start, too
    assert "recovery" in kinds


def test_a_line_that_was_cut_off_does_not_spoil_the_next_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"t":1.0,"kind":"st')
    Journal(path, "a").close()
    cut, started, _ = path.read_text().splitlines()
    assert cut == '{"t":1.0,"kind":"st'
    assert json.loads(started)["kind"] == "started"


def test_a_file_that_cannot_be_written_names_the_setting(tmp_path):
    with pytest.raises(ConfigError, match="learner.journal = .*cannot be written: Is a directory"):
        Journal(tmp_path, "a")


KILLED = """
import os, signal, sys
from pathlib import Path
from learner_service.journal import Journal
path = Path(sys.argv[1])
journal = Journal(path, "a")
journal.step(1, 1, 1, 8)
while b'"step"' not in path.read_bytes():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_written_survives_a_sigkill(tmp_path):
    path = tmp_path / "a.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [line["kind"] for line in lines_of(path)] == ["started", "step"]


def test_the_handover_tells_of_steps_boundaries_waits_and_recoveries(tmp_path):
    clock = ManualClock(0.0)
    journal = Journal(tmp_path / "a.jsonl", "a", clock)
    machine = LearnerMachine(Policy(fragment_count=2, interval_steps=4), cursor=10)
    handover = Handover(machine, ActivityAccount(Activity.STARTUP, 0.0), clock, journal)
    handover.handle(lev.RecoverAsked("the loss is not finite"))
    handover.finish_step(32)
    plan = handover.plan()
    handover.publish(plan)
    handover.wake_device()
    handover.wait_for_news(plan)
    journal.close()
    recovery, step, boundary, waited = lines_of(tmp_path / "a.jsonl")[1:-1]
    assert recovery["reason"] == "the loss is not finite"
    assert (step["local_step"], step["cursor"], step["tokens"]) == (1, 11, 32)
    assert boundary["hold"] == waited["hold"] == "recovering"
