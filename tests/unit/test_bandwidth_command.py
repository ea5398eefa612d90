import json

import pytest

from simulator.__main__ import main

TWELVE = "--params 12e9 --learners 8 --fragments 24 --interval 24 --overlap 2 --step-seconds 1 --bits 16"
RATES = {"upload": 2, "download": 4, "merge": 8, "commit": 0.5}


def printed(capsys, *more):
    assert main(["bandwidth", *TWELVE.split(), *more]) == 0
    return capsys.readouterr().out


def test_the_plan_of_the_paper_s_size_in_words(capsys, tmp_path):
    out = printed(capsys, "--results", str(tmp_path / "none.json"))
    rows = {line[:32].strip(): line[32:].split() for line in out.splitlines()}
    assert rows["Decoupled DiLoCo"] == ["8", "8", "8", "64", "64", "64"]
    assert rows["and 1 step of grace"] == ["8", "8", "21.3", "64", "64", "171"]
    assert rows["Streaming DiLoCo (all-reduce)"] == ["14", "14", "14", "-", "-", "-"]
    assert rows["data-parallel (all-reduce)"] == ["336", "336", "336", "-", "-", "-"]
    assert "42 times less" in out
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
    # 12 bytes of state, 3 rounds x 8 learners x 2 bytes / 24 fragments, 8 / 24 spare: 14 1/3 bytes per parameter.
    out = printed(capsys)
    assert f"holds about {12e9 * (16 + 1 / 4) / 2**30:.1f} GiB, {24e9 / 2**30:.1f} GiB of it contributions" in out
    assert "syncer.upload_buffer_bytes_max, 8 GiB: raise it" in out
    assert "upload_buffer_bytes_max" not in printed(capsys, "--params", "1e9")


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
    assert "sustains" not in printed(capsys, *options[:-2], "--results", str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--fragments 30", "--fragments 30: must be at most 24 (--interval)"),
        ("--overlap 24", "--overlap 24: must be below 24 (--interval)"),
        ("--params 0", "--params 0: must be above 0"),
        ("--params 10", "--fragments 24: must be at most 10 (--params)"),
        ("--learners 0", "--learners 0: must be above 0"),
        ("--learners 2.5", "argument --learners: '2.5' is no whole number"),
        ("--step-seconds nan", "argument --step-seconds: 'nan' is no number"),
        ("--step-seconds 0", "--step-seconds 0: must be above 0"),
        ("--latency-ms -1", "--latency-ms -1: must be 0 or more"),
        ("--link-gbit 0", "--link-gbit 0: must be above 0"),
        ("--merge-gbytes-per-second 0", "--merge-gbytes-per-second 0: must be above 0"),
        ("--bits int3", "argument --bits: 'int3' is neither one of float32, bf16, int8, int4"),
        ("--download-bits 65", "argument --download-bits: '65' is neither"),
    ],
)
def test_what_cannot_be_planned_with_is_refused_by_the_option_s_name(capsys, more, words):
    with pytest.raises(SystemExit) as stopped:
        main(["bandwidth", *TWELVE.split(), *more.split()])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_file_that_holds_no_results_is_refused(capsys, tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{}")
    with pytest.raises(SystemExit):
        main(["bandwidth", *TWELVE.split(), "--results", str(path)])
    assert f"--results {path}: no results" in capsys.readouterr().err
