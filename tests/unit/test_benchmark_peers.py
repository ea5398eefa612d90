import os
import subprocess
import sys
import time

import pytest

from benchmarks.peers import usage
from benchmarks.peers.__main__ import COLUMNS, measure, section_of
from benchmarks.peers.pairs import Pair, PairError, Trip
from benchmarks.peers.ways import ROOT, WAYS, Way, chosen

MIB = 1 << 20
OURS, TCP = (next(way for way in WAYS if way.module == module) for module in ("ours", "tcp"))


@pytest.mark.parametrize("way", [OURS, TCP], ids=lambda way: way.module)
def test_a_payload_goes_there_and_comes_back(way):
    with Pair(way, MIB) as pair:
        first, second = pair.round_trip(), pair.round_trip()
    assert first.seconds > 0
    assert second.cpu_seconds > 0
    assert second.peak_bytes >= first.peak_bytes > first.base_bytes > 0


def test_processes_are_counted_with_their_descendants_and_not_once_they_have_ended():
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
        deadline = time.monotonic() + 30
        while len(found := usage.descendants(os.getpid())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found[0] == child.pid
        assert usage.family_peak_bytes() > usage.peak_bytes(os.getpid())
        assert usage.cpu_seconds(child.pid) > 0
        child.communicate(b"\n")
    assert usage.descendants(os.getpid()) == []
    assert [usage.cpu_seconds(child.pid), usage.peak_bytes(child.pid), usage.resident_bytes(child.pid)] == [0, 0, 0]


def test_an_end_that_fails_says_why():
    with (
        pytest.raises(PairError, match=r"far end: it has ended\n(.|\n)*No module named"),
        Pair(Way("nothing", "nothing_of_this_name", "peer", ""), MIB),
    ):
        pass


def test_a_way_without_its_environment_is_not_measured():
    way = Way("elsewhere", "gloo", "limit", "", ".venv-bench-elsewhere")
    assert way.absence == ".venv-bench-elsewhere is not there: make bench-env-elsewhere"
    assert OURS.absence == ""


def test_slow_peers_come_by_name():
    assert not [way for way in chosen("") if way.is_by_request]
    asked = [way.name for way in chosen("nvflare, flower") if way.is_by_request]
    assert asked == ["Flower", "NVFlare"]
    with pytest.raises(ValueError, match="--peers horovod: there is no such peer by request"):
        chosen("horovod")


def test_ratios_are_of_repetitions_next_to_each_other():
    torchft = next(way for way in WAYS if way.module == "torchft_pg")
    ours = [Trip(1.0, 2.0, 900 * MIB, 100 * MIB), Trip(2.0, 2.0, 900 * MIB, 100 * MIB)]
    theirs = [Trip(0.5, 1.0, 700 * MIB, 300 * MIB), Trip(0.8, 1.0, 700 * MIB, 300 * MIB)]
    section = section_of("Made up.", {OURS: ours, torchft: theirs}, 512 * MIB, {"gloo": "not there"})
    (ratio,) = (figure for figure in section.figures if figure.name.startswith("speed"))
    assert (ratio.low, ratio.value, ratio.high, ratio.is_met) == (0.4, 0.45, 0.5, False)
    (table,) = section.details["tables"]
    assert [len(row) for row in table["rows"]] == [len(COLUMNS), len(COLUMNS)]
    assert table["rows"][1][4:9] == [1.0, 2.0, 700.0, 300.0, 2.0]


def test_every_environment_has_its_exact_pins():
    for way in WAYS:
        if way.environment:
            path = ROOT / "benchmarks/peers" / f"requirements{way.environment.removeprefix('.venv-bench')}.txt"
            lines = path.read_text(encoding="utf-8").splitlines()
            assert all("==" in line and "/" not in line for line in lines), path


def test_it_measures_what_needs_no_other_environment(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.__main__.chosen", lambda names: [OURS, TCP])
    monkeypatch.setattr("benchmarks.peers.__main__.REPETITIONS_QUICK", 1)
    section = measure(True, payload_mib=1)
    assert [way["kind"] for way in section.details["ways"]] == ["ours", "limit"]
    assert "Not measured" not in section.conditions
