import json

import pytest

from benchmarks.capacity import LEARNERS, Measured, main, measure_rounds, rates_of, section_of
from benchmarks.figures import Section
from simulator.bandwidth import Plan
from simulator.capacity import RATE_FIGURES, known_rates

PLAN = Plan(1.0, 8, fragment_count=24, interval_steps=24, overlap_steps=2, step_seconds=1.0)
KNOWN = {"upload": [1.0, 2.0, 4.0], "download": [4.0], "merge": [8.0], "commit": [0.5]}


def test_seconds_of_a_round_become_gigabytes_per_second():
    # 4 learners x 1e9 parameters x 2 bytes; a merge of 8 + 24 + 4 + 2 bytes and a commit of 5 per parameter.
    rates = rates_of(Measured(uploads=[4.0, 8.0], downloads=[2.0], merge=19.0, commit=10.0), 1_000_000_000)
    assert rates == {"upload": [2.0, 1.0], "download": [4.0], "merge": [2.0], "commit": [0.5]}
    assert LEARNERS == 4


def test_the_planner_reads_the_rates_of_the_section(tmp_path):
    section = section_of(KNOWN, PLAN, 1 << 20, 8)
    path = tmp_path / "latest.json"
    path.write_text(json.dumps({"sections": [section.to_json()]}))
    rates = known_rates(dict.fromkeys(RATE_FIGURES), path)
    assert (rates.upload, rates.download, rates.merge, rates.commit) == (2e9, 4e9, 8e9, 0.5e9)
    assert Section.from_json(section.to_json()) == section


def test_it_says_in_a_sentence_what_one_syncer_sustains(capsys):
    options = [text for name, rates in KNOWN.items() for text in (f"--{name}-gbytes-per-second", str(rates[0]))]
    assert main([*options, "--learners", "4", "--step-seconds", "0.001"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    # Nanoseconds: 8 bytes up at 1 GB/s, 8 down at 4, 38 merged at 8, 5 committed at 0.5.
    assert f"sustains {24e-3 / 24.75e-9 / 1e6:,.0f}M parameters x 4 learners / 0.001 s; the commit is the limit." in out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--learners 0", "--learners 0: must be above 0"),
        ("--merge-gbytes-per-second -1", "--merge-gbytes-per-second -1: must be above 0"),
        ("--fragments 25", "--fragments must be at most --interval"),
    ],
)
def test_what_cannot_be_is_refused(capsys, option, words):
    with pytest.raises(SystemExit):
        main(option.split())
    assert words in capsys.readouterr().err


async def test_a_small_fragment_goes_all_the_ways_that_are_measured(tmp_path):
    found = await measure_rounds(tmp_path, 1 << 16, 2)
    assert len(found.uploads) == len(found.downloads) == 2
    assert min(*found.uploads, *found.downloads, found.merge, found.commit) > 0
