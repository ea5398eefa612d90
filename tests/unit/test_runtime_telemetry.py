"""Metrics with bounded labels."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decoupled_diloco.runtime.clock import ManualClock
from decoupled_diloco.runtime.telemetry import OTHER, LabelBound, Telemetry


def value(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


def test_label_values_beyond_the_bound_are_counted_under_other() -> None:
    telemetry = Telemetry("t", "1.0", {"learner": LabelBound(2)})
    bytes_in = telemetry.labelled_counter("bytes", "Bytes.", "learner")
    for name in ("a", "b", "c", "d", "a"):
        bytes_in.labels(learner=name).inc(10)
    assert value(telemetry, "t_bytes_total", learner="a") == 20
    assert value(telemetry, "t_bytes_total", learner="c") is None
    assert value(telemetry, "t_bytes_total", learner=OTHER) == 20


def test_the_bound_is_shared_by_all_metrics_and_room_comes_back() -> None:
    telemetry = Telemetry("t", "1.0", {"learner": LabelBound(1)})
    steps = telemetry.labelled_gauge("steps", "Steps.", "learner")
    waits = telemetry.labelled_histogram("wait_seconds", "Waits.", (1.0, 2.0), "learner")
    steps.labels(learner="a").set(1)
    waits.labels(learner="b").observe(1.5)
    assert value(telemetry, "t_wait_seconds_count", learner=OTHER) == 1
    steps.remove(learner="a")
    telemetry.bound("learner").release("a")
    steps.labels(learner="b").set(2)
    assert value(telemetry, "t_steps", learner="a") is None
    assert value(telemetry, "t_steps", learner="b") == 2


def test_the_exposition_is_valid_and_has_build_and_process_figures() -> None:
    telemetry = Telemetry("t", "1.2.3")
    telemetry.counter("rounds", "Rounds.").inc()
    kind, body = telemetry.exposition()
    assert kind.startswith("text/plain")
    families = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {
        "t_build_info",
        "t_rounds",
        "process_resident_memory_bytes",
        "t_event_loop_lag_seconds",
    } <= families
    assert b'version="1.2.3"' in body


async def test_the_lag_of_the_event_loop_is_what_a_wait_took_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    telemetry, clock = Telemetry("t", "1"), ManualClock()
    naps = 0

    async def nap(seconds: float) -> None:
        nonlocal naps
        naps += 1
        if naps == 2:
            raise asyncio.CancelledError
        clock.advance(seconds + 0.25)

    monkeypatch.setattr("decoupled_diloco.runtime.telemetry.asyncio.sleep", nap)
    with pytest.raises(asyncio.CancelledError):
        await telemetry.watch_loop_lag(clock, 0.5)
    assert value(telemetry, "t_event_loop_lag_seconds_sum") == pytest.approx(0.25)
    assert value(telemetry, "t_event_loop_lag_seconds_bucket", le="0.2") == 0
    assert value(telemetry, "t_event_loop_lag_seconds_bucket", le="0.5") == 1
