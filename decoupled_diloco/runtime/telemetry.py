"""Metrics for Prometheus with bounded labels, and the figures that every process has.

The number of time series is bounded where it is made: a label takes a fixed number of values, and what comes
after shows up under "other". So no peer can grow the memory of the process, or of Prometheus, by inventing
names.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Mapping
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from decoupled_diloco.runtime.clock import Clock

OTHER = "other"
"""The label value that stands for all values beyond the bound."""
LABEL_VALUES_MAX = 64
"""Values a label takes unless another bound is given."""
LOOP_LAG_INTERVAL_SECONDS = 0.05
"""Wait between two looks at the event loop's lag: enough of them for a 99th percentile over a minute."""
LOOP_LAG_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Seconds; timers of asyncio themselves are late by up to a millisecond."""

MetricT = TypeVar("MetricT", Counter, Gauge, Histogram)


class LabelBound:
    """The values that one label may take, shared by all metrics that have the label.

    Args:
        values_max: Values with a series of their own; later ones are "other".
    """

    def __init__(self, values_max: int = LABEL_VALUES_MAX) -> None:
        self._values_max = values_max
        self._lock = threading.Lock()
        self._values: set[str] = set()

    def fold(self, value: str) -> str:
        """The value itself while there is room, then "other"."""
        with self._lock:
            if value in self._values:
                return value
            if len(self._values) >= self._values_max:
                return OTHER
            self._values.add(value)
            return value

    def release(self, value: str) -> None:
        """Makes room again after a value is gone for good."""
        with self._lock:
            self._values.discard(value)


class Labelled(Generic[MetricT]):
    """A metric with bounded labels. Made by `Telemetry`."""

    def __init__(self, metric: MetricT, bounds: Mapping[str, LabelBound]) -> None:
        self._metric: MetricT = metric
        self._bounds = bounds

    def labels(self, **values: object) -> MetricT:
        """The series for these label values, with values beyond the bound folded into "other"."""
        folded = {name: self._bounds[name].fold(str(value)) for name, value in values.items()}
        series: MetricT = self._metric.labels(**folded)
        return series

    def remove(self, **values: object) -> None:
        """Drops the series of these label values, if there is one. "other" stays."""
        ordered = [str(values[name]) for name in self._bounds]
        if OTHER not in ordered:
            self._metric.remove(*ordered)


class Telemetry:
    """The metrics of one process, in a registry of its own.

    Args:
        prefix: Start of all names, for example "decoupled_diloco_syncer".
        version: Release of the software, for the build information.
        bounds: Bounds of labels by name; a label without one gets the default bound.
    """

    def __init__(self, prefix: str, version: str, bounds: Mapping[str, LabelBound] | None = None) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._bounds = dict(bounds or {})
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        build = Gauge(
            f"{prefix}_build_info",
            "Always 1; the labels say what runs.",
            ["version", "python"],
            registry=self.registry,
        )
        build.labels(version=version, python=platform.python_version()).set(1)
        self.loop_lag_seconds = self.histogram(
            "event_loop_lag_seconds",
            "How much later than planned the event loop came back from a short wait.",
            LOOP_LAG_BUCKETS,
        )

    def bound(self, label: str) -> LabelBound:
        """The bound of a label."""
        return self._bounds.setdefault(label, LabelBound())

    def _bounds_of(self, labels: tuple[str, ...]) -> dict[str, LabelBound]:
        return {label: self.bound(label) for label in labels}

    def counter(self, name: str, text: str) -> Counter:
        """A counter without labels; its exported name ends in _total."""
        return Counter(f"{self._prefix}_{name}", text, registry=self.registry)

    def gauge(self, name: str, text: str) -> Gauge:
        """A gauge without labels."""
        return Gauge(f"{self._prefix}_{name}", text, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram without labels."""
        return Histogram(f"{self._prefix}_{name}", text, buckets=buckets, registry=self.registry)

    def labelled_counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        """A counter with bounded labels; its exported name ends in _total."""
        metric = Counter(f"{self._prefix}_{name}", text, labels, registry=self.registry)
        return Labelled(metric, self._bounds_of(labels))

    def labelled_gauge(self, name: str, text: str, *labels: str) -> Labelled[Gauge]:
        """A gauge with bounded labels."""
        metric = Gauge(f"{self._prefix}_{name}", text, labels, registry=self.registry)
        return Labelled(metric, self._bounds_of(labels))

    def labelled_histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Labelled[Histogram]:
        """A histogram with bounded labels."""
        metric = Histogram(f"{self._prefix}_{name}", text, labels, buckets=buckets, registry=self.registry)
        return Labelled(metric, self._bounds_of(labels))

    def exposition(self) -> tuple[str, bytes]:
        """Content type and body for /metrics."""
        return CONTENT_TYPE_LATEST, generate_latest(self.registry)

    async def watch_loop_lag(self, clock: Clock, interval_seconds: float = LOOP_LAG_INTERVAL_SECONDS) -> None:
        """Measures the lag of the running event loop until it is cancelled."""
        while True:
            before = clock.now()
            await asyncio.sleep(interval_seconds)
            self.loop_lag_seconds.observe(max(0.0, clock.now() - before - interval_seconds))
