"""The benchmarks of links: their arithmetic on made-up figures, and tiny runs without a shaped link."""

from __future__ import annotations

import pytest

from benchmarks import long_syncs, shaped, shaped_link, wide_area
from benchmarks.shaped_link import DOWNLOAD, IN_FLIGHT, ONE_AT_A_TIME
from decoupled_diloco.arrays.encoding import DOWNLOAD_ENCODINGS, ENCODINGS, encoding_named

TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
  eth0:     11      2    0    0    0     0          0         0       22      3    0    0    0     0       0          0
    lo:   1000     10    0    0    0     0          0         0     2345     20    0    0    0     0       0          0
"""


def entries_by(seconds_of, count=1000):
    """Every kind in every encoding, twice; the link carries half a per cent more than the formula."""
    names = [f"{kind} {encoding}" for kind in (ONE_AT_A_TIME, IN_FLIGHT) for encoding in ENCODINGS]
    names += [f"{DOWNLOAD} {encoding}" for encoding in DOWNLOAD_ENCODINGS]

    def entry(name):
        encoding = name.rpartition(" ")[2]
        wire = 1.005 * encoding_named(encoding).bits_per_element * count / 8
        return {"seconds": seconds_of(encoding), "wire_bytes": wire, "values": count}

    return {name: [entry(name), entry(name)] for name in names}


def test_the_counter_of_the_loopback_is_what_was_sent():
    assert shaped_link.sent_bytes(TABLE) == 2345


def test_gains_are_ratios_of_parameters_a_second_and_meet_their_targets_or_not():
    by_bits = entries_by(lambda encoding: encoding_named(encoding).bits_per_element)
    slow = entries_by(lambda encoding: 8.0)
    section = shaped.section_of({"shaped": by_bits, "loopback": slow}, "made up")
    figures = {figure.name: figure for figure in section.figures}
    gain = figures["1 Gbit/s, one upload at a time, int4: parameters a second"]
    assert gain.value == pytest.approx(32 / 4.125)
    assert gain.is_met
    assert figures["loopback, one upload at a time, int4: parameters a second"].value == pytest.approx(1.0)
    above = figures["bytes on the wire, upload, int4: above the formula"]
    assert above.value == pytest.approx(0.5)
    assert above.is_met

    reversed_section = shaped.section_of({"shaped": slow, "loopback": by_bits}, "made up")
    figures = {figure.name: figure for figure in reversed_section.figures}
    assert figures["1 Gbit/s, 6 uploads in flight, bf16: parameters a second"].is_met is False
    table = reversed_section.details["tables"][0]
    assert [row[0] for row in table["rows"]] == list(ENCODINGS)
    assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_the_error_of_an_encoding_grows_as_its_bits_shrink():
    errors = [shaped.relative_error(encoding, 1 << 14) for encoding in ("float32", "bf16", "int8", "int4")]
    assert errors[0] == 0.0
    assert errors == sorted(errors)
    assert errors[1] < 2**-8
    assert 0.05 < errors[3] < 0.2


def test_a_machine_that_allows_no_namespace_gets_a_section_that_says_so(monkeypatch):
    monkeypatch.setattr(shaped, "namespace_command", lambda: ["no-such-unshare"])
    section = shaped.measure(True)
    assert section.figures == ()
    assert section.conditions.startswith("Not measured: unshare cannot be run")
    monkeypatch.setattr(shaped, "namespace_command", lambda: ["sh", "-c", "echo unshare: not permitted >&2; exit 1"])
    assert shaped.measure(True).details == {"not_measured": "unshare: not permitted"}


async def test_transfers_in_every_encoding_are_timed_and_counted():
    found = await shaped_link.transfers(512, 1)
    alone = shaped_link.ALONE_COUNT
    per_turn = {ONE_AT_A_TIME: alone, IN_FLIGHT: 1, DOWNLOAD: alone}
    wanted = {f"{kind} {encoding}" for kind in (ONE_AT_A_TIME, IN_FLIGHT) for encoding in ENCODINGS}
    assert set(found) == wanted | {f"{DOWNLOAD} {encoding}" for encoding in DOWNLOAD_ENCODINGS}
    for name, entries in found.items():
        assert len(entries) == per_turn[name.rpartition(" ")[0]]
        for entry in entries:
            assert entry["seconds"] > 0
            assert entry["wire_bytes"] > 512 * encoding_named(name.rpartition(" ")[2]).bits_per_element / 8


async def test_connections_are_compared_over_both_kinds_of_link(monkeypatch):
    monkeypatch.setattr(wide_area, "LATENCY_SECONDS", 0.002)
    rates = await wide_area.rates_of(512, 1, (1, 3))
    assert {len(values) for values in rates.values()} == {1}
    figures = {figure.name: figure for figure in wide_area.figures_of(rates)}
    assert len(figures) == 8
    link = wide_area.WINDOWED
    ratio = rates[link, "download", 3][0] / rates[link, "download", 1][0]
    assert figures[f"{link}, download, 3 connections"].value == ratio
    assert figures[f"{link}, upload, 1 connection"].unit == "MB/s"


async def test_a_sync_over_a_long_distance_takes_two_latencies_or_four_at_least():
    latency = 0.05
    found = await long_syncs.sync_seconds(latency, 1)
    assert [len(found[in_advance]) for in_advance in (True, False)] == [long_syncs.FRAGMENT_COUNT] * 2
    # What a busy machine adds, it does not take away: each way takes its latencies at least.
    assert min(found[True]) >= 2 * latency
    assert min(found[False]) >= 4 * latency
    assert [figure.unit for figure in long_syncs.sync_figures(found)] == ["ms", "ms"]
