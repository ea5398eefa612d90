import json
import subprocess
import sys

import pytest

from benchmarks.decisions import kind_of, measure_decisions
from benchmarks.instants import Instants, read
from benchmarks.latency import COMMIT, STAGES, TRANSFER, Lines, path_figures, ways
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev

SYNCER = [
    ("start_merge", 7, 1.000, 1.001),
    ("merge", (), 1.002, 1.004),
    ("commit_round", [7, 3, 2], 1.0045, 1.005),
    ("commit", 7, 1.006, 1.016),
    ("publish", [3, 2], 1.0165, 1.017),
    ("serve", ["alpha", 3, 2], 1.020, 1.030),
]
LEARNER = [
    ("news", [3, 2], 1.0274, 1.0275),
    ("header", (), 1.0215, 1.022),
    ("received", (), 1.026, 1.027),
    ("decode", (), 1.0275, 1.028),
    ("stage", (), 1.028, 1.029),
    ("hand_over", [3, 2], 1.029, 1.030),
]


def lines_of(path, entries):
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '["half a li', encoding="utf-8")
    return Lines(path)


def test_a_way_leads_from_grace_closed_to_the_hand_over_slot(tmp_path):
    syncer = lines_of(tmp_path / "syncer", SYNCER)
    (way,) = ways(syncer, {"alpha": lines_of(tmp_path / "alpha", LEARNER)})
    assert way.total == pytest.approx(0.030)
    assert len(way.stages) == len(STAGES)
    assert way.stages[COMMIT] == pytest.approx(0.010)
    assert way.stages[TRANSFER] == pytest.approx(0.0055)
    assert way.overhead == pytest.approx(0.0145)
    assert sum(way.stages) == pytest.approx(way.total)
    overhead, total, *stages, in_advance = path_figures([way], "1 learner")
    assert (overhead.value, total.value) == (pytest.approx(14.5), pytest.approx(30))
    assert sum(figure.value for figure in stages) == pytest.approx(30)
    assert overhead.is_met is False
    assert in_advance.value == 100


def test_who_has_not_asked_in_advance_has_the_news_before_the_version(tmp_path):
    syncer = lines_of(tmp_path / "syncer", SYNCER)
    entries = [entry for entry in LEARNER if entry[0] != "news"]
    entries += [("news", [3, 2], 1.018, 1.019), ("download", [3, 2], 1.019, 1.029)]
    (way,) = ways(syncer, {"alpha": lines_of(tmp_path / "alpha", entries)})
    assert way.stages[STAGES.index("until the news is here")] == 0
    assert way.total == pytest.approx(0.030)
    assert path_figures([way], "1 learner")[-1].value == 0


@pytest.mark.parametrize("missing", [label for label, *_ in SYNCER + LEARNER])
def test_a_way_that_cannot_be_followed_to_its_end_does_not_count(tmp_path, missing):
    syncer = lines_of(tmp_path / "syncer", [entry for entry in SYNCER if entry[0] != missing])
    alpha = lines_of(tmp_path / "alpha", [entry for entry in LEARNER if entry[0] != missing])
    assert list(ways(syncer, {"alpha": alpha})) == []


async def test_wrapped_functions_do_what_they_did_and_leave_their_instants(tmp_path):
    class Program:
        def double(self, value):
            return 2 * value

        async def later(self, value):
            return value + 1

    instants = Instants(tmp_path / "lines")
    instants.around(Program, "double", "double", lambda program, value: value if value > 1 else None)
    instants.around(Program, "later", "later")
    assert [Program().double(1), Program().double(2), await Program().later(3)] == [2, 4, 4]
    with pytest.raises(AttributeError, match="triple"):
        instants.around(Program, "triple", "triple")
    instants.write()
    (label, key, began, ended), (last, *_) = read(tmp_path / "lines")
    assert (label, key, last) == ("double", 2, "later")
    assert began <= ended


def test_everything_that_is_watched_is_there(tmp_path):
    program = (
        "from pathlib import Path; from benchmarks import instants; "
        f"taken = instants.Instants(Path({str(tmp_path / 'lines')!r})); "
        "instants.watch_syncer(taken); instants.watch_learner(taken)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_decisions_are_filed_under_what_they_were():
    close = fx.CloseRound(1, 0, True, (), 0, "")
    assert kind_of(ev.TimerFired(), [close]) == "event: TimerFired"
    merge = fx.StartMerge(1, 0, None, (), 0.7, 0.9)
    assert kind_of(ev.TimerFired(), [close, merge]) == "decision: grace has closed, merge"


def test_the_machine_is_timed_in_a_run_with_rounds():
    found = measure_decisions(3.0)
    assert any(name.startswith("decision: ") for name in found.seconds)
    assert {"event: ContributionReceived", "read: run's state, for a commit"} <= set(found.seconds)
    assert all(figure.target is not None for figure in found.figures())
