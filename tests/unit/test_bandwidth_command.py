import argparse
import json
import math
import re
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from simulator.__main__ import main
from simulator.bandwidth_command import BITS_MAX, BITS_MIN, BOUNDS, DEFAULT_RESULTS, add_arguments
from simulator.capacity import RATE_FIGURES

TWELVE = "--params 12e9 --learners 8 --fragments 24 --interval 24 --overlap 2 --step-seconds 1 --bits 16"
RATES = {"upload": 2, "download": 4, "merge": 8, "commit": 0.5}


def printed(capsys, *more):
    assert main(["bandwidth", *TWELVE.split(), *more]) == 0
    return capsys.readouterr().out


def refused(capsys, more):
    """What is said to an option that cannot be."""
    with pytest.raises(SystemExit) as stopped:
        main(["bandwidth", *TWELVE.split(), *more.split()])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_the_plan_of_the_paper_s_size_in_words(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # nobody has left results there
    out = printed(capsys)
    rows = {line[:32].strip(): line[32:].split() for line in out.splitlines()}
    assert rows["Decoupled DiLoCo"] == ["8", "8", "8", "64", "64", "64"]
    assert rows["and 1 step of grace"] == ["8", "8", "21.3", "64", "64", "171"]
    assert rows["Streaming DiLoCo (all-reduce)"] == ["14", "14", "14", "-", "-", "-"]
    assert rows["data-parallel (all-reduce)"] == ["336", "336", "336", "-", "-", "-"]
    assert "42 times less than in data-parallel training" in out
    # 64 + 16 bits against 2 * 2 * 7 / 8 * 16.
    every_step = ("--interval", "1", "--fragments", "1", "--overlap", "0", "--bits", "64")
    assert "1.43 times as much as in data-parallel training" in printed(capsys, *every_step)
    assert "average bits*N/(H*step)" in out
    assert "sustains" not in out


def test_an_encoding_counts_with_its_block_scales(capsys):
    by_name = json.loads(printed(capsys, "--bits", "int4", "--json"))
    assert by_name["plan"]["upload_bits"] == 4.125
    assert by_name["needs"]["decoupled"]["up"] == pytest.approx(12e9 * 4.125 / 24)
    assert by_name == json.loads(printed(capsys, "--bits", "4.125", "--json"))


def test_what_no_bandwidth_hides_is_said(capsys):
    assert " never" in printed(capsys, "--latency-ms", "400")
    needs = json.loads(printed(capsys, "--latency-ms", "1000", "--json"))["needs"]
    assert needs["decoupled"]["hidden"] is None


def test_the_memory_of_the_syncer_is_told_and_what_to_raise(capsys):
    # 3 rounds in flight of 24 fragments: contributions of 3 x 8 learners x 2 bytes / 24, results of 3 x (4 + 2) / 24.
    out = printed(capsys)
    assert f"holds up to {12e9 * 16.75 / 2**30 + 250 / 1024:.2f} GiB: state {12e9 * 12 / 2**30:.2f}, " in out
    assert f"contributions {24e9 / 2**30:.2f}, merges {9e9 / 2**30:.2f}, program 0.24." in out
    assert "That is with 3 rounds in flight" in out
    memory = json.loads(printed(capsys, "--json"))["syncer_memory"]
    assert memory["bytes"] == pytest.approx(sum(memory["parts"].values()))
    assert "syncer.upload_buffer_bytes_max, 8 GiB: raise it" in out
    assert "upload_buffer_bytes_max" not in printed(capsys, "--params", "1e9")


def test_the_memory_of_a_lone_learner_s_syncer_is_not_below_what_was_measured(capsys):
    more = ("--params", "134217728", "--learners", "1", "--fragments", "2", "--interval", "8", "--overlap", "2")
    # Resident memory at its peak in rounds of both fragments at once.
    assert json.loads(printed(capsys, *more, "--json"))["syncer_memory"]["bytes"] > 3.64 * 2**30


def test_a_link_is_answered_with_what_would_fit(capsys):
    out = printed(capsys, "--bits", "int4", "--link-gbit", "6", "--syncer-link-gbit", "100")
    assert "Decoupled: no, Streaming: no, data-parallel: no" in out
    assert "smallest H            48" in out
    assert "largest model         9e+09 parameters" in out
    assert "smallest tau          none below H = 24" in out
    assert "encodings of uploads  none" in out
    assert "serves 12 learners" in out


def test_what_one_syncer_sustains_is_printed_where_all_rates_are_given(capsys, tmp_path):
    options = [text for name, rate in RATES.items() for text in (f"--{name}-gbytes-per-second", str(rate))]
    out = printed(capsys, *options)
    # Nanoseconds per parameter: 16 bytes up at 2 GB/s, 16 down at 4, 46 merged at 8, 5 committed at 0.5 are 27.75.
    assert "sustains 8.65e+08 parameters x 8 learners / 1 s; the commit is the limit" in out


def results_with(path, figures):
    rows = [{"name": RATE_FIGURES[name][1], "value": value} for name, value in figures.items()]
    path.write_text(json.dumps({"sections": [{"name": "capacity", "figures": rows}]}))
    return path


def test_rates_that_are_not_given_are_read_from_the_file_that_is_given(capsys, tmp_path):
    path = results_with(tmp_path / "results.json", {name: RATES[name] for name in ("download", "merge", "commit")})
    out = printed(capsys, "--upload-gbytes-per-second", "2", "--results", str(path))
    assert "sustains 8.65e+08 parameters x 8 learners / 1 s; the commit is the limit" in out


@pytest.mark.parametrize(
    "more", ["--upload-gbytes-per-second 1", "--results {path}", "--upload-gbytes-per-second 1 --results {path}"]
)
@pytest.mark.parametrize("there", [False, True])
def test_rates_that_were_asked_for_and_are_not_known_are_named(capsys, tmp_path, monkeypatch, more, there):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "results.json"
    if there:
        results_with(path, {"merge": 8.0})
    said = refused(capsys, more.format(path=path))
    assert "what one syncer sustains takes 4 rates" in said
    assert "--download-gbytes-per-second, " in said
    assert ("--upload-gbytes-per-second" in said) == ("--upload" not in more)
    assert ("--merge-gbytes-per-second" in said) == (not there or "--results" not in more)
    assert "would hold, but is not there" in said or there


def test_what_nobody_asked_for_is_told_in_a_line_if_there_is_a_file_without_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "Not told" not in printed(capsys)
    path = tmp_path / DEFAULT_RESULTS
    path.parent.mkdir(parents=True)
    results_with(path, {"merge": 8.0})
    out = printed(capsys)
    assert (
        f"Not told: what one syncer sustains takes 4 rates, of which {DEFAULT_RESULTS} does not hold: --upload-" in out
    )
    assert "--merge-gbytes-per-second" not in out
    assert "sustains" in json.loads(printed(capsys, "--json"))["not_sustained"]


def test_a_file_that_would_not_be_looked_at_is_refused(capsys, tmp_path):
    options = " ".join(f"--{name}-gbytes-per-second {rate}" for name, rate in RATES.items())
    said = refused(capsys, f"{options} --results {results_with(tmp_path / 'results.json', RATES)}")
    assert "has no use where all rates are given" in said


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 1e300])
def test_a_rate_in_a_file_that_none_can_be_is_refused(capsys, tmp_path, value):
    path = results_with(tmp_path / "results.json", {**RATES, "merge": value})
    said = refused(capsys, f"--results {path}")
    assert f"capacity / rate of the merge = {value:g}: must be from 1e-06 to 1e+06 GB/s" in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--fragments 30", "--fragments 30: must be at most 24 (--interval)"),
        ("--overlap 24", "--overlap 24: must be below 24 (--interval)"),
        ("--params 0", "--params 0: must be from 1 to 1e+15 parameters"),
        ("--params 1e16", "--params 1e+16: must be from 1 to 1e+15 parameters"),
        ("--params 1.5", "argument --params: '1.5' is no whole number"),
        ("--params 1e400", "argument --params: '1e400' is no number"),
        ("--params 10", "--fragments 24: must be at most 10 (--params)"),
        ("--learners 0", "--learners 0: must be from 1 to 1024 learners"),
        ("--learners 2.5", "argument --learners: '2.5' is no whole number"),
        ("--step-seconds nan", "argument --step-seconds: 'nan' is no number"),
        ("--step-seconds 0", "--step-seconds 0: must be from 1e-06 to 1e+06 seconds"),
        ("--latency-ms -1", "--latency-ms -1: must be from 0 to 1e+09 milliseconds"),
        ("--link-gbit 0", "--link-gbit 0: must be from 1e-06 to 1e+06 Gbit/s"),
        ("--merge-gbytes-per-second 0", "--merge-gbytes-per-second 0: must be from 1e-06 to 1e+06 GB/s"),
        (
            "--bits 0.5",
            "argument --bits: '0.5' is neither one of float32, bf16, int8, int4 nor a number of bits from 1 to 64",
        ),
        ("--bits int3", "argument --bits: 'int3' is neither one of float32, bf16, int8, int4"),
        ("--download-bits 65", "argument --download-bits: '65' is neither"),
    ],
)
def test_what_cannot_be_planned_with_is_refused_by_the_option_s_name(capsys, more, words):
    assert words in refused(capsys, more)


def test_every_number_has_bounds():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    numbers = {action.dest for action in parser._actions if action.type not in (None, Path)}
    assert numbers == set(BOUNDS) | {"bits", "download_bits", "gradient_bits"}
    learners_max = RunConfig.model_fields["run"].annotation.model_fields["learners_max"].metadata
    assert BOUNDS["learners"][1] == next(item.le for item in learners_max if hasattr(item, "le"))


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("longest", [False, True])
def test_at_the_bounds_of_all_options_the_plan_is_in_numbers_that_can_be_read(capsys, bound, longest):
    """The smallest or largest model, bits and links, with the longest or shortest steps and interval."""
    names = ("params", "learners", "step_seconds", "interval", "link_gbit", "syncer_link_gbit", "upload", "download")
    names = (*names, "merge", "commit")
    options = {name: BOUNDS.get(name, BOUNDS["upload_gbytes_per_second"])[bound] for name in names}
    options |= {name: BOUNDS[name][longest] for name in ("step_seconds", "interval")}
    more = ["--bits", str((BITS_MIN, BITS_MAX)[bound]), "--fragments", "1", "--overlap", "0"]
    for name, value in options.items():
        option = f"--{name}-gbytes-per-second" if name in RATES else "--" + name.replace("_", "-")
        more += [option, repr(value)]
    out = printed(capsys, *more)
    assert not re.search(r"nan|inf\b|[0-9]{17}", out)


def test_a_file_that_holds_no_results_is_refused(capsys, tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{}")
    with pytest.raises(SystemExit):
        main(["bandwidth", *TWELVE.split(), "--results", str(path)])
    assert f"--results {path}: no results" in capsys.readouterr().err
