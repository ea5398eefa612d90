import importlib.util
import json
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from benchmarks import __main__ as program
from benchmarks import markdown, older, pictures, suite
from benchmarks.figures import Figure, Section, Target, table_of
from benchmarks.record import Failure, Results
from benchmarks.suite import MEMBERS, run_members
from tests.unit.benchmark_members import GOOD, SECTION, member, results_of


@pytest.fixture
def run(tmp_path):
    """Runs members as the suite does; returns the results and what was told."""

    def run_all(*members):
        results, heard = Results(is_quick=True), []
        run_members(members, results, tmp_path, {}, lambda who, outcome: heard.append((who.name, outcome)))
        return results, heard

    return run_all


def test_a_member_that_fails_is_shown_and_the_rest_goes_on(run):
    failing = member("bad", "print('so far so good'); raise SystemExit('the disk is full')")
    results, heard = run(failing, member("good", GOOD))
    assert results.sections == [SECTION]
    (failure,) = results.failures
    assert failure.name == "bad"
    assert "status 1" in failure.reason
    assert "so far so good" in failure.output
    assert "the disk is full" in failure.output
    assert [name for name, _ in heard] == ["bad", "bad", "good", "good"]
    assert list(results.seconds) == ["bad", "good"]


def test_a_member_that_does_not_end_is_ended(run):
    results, _ = run(member("slow", "import threading; threading.Event().wait()", seconds_max_quick=0.5))
    assert "after 0.5 seconds" in results.failures[0].reason


def test_a_member_without_a_report_has_failed(run):
    results, _ = run(member("silent", "print('nothing')"))
    assert "its report cannot be read" in results.failures[0].reason


def test_results_come_back_from_json():
    results = results_of(SECTION, seconds={"good": 1.5, "bad": 2.0})
    results.failures.append(Failure("bad", "it ended with status 1", "lines"))
    results.left_out.append("slow")
    data = json.loads(json.dumps(results.to_json()))
    assert Results.from_json(data) == results
    assert (data["targets_met"], data["targets_missed"]) == (1, 1)
    assert [figure["is_met"] for figure in data["sections"][0]["figures"]] == [True, False, None]
    with pytest.raises(ValueError, match="format = 0"):
        Results.from_json({**data, "format": 0})


def test_the_page_says_what_was_missed_and_what_came_to_nothing():
    results = results_of(SECTION, failures=[Failure("bad", "status 1", "its last words")])
    page = markdown.page(results, {"good": ["speed.png"], "": ["targets.png"]})
    assert "Targets met: 1, missed: 1." in page
    assert "| good | lag | 30.0 ms | at most 20 |" in page
    assert "| speed \\| best (of three) | 2.00 GB/s | 1.00 to 3.00 | at least 1.5 | met |" in page
    assert "**bad came to nothing**: status 1" in page
    assert "its last words" in page
    assert "![A good one](speed.png)" in page
    assert "![all targets](targets.png)" in page
    assert "| ours | 1.50 |" in page
    assert "full run" in page


def test_a_quick_run_is_not_held_against_the_targets(tmp_path, monkeypatch):
    results = results_of(SECTION, is_quick=True)
    page = markdown.page(results, {})
    assert "targets are those of a full run, and for orientation only" in page
    assert "| figure | value | range | target of a full run |  |" in page
    assert "missed" not in page
    assert (results.missed, results.met_count) == ([], 0)
    assert [figure["is_met"] for figure in results.to_json()["sections"][0]["figures"]] == [None] * 3
    for is_quick, marks in ((True, ["", "", ""]), (False, ["[green]met[/]", "[red]missed[/]", ""])):
        table = table_of(SECTION.figures, is_quick)
        assert list(table.columns[4].cells) == marks
        assert table.columns[3].header == ("target of a full run" if is_quick else "target")
        colours = {to_hex(bar.get_facecolor()) for bar in pictures.targets([SECTION], is_quick).axes[0].patches}
        assert colours == ({pictures.OURS} if is_quick else {pictures.GOOD, pictures.BAD})
    saved = []
    monkeypatch.setattr(pictures.Canvas, "savefig", lambda canvas, *_, **__: saved.append(canvas.get_suptitle()))
    for is_quick in (True, False):
        pictures.draw([SECTION], tmp_path, is_quick)
    assert saved == [pictures.QUICK_TITLE, ""]


def test_everything_is_written_with_an_overview_of_the_targets(tmp_path):
    results = results_of(SECTION)
    (tmp_path / "wire.png").write_bytes(b"of an earlier run")
    (tmp_path / "holiday.png").write_bytes(b"not ours")
    program.write(results, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "holiday.png",
        "latest.json",
        "latest.md",
        "targets.png",
    ]
    assert Results.from_json(json.loads((tmp_path / "latest.json").read_text())) == results


@pytest.mark.parametrize("value", [1.0, 280.0, 345.0, 359.0, 360.0, 400.0])
def test_no_label_lies_on_the_line_of_its_target(value):
    figures = [
        Figure("peak", value, "MiB", Target("at most", 360.0), high=1.01 * value),
        Figure("kept", 300.0, "MiB"),
        Figure("a small one", 8.0, "MiB", Target("at most", 8.1)),
    ]
    canvas = pictures.bars("MiB", "MiB")(Section("memory", "", "", tuple(figures)))
    renderer = FigureCanvasAgg(canvas).get_renderer()
    canvas.draw(renderer)
    (axes,) = canvas.axes
    targets = [line.get_window_extent(renderer) for line in axes.lines if line.get_linestyle() == ":"]
    assert len(targets) == 2
    for text in axes.texts:
        box = text.get_window_extent(renderer)
        for line in targets:
            assert not (box.y0 < line.y1 and line.y0 < box.y1 and box.x0 < line.x1 and line.x0 < box.x1)


def test_figures_of_a_unit_become_bars_and_stages_a_stack():
    canvas = pictures.bars("GB/s", "GB/s")(SECTION)
    assert [label.get_text() for label in canvas.axes[0].get_yticklabels()] == ["speed | best"]
    assert pictures.bars("CPU-s", "CPU-s")(SECTION) is None
    details = {"stages_ms": {"merge": 1.0, "commit": 2.0, "send": 0.5}}
    stacked = pictures.stages(Section("latency", "", "", (), details))
    assert [bar.get_x() for bar in stacked.axes[0].patches] == [0.0, 1.0, 3.0]
    assert pictures.stages(SECTION) is None


def test_the_ways_of_the_peers_stand_side_by_side():
    way = {"name": "ours", "kind": "ours", "gb_per_second": 2.0, "cpu_seconds_per_gib": 1.0, "peak_mib": 900.0}
    canvas = pictures.peers(Section("peers", "", "", (), {"ways": [way, {**way, "name": "TCP", "kind": "limit"}]}))
    assert len(canvas.axes) == 3
    assert pictures.peers(SECTION) is None


def test_how_a_figure_stands_to_its_target():
    assert pictures.standing(Figure("a", 3.0, "x", Target("at least", 1.5))) == 2
    assert pictures.standing(Figure("a", 3.0, "ms", Target("at most", 1.5))) == 0.5
    assert pictures.standing(Figure("a", 3.0, "ms")) is None
    assert pictures.standing(Figure("a", 0.0, "MiB", Target("at most", 1.0))) is None


def test_members_are_chosen_by_name():
    assert [item.name for item in program.chosen("durability, durability", False)] == ["durability"]
    assert "start" not in {item.name for item in program.chosen(None, True)}
    assert [item.name for item in program.chosen("start", True)] == ["start"]
    with pytest.raises(ValueError, match="--only wrie: there is no such benchmark; there are peers"):
        program.chosen("wrie,start", False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "wrie"], "--only wrie: there is no such benchmark"),
        (["--only", ""], "--only '': a name is empty; there are peers"),
        (["--only", "wire,"], "--only 'wire,': a name is empty"),
        (["--peers", "horovod"], "--peers horovod: there is no such peer by request"),
        (["--only", "start", "--peers", "flower"], "--only leaves out the benchmark 'peers'"),
    ],
)
def test_what_is_asked_for_and_does_not_exist_is_refused_before_anything_runs(arguments, said, capsys):
    with pytest.raises(SystemExit):
        program.main(arguments)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("item", MEMBERS, ids=lambda item: item.name)
def test_every_member_exists_and_takes_what_the_suite_gives(item):
    spec = importlib.util.find_spec(f"benchmarks.{item.name}")
    assert spec is not None, f"benchmarks/{item.name}.py is gone"
    path = Path(spec.origin)
    text = (path.with_name("__main__.py") if path.name == "__init__.py" else path).read_text(encoding="utf-8")
    assert item.about
    assert item.seconds_max_quick <= item.seconds_max
    if item.report:
        assert item.translate is not None
        assert '"--output"' in text
    else:
        assert "def measure(" in text
        assert "figures import" in text
        assert "if __name__ ==" in text


def test_the_page_of_the_benchmarks_names_every_member():
    page = (suite.ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert [item.name for item in MEMBERS if f"| `{item.name}` |" not in page] == []


def test_the_pictures_are_of_members():
    assert set(pictures.SUBJECTS) <= {item.name for item in MEMBERS}


def test_the_older_reports_become_sections():
    phase = {"joined": 1, "programs_ready": 2, "first_step": 3, "first_merged": 4, "cpu_until_first_step": 5}
    section = older.start_section(
        {
            "kills": 3,
            "quiet": {**phase, "first_merged_max": 6},
            "busy": {**phase, "first_step": 9, "first_merged_max": 7},
        }
    )
    assert section.figures[0].is_met
    assert section.figures[1].high == 6
    assert [figure.name for figure in section.figures if figure.target] == ["start to first step, quiet"]
    store = {"base_interval": 8, "commit_seconds_median": 0.05, "commit_seconds_max": 0.2}
    store |= {"bytes_per_commit_and_parameter": 4.8, "restart_seconds_median": 0.02}
    alone = {"commit_seconds_median": 0.001, "learners": 32, "members": 8}
    report = {"results": [store], "rounds": 63, "parameters": 1_000_000, "ledger_alone": alone}
    commit, restart, ledger = older.durability_section(report).figures
    assert (commit.value, commit.high, restart.value, ledger.value) == (50, 200, 20, 1)
