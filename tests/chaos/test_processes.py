"""The supervisor of a chaos run tells of every end, whoever made it look."""

import signal
import subprocess
import sys
import time

import pytest

from chaos.plan import Plan
from chaos.processes import Processes, Program


@pytest.fixture
def supervised(tmp_path):
    processes = Processes(Plan(tmp_path, 1, 10.0, ()), (1, 2, 3), {}, {})
    for name in ("alpha", "beta"):
        sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        processes.programs[name] = Program(["no_such_module"], {}, process=sleeping, is_wanted=False)
    yield processes
    processes.stop_all()


def test_an_end_that_is_found_while_another_one_is_killed_is_told_at_the_next_look(supervised):
    alpha = supervised.programs["alpha"].process
    supervised.expect_death("alpha")
    alpha.send_signal(signal.SIGKILL)
    alpha.wait()
    supervised.kill("beta", time.monotonic() + 1000)
    assert [(ended.name, ended.code, ended.was_meant) for ended in supervised.look()] == [
        ("alpha", -signal.SIGKILL, True),
        ("beta", -signal.SIGKILL, True),
    ]
    assert supervised.look() == []


def test_an_end_that_nobody_meant_is_said_to_be_one(supervised):
    alpha = supervised.programs["alpha"].process
    alpha.send_signal(signal.SIGKILL)
    alpha.wait()
    assert [(ended.name, ended.was_meant) for ended in supervised.look()] == [("alpha", False)]
