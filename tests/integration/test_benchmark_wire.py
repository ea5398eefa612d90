"""The benchmark of the wire: its parts on small payloads, and what its figures are made of."""

import numpy as np
import pytest

from benchmarks.figures import Target
from benchmarks.flight import Flight, batches, copy_batches
from benchmarks.raw_tcp import RawTcp
from benchmarks.server_process import ServerProcess
from benchmarks.wire import OBSERVERS, Alone, Beside, Size, Way, Ways, figures_alone, figures_beside, measure_beside

TINY = Size(elements=1 << 12, beside_elements=1 << 10, repetitions=1, beside_repetitions=1)


def test_raw_tcp_brings_what_it_was_sent():
    values = np.random.default_rng(0).standard_normal(700_000, np.float32)
    out = np.zeros_like(values)
    with ServerProcess("benchmarks.raw_tcp") as server, RawTcp(server.port) as connection:
        connection.upload(values.view(np.uint8).data)
        connection.download(out.view(np.uint8).data)
    assert np.array_equal(out, values)


def test_flight_brings_what_it_was_sent():
    values = np.random.default_rng(0).standard_normal((1 << 20) + 5, np.float32)
    out = np.zeros_like(values)
    with ServerProcess("benchmarks.flight") as server, Flight(server.port) as connection:
        connection.upload(values)
        connection.download(out)
    assert np.array_equal(out, values)


def test_flight_says_when_values_are_missing():
    class Chunk:
        def __init__(self, data):
            self.data = data

    chunks = [Chunk(batch) for batch in batches(np.ones(10, np.float32))]
    with pytest.raises(ValueError, match="10 values came where 11 were due"):
        copy_batches(chunks, np.zeros(11, np.float32))


def test_a_server_that_does_not_start_is_an_error():
    with pytest.raises(RuntimeError, match="did not start"), ServerProcess("benchmarks.no_such_server"):
        pass


def test_a_share_compares_repetitions_with_each_other():
    reference, way = Way([1.0, 2.0]), Way([2.0, 2.0])
    assert way.shares(reference) == [0.5, 1.0]
    assert way.shares(reference, copies=4) == [2.0, 4.0]
    assert way.rates(10**9) == [0.5, 0.5]


async def test_every_way_is_measured_as_often_as_the_others():
    ways = await Alone(TINY).measure()
    figures = figures_alone(ways, 4 * TINY.elements)
    assert all(figure.value > 0 for figure in figures if figure.unit in ("x", "GB/s"))
    names = ("TCP up", "TCP down", "Flight up", "Flight down", "upload", "download by 1", f"download by {OBSERVERS}")
    assert {len(ways[name].seconds) for name in names} == {TINY.repetitions}
    assert Target("at least", 0.5) in [figure.target for figure in figures]


async def test_uploads_beside_a_merge_and_questions_meanwhile_are_timed():
    found = await measure_beside(TINY)
    assert len(found.busy_seconds) == len(found.merge_seconds) == TINY.beside_repetitions
    assert found.echo_seconds
    assert min(found.busy_seconds + found.idle_seconds + found.merge_seconds + found.echo_seconds) > 0
    assert all(figure.value > 0 for figure in figures_beside(found))


def test_figures_beside_a_merge_are_medians_and_a_percentile():
    found = Beside([1.0, 1.0, 3.0], [2.0], [4.0], [0.001 * number for number in range(1, 101)], [0.002], 0.01)
    share, merge, lag, answer, late = figures_beside(found)
    assert (share.value, merge.value, lag.value) == (0.5, 4000.0, 10.0)
    assert (answer.value, late.value) == (pytest.approx(99), 2.0)
    assert "100%" in share.note


def test_the_warm_up_is_forgotten():
    ways = Ways()
    ways.took("upload", 1.0)
    ways.forget()
    assert ways["upload"].seconds == []
