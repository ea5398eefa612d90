import os
import threading

import pytest

from benchmarks import profile
from benchmarks.samples import Share, Stack, cpu_by_thread, function_of, parsed, shares

RAW = """\
thread (71): bulk_0;run (threading.py:5);decode (decoupled_diloco/arrays/encoding.py:123) 30
thread (71): bulk_0;run (threading.py:5);decode (decoupled_diloco/arrays/encoding.py:129) 10
thread (71): bulk_0;run (threading.py:5);_worker (concurrent/futures/thread.py:81) 60
thread (70): MainThread;_serve (syncer_service/__main__.py:50);EpollSelector.select (selectors.py:468) 7
not a stack
"""


def test_stacks_of_the_profiler_are_read():
    stacks = parsed(RAW.splitlines())
    assert [stack.thread for stack in stacks] == [71, 71, 71, 70]
    assert stacks[0].name == "bulk_0"
    assert stacks[0].frames[-1] == "decode (decoupled_diloco/arrays/encoding.py:123)"
    assert [stack.count for stack in stacks] == [30, 10, 60, 7]


def test_a_thread_s_time_goes_to_the_functions_that_work():
    before = {71: ("python", 1.0), 72: ("event_engine", 0.5)}
    after = {71: ("python", 3.0), 72: ("event_engine", 0.75), 70: ("python", 0.125)}
    assert shares(parsed(RAW.splitlines()), before, after) == [
        Share("bulk", "decode (decoupled_diloco/arrays/encoding.py)", 2.0),
        Share("", "threads 'event_engine' without Python code", 0.25),
        Share("MainThread", "EpollSelector.select (selectors.py) < _serve (syncer_service/__main__.py)", 0.125),
    ]


def test_a_function_of_others_is_named_with_ours_that_called_it():
    assert function_of(("f (learner_service/a.py:1)", "g (grpc/b.py:2)")) == "g (grpc/b.py) < f (learner_service/a.py)"
    assert function_of(("g (grpc/b.py:2)", "f (learner_service/a.py:1)")) == "f (learner_service/a.py)"
    assert function_of(("g (grpc/b.py:2)",)) == "g (grpc/b.py)"
    assert function_of(()) == "?"


def test_linux_counts_the_time_of_threads():
    own = cpu_by_thread(os.getpid())[threading.get_native_id()]
    assert own[1] > 0


def test_transfers_and_the_merge_have_tables_of_their_own():
    taken = {
        "learner": [Share("MainThread", "send", 3.0)],
        "syncer": [Share("merge-loop", "combine", 5.5), Share("bulk", "copy", 1.0), Share("merge", "lead", 0.5)],
    }
    section = profile.section_of(1 << 30, 2, taken)
    values = {figure.name: figure.value for figure in section.figures}
    assert values == {
        "learner: processor time of transfers": 0.75,
        "syncer: processor time of transfers": 0.25,
        "syncer: of the merge": 3.0,
    }
    assert [table["rows"][0][0] for table in section.details["tables"]] == ["100.0 %", "100.0 %", "91.7 %"]


def test_without_a_profiler_it_says_so(monkeypatch):
    monkeypatch.setattr(profile, "PY_SPY", profile.ROOT / ".venv-bench-elsewhere" / "py-spy")
    section = profile.measure(True)
    assert section.figures == ()
    assert "make bench-env" in section.conditions


def test_a_stack_without_python_counts_to_its_thread():
    assert shares([Stack(1, "a", (), 4)], {}, {1: ("x", 1.0)}) == [Share("a", "?", 1.0)]
    assert pytest.approx(0.0) == sum(share.cpu_seconds for share in shares([], {1: ("x", 1.0)}, {1: ("x", 1.0)}))
