"""Runs that were kept: every tape in `tapes` replays to the effects that it has.

A tape of a run in which something went wrong becomes one of them with `python -m syncer_service.replay TAPE
--as-scenario tests/scenarios/tapes/NAME.tape`. After a deliberate change: `pytest tests/scenarios --rewrite`, then read
the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from syncer_service.replay.__main__ import write_scenario
from syncer_service.replay.comparison import replay
from syncer_service.replay.words import difference_lines
from syncer_service.tape_file import TapeFile

FILES = sorted((Path(__file__).parent / "tapes").glob("*.tape"))
FILE_BYTES_MAX = 150_000


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tape(path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite"):
        fresh = path.with_suffix(".new")
        write_scenario(TapeFile(path), fresh)
        fresh.replace(path)
        return
    tape = TapeFile(path)
    result = replay(tape)
    told = "" if result.difference is None else "\n".join(difference_lines(result.difference))
    assert result.difference is None, f"{path.name} goes another way now; --rewrite stores it\n{told}"
    assert tape.is_whole
    assert result.effect_count > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_kept_tape_is_a_short_text_that_any_release_can_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < FILE_BYTES_MAX
    assert TapeFile(path).header.beginning.began != "captured"


def test_there_are_tapes() -> None:
    assert FILES
