"""Every scenario prints what its file says. In the order of their numbers they read as a tutorial of the protocol.

After a deliberate change: `pytest tests/scenarios --rewrite`, then read the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.learner_driver import LearnerDriver
from tests.scenarios.scenario_file import Command, parse_blocks, parse_command, run
from tests.scenarios.syncer_driver import SyncerDriver

FILES = sorted(Path(__file__).parent.glob("*.txt"))


class Machines:
    """What a scenario drives: the machine that its newest `run` or `learner` command made."""

    def __init__(self) -> None:
        self._driver: SyncerDriver | LearnerDriver | None = None

    def execute(self, command: Command) -> list[str]:
        if command.name in ("run", "learner"):
            self._driver = (SyncerDriver if command.name == "run" else LearnerDriver)(command.options)
            return []
        assert self._driver is not None, "a scenario begins with `run` or `learner`"
        return self._driver.execute(command)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text(encoding="utf-8")
    printed = run(text, Machines().execute)
    if request.config.getoption("--rewrite"):
        path.write_text(printed, encoding="utf-8")
        return
    assert printed == text, f"{path.name} prints something else now; --rewrite shows what"


def test_the_tutorial_is_numbered_without_gaps_and_every_file_begins_with_prose() -> None:
    assert [int(path.stem.split("-")[0]) for path in FILES] == list(range(1, len(FILES) + 1))
    assert len(FILES) >= 32
    for path in FILES:
        assert path.read_text(encoding="utf-8").startswith("# "), path.name


def test_a_file_is_read_block_by_block() -> None:
    blocks = list(parse_blocks("# why\nrun P=2\n----\nnothing\n\n# only prose\n"))
    assert [(block.prose, block.command, block.output) for block in blocks] == [
        (("# why",), "run P=2", ("nothing",)),
        (("# only prose",), "", ()),
    ]
    command = parse_command("at 1.5 receive a round=1 nonfinite")
    assert (command.name, command.words, command.options) == ("receive", ("a",), {"round": "1"})
    assert (command.flags, command.at) == ({"nonfinite"}, 1.5)


def test_a_block_without_its_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="join a"):
        list(parse_blocks("join a\nanswer: admitted\n"))
