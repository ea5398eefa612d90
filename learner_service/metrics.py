"""The learner's metrics, all in one table; served at `learner.http_listen` and, in part, carried by its reports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import prometheus_client

from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime.ports import listen_error, parse_address
from decoupled_diloco.runtime.telemetry import Telemetry
from learner_service.handover import Handover
from learner_service.optimizer_recovery import Recovered

PREFIX = "decoupled_diloco_learner"
STEP_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TRANSFER_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
BYTES_PER_VALUE = 4


class LearnerMetrics:
    """What a learner counts. Methods may be called from any thread.

    Args:
        version: release of the software.
    """

    def __init__(self, version: str) -> None:
        self.telemetry = telemetry = Telemetry(PREFIX, version)
        self._lock = threading.Lock()
        self._detached_at: float | None = None
        self.steps = telemetry.gauge("steps", "Inner steps of this incarnation.")
        self.tokens = telemetry.gauge("tokens", "Tokens of those steps.")
        self.schedule_step = telemetry.gauge("schedule_step", "Step of the inner learning-rate schedule.")
        self.loss = telemetry.gauge("loss", "Training loss of the newest step.")
        self.step_seconds = telemetry.histogram(
            "step_seconds", "Duration of a step from boundary to boundary, holds excluded.", STEP_BUCKETS
        )
        self.activity_seconds = telemetry.labelled_gauge(
            "activity_seconds",
            "Seconds since the start of the process by activity; they add up to its age.",
            "activity",
        )
        self.network_wait_seconds = telemetry.gauge(
            "network_wait_seconds", "Seconds the device thread waited for the network; 0 unless the barrier is on."
        )
        self.uploads = telemetry.labelled_counter("uploads", "Contributions by what became of them.", "fate")
        self.uploaded_bytes = telemetry.gauge("uploaded_bytes", "Bytes of contributions sent by this process.")
        self.downloaded_bytes = telemetry.gauge("downloaded_bytes", "Bytes of fragments received by this process.")
        self.transfer_seconds = telemetry.labelled_histogram(
            "transfer_seconds", "Duration of a transfer, repetitions included.", TRANSFER_BUCKETS, "direction"
        )
        self.transfer_rate = telemetry.labelled_gauge(
            "transfer_megabytes_per_second",
            "Float32 megabytes of the newest fragment moved, over the time that it took.",
            "direction",
        )
        self.is_attached = telemetry.gauge("attached", "1 while the control stream to the syncer is up.")
        self.detached_seconds = telemetry.counter("detached_seconds", "Seconds without the control stream.")
        self.recoveries = telemetry.counter("recoveries", "Times that parameters were taken anew from the syncer.")
        self.optimizer_recoveries = telemetry.labelled_counter(
            "optimizer_recoveries",
            "Searches for another state of the inner optimizer by where it came from: peer, snapshot, fresh (nowhere).",
            "source",
        )
        self.optimizer_recovery_seconds = telemetry.gauge(
            "optimizer_recovery_seconds", "Duration of the newest of them, waits for donors included."
        )
        self.optimizer_recovery_rate = telemetry.gauge(
            "optimizer_recovery_megabytes_per_second", "Bytes of the state over that time; 0 if it is fresh."
        )
        self.optimizer_received_bytes = telemetry.counter(
            "optimizer_received_bytes", "Bytes of optimizer state received from peers."
        )
        self.optimizer_served_bytes = telemetry.counter(
            "optimizer_served_bytes", "Bytes of optimizer state sent to peers."
        )
        self.snapshots = telemetry.counter("snapshots", "Snapshots of the optimizer's state that were written.")
        self.verified_versions = telemetry.counter(
            "verified_versions", "Applied versions that were read back from the devices and compared."
        )
        self.digest_mismatches = telemetry.counter(
            "digest_mismatches", "Applied versions whose values on the devices were not the syncer's."
        )

    def observe(self, handover: Handover, now: float) -> None:
        """Takes the present figures over."""
        progress = handover.snapshot().progress
        self.steps.set(progress.local_step)
        self.tokens.set(progress.token_count)
        self.schedule_step.set(progress.schedule_step)
        self.network_wait_seconds.set(progress.network_wait_seconds)
        self.uploaded_bytes.set(progress.uploaded_bytes)
        self.downloaded_bytes.set(progress.downloaded_bytes)
        for activity, seconds in handover.activity_seconds().items():
            self.activity_seconds.labels(activity=activity.value).set(seconds)
        self._count_detached(now)

    def observe_upload(self, fate: Fate, value_count: int, seconds: float) -> None:
        """A contribution got its answer."""
        self.uploads.labels(fate=fate.value).inc()
        if fate is Fate.ACCEPTED:
            self._observe_transfer("up", value_count, seconds)

    def observe_download(self, value_count: int, seconds: float) -> None:
        """A version arrived."""
        self._observe_transfer("down", value_count, seconds)

    def observe_optimizer_recovery(self, recovered: Recovered) -> None:
        """A search for another optimizer state has ended."""
        self.optimizer_recoveries.labels(source=recovered.source).inc()
        self.optimizer_recovery_seconds.set(recovered.seconds)
        self.optimizer_recovery_rate.set(recovered.megabytes_per_second)

    def count_refused(self) -> None:
        """This learner refused to send a contribution that is not finite, or too large."""
        self.uploads.labels(fate="refused_here").inc()

    def attached(self, now: float) -> None:
        """The control stream is up."""
        self._count_detached(now)
        self._detached_at = None
        self.is_attached.set(1)

    def detached(self, now: float) -> None:
        """It is not."""
        self._count_detached(now)
        self._detached_at = now
        self.is_attached.set(0)

    def _count_detached(self, now: float) -> None:
        with self._lock:
            if self._detached_at is not None:
                self.detached_seconds.inc(max(0.0, now - self._detached_at))
                self._detached_at = now

    def _observe_transfer(self, direction: str, value_count: int, seconds: float) -> None:
        self.transfer_seconds.labels(direction=direction).observe(seconds)
        if seconds > 0.0:
            rate = BYTES_PER_VALUE * value_count / seconds / 1e6
            self.transfer_rate.labels(direction=direction).set(rate)


@contextmanager
def served(telemetry: Telemetry, address: str, setting: str) -> Iterator[None]:
    """Serves /metrics in plain HTTP while the context lasts.

    Args:
        telemetry: what is shown.
        address: host:port; empty: nowhere.
        setting: name of the setting with the address, for the message.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    if not address:
        yield
        return
    parsed = parse_address(address)
    try:
        server, thread = prometheus_client.start_http_server(parsed.port, parsed.host, telemetry.registry)
    except OSError as error:
        raise listen_error(parsed, setting, error) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
