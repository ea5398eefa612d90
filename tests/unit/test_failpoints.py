"""Failpoints: what they do when armed, and that the table and the code name the same ones."""

from __future__ import annotations

import ast
import errno
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.config import ConfigError
from tests.tidy.source_tree import PACKAGES, parse, python_files


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def hits_that_fail(count: int) -> list[int]:
    """Which of so many hits of the point `publish` raised ENOSPC."""
    failed = []
    for number in range(1, count + 1):
        try:
            failpoints.hit("publish")
        except OSError as error:
            failed += [number] if error.errno == errno.ENOSPC else []
    return failed


@pytest.mark.parametrize(("when", "failed"), [("3", [3]), ("2+", [2, 3, 4, 5]), ("1", [1]), ("9", [])])
def test_a_point_acts_at_the_hits_that_were_named(when, failed):
    failpoints.arm(f"publish=enospc@{when}")
    assert hits_that_fail(5) == failed


def test_nothing_armed_nothing_happens():
    assert hits_that_fail(3) == []
    failpoints.arm("commit.after_transaction=enospc@1")
    assert hits_that_fail(3) == []


def test_a_point_acts_as_long_as_a_file_exists(tmp_path):
    failpoints.arm(f"publish=enospc@{tmp_path / 'full'}")
    assert hits_that_fail(2) == []
    (tmp_path / "full").touch()
    assert hits_that_fail(2) == [1, 2]
    (tmp_path / "full").unlink()
    assert hits_that_fail(2) == []


def test_a_point_may_have_several_rules():
    failpoints.arm("publish=enospc@2,publish=enospc@4")
    assert hits_that_fail(5) == [2, 4]


def test_a_delay_delays(monkeypatch):
    waited = []
    monkeypatch.setattr(failpoints.time, "sleep", waited.append)
    failpoints.arm("publish=delay:0.25@2, commit.after_transaction=delay:3@1")
    failpoints.hit("publish")
    failpoints.hit("publish")
    failpoints.hit("commit.after_transaction")
    assert waited == [0.25, 3.0]


KILLED = """
from decoupled_diloco.runtime import failpoints
failpoints.arm("publish=kill@2")
failpoints.hit("publish")
print("once", flush=True)
failpoints.hit("publish")
print("twice", flush=True)
"""


def test_a_kill_leaves_the_process_no_moment():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.endswith("once\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("publish", "'publish' cannot be read; write POINT=ACTION@WHEN"),
        ("publish=explode@1", "'publish=explode@1' cannot be read"),
        ("publish=kill", "cannot be read"),
        ("publish=delay@1", "cannot be read"),
        ("nowhere=kill@1", "there is no point 'nowhere'; there are commit.in_payload_write"),
    ],
)
def test_what_cannot_be_armed_is_said(text, complaint):
    failpoints.arm("publish=enospc@1")
    with pytest.raises(ConfigError, match=complaint):
        failpoints.arm(text)
    assert hits_that_fail(1) == [1]  # what was armed before still is


def named_in_code() -> dict[str, str]:
    """Point by the place that hits it."""
    found = {}
    for path in python_files(*PACKAGES):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.hit":
                [name] = node.args
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: the name of a failpoint is a literal"
                found[f"{path}:{node.lineno}"] = name.value
    return found


def test_the_table_and_the_code_name_the_same_points():
    assert sorted(set(named_in_code().values())) == sorted(failpoints.POINTS)


def test_every_point_has_a_sentence():
    assert [name for name, text in failpoints.POINTS.items() if not text.endswith(".")] == []
