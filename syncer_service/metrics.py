"""The syncer's metrics for Prometheus.

Whatever the machine knows is read from its status at the moment of the scrape, so that it is never out of date and
zeros are there from the start; events that leave no trace in the status (a round's times, bytes, fates) are counted
as they happen. Labels are bounded: enumerations, and at most `LEARNERS_SHOWN_MAX` learners. `NAMES` is the full list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from decoupled_diloco.core.ids import Fate, LearnerState, Role, RoundState, RunPhase
from decoupled_diloco.core.status import LearnerStatus, RoundStatus, RunStatus
from decoupled_diloco.runtime.telemetry import LabelBound, Telemetry

PREFIX: Final = "decoupled_diloco_syncer"

LEARNERS_SHOWN_MAX: Final = 64
"""Learners with series of their own, worst first."""

FIGURES_SHOWN_MAX: Final = 16
"""Evaluation figures with a series of their own."""

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_RATES: Final = (1e4, 1e5, 1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9)
_COUNTS: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0)

RUN_GAUGES: Final[Mapping[str, str]] = {
    "goodput_ratio": "Compute seconds over allocated learner-seconds; never read it alone.",
    "token_goodput_ratio": "Merged tokens over the tokens of a cluster with no failure and no sync.",
    "participation_ratio": "Members over live learners, averaged over committed rounds.",
    "uptime_ratio": "Share of time in which at least one learner advanced.",
    "global_steps": "Global steps that the run has made.",
    "total_steps": "Global step after which the run finishes; 0: open end.",
    "learners_registered": "Learners known to the run that have not left, lost ones included.",
    "learners_live": "Learners with a lease.",
    "learners_participating": "Members of the newest committed round.",
    "effective_interval_steps": "Inner steps per sync of a fragment as measured (H as it is).",
    "fastest_step_seconds": "Step time of the fastest live learner.",
    "sync_seconds": "Moving average of upload, merge, commit and download.",
    "quorum_seconds": "Moving average from the first start to the K-th.",
    "loss": "Mean training loss of the live learners' newest reports; NaN before the first.",
    "warnings": "Warnings in force, such as advice to raise tau; the status page has their words.",
}
LEARNER_GAUGES: Final[Mapping[str, str]] = {
    "learner_live": "Whether a learner is live (1) or not (0).",
    "learner_local_steps": "Inner steps of the learner's incarnation.",
    "learner_step_seconds": "Smoothed step time.",
    "learner_tokens_per_second": "Tokens per second over the recent reports.",
    "learner_loss": "Newest training loss; absent before the first.",
    "learner_last_seen_seconds": "Time since the syncer last heard from the learner.",
    "learner_rounds_behind": "Staleness: rounds since the learner's newest merged contribution.",
    "learner_rounds_merged": "Rounds that the learner was a member of.",
    "learner_network_wait_seconds": "Time in which the learner's device thread waited for the network.",
    "learner_uploaded_bytes": "Bytes of contributions sent by the learner's incarnation.",
    "learner_downloaded_bytes": "Bytes of fragments received by the learner's incarnation.",
}
SHELL_GAUGES: Final[Mapping[str, str]] = {
    "queue_events": "Events that wait for a decision.",
    "queue_events_highest": "Most events that have waited at once since this process started.",
    "queue_events_max": "Limit of that queue.",
    "upload_buffer_used_bytes": "Memory of contributions that are being received or wait for their merge.",
    "upload_buffer_allocated_bytes": "The same with memory that is kept for the next ones and for results of merges.",
    "upload_buffer_max_bytes": "Limit of that memory.",
    "download_payload_bytes": "Memory of payloads that are ready to be served.",
    "downloads_active": "Downloads being served.",
    "downloads_waiting": "Downloads asked for in advance, whose version is not published yet.",
    "control_streams_active": "Attach streams that are up.",
    "tape_written_bytes": "Bytes that this process has written to the event tape.",
    "tape_missed_events": "Events of this process that are on no tape, because the disk did not keep up.",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """What the scrape reads."""

    run: RunStatus
    learners: tuple[LearnerStatus, ...]
    rounds_under_way: tuple[RoundStatus, ...]
    shell: Mapping[str, float]
    """A value for each of `SHELL_GAUGES`."""


class SyncerMetrics(Collector):
    """All metrics of one syncer.

    Args:
        telemetry: The process's registry; made with `PREFIX`.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._read: Callable[[], Figures] | None = None
        self._figure_names = LabelBound(FIGURES_SHOWN_MAX)
        self.round_contributors = telemetry.histogram("round_contributors", "Members of committed rounds.", _COUNTS)
        self._round_seconds: dict[str, Histogram] = {
            part: telemetry.histogram(f"round_{part}_seconds", text, _SECONDS)
            for part, text in {
                "quorum_wait": "From the first start to the K-th, by round.",
                "grace": "The grace window as used, by round.",
                "last_call": "From the end of grace to the last contribution, by round.",
                "merge": "The merge and outer step, by round.",
                "commit": "The commit, by round.",
            }.items()
        }
        self.merge_gain = telemetry.gauge(
            "rda_over_avg_ratio", "Norm of the newest merged delta over that of the plain average."
        )
        self._contributions = telemetry.labelled_counter("contributions", "Contributions by fate.", "fate")
        for fate in Fate:
            self._contributions.labels(fate=fate.value)
        self._bytes: dict[str, Counter] = {
            "received": telemetry.counter("received_bytes", "Payload bytes of contributions and initial parameters."),
            "sent": telemetry.counter("sent_bytes", "Payload bytes of downloads."),
        }
        self.checkpoints = telemetry.labelled_counter("checkpoints", "Attempts at a checkpoint by outcome.", "outcome")
        for outcome in ("written", "failed"):
            self.checkpoints.labels(outcome=outcome)
        self._checkpoint_gauges: dict[str, Gauge] = {
            name: telemetry.gauge(f"checkpoint_{name}", text)
            for name, text in {
                "global_steps": "Global steps of the newest checkpoint that this process has written.",
                "bytes": "Size of that checkpoint.",
                "seconds": "How long it took to write that checkpoint, in the background.",
            }.items()
        }
        self.mirror_lag_rounds = telemetry.gauge(
            "mirror_lag_rounds", "Committed rounds that the mirror does not have; NaN without a mirror."
        )
        self.mirror_lag_seconds = telemetry.gauge(
            "mirror_lag_seconds", "Age of the mirror while the run is ahead of it; NaN without a mirror."
        )
        self._mirror_copies = telemetry.counter("mirror_copies", "Positions of the run that the mirror has taken.")
        self._mirror_bytes = telemetry.counter("mirror_bytes", "Payload bytes written to the mirror.")
        self.mirror_failures = telemetry.counter("mirror_failures", "Attempts at a copy to the mirror that failed.")
        for gauge in (self.mirror_lag_rounds, self.mirror_lag_seconds):
            gauge.set(float("nan"))
        self._rates: dict[str, Histogram] = {
            direction: telemetry.histogram(f"{direction}_bytes_per_second", text, _RATES)
            for direction, text in {
                "upload": "Speed of whole uploads.",
                "download": "Speed of whole downloads.",
            }.items()
        }
        telemetry.registry.register(self)

    def connect(self, read: Callable[[], Figures]) -> None:
        """Says where the figures come from; before that only the counted ones are exported."""
        self._read = read

    # --- counted as it happens ---

    def round_closed(self, status: RoundStatus) -> None:
        """A round was committed or abandoned."""
        if status.state is not RoundState.COMMITTED:
            return
        self.round_contributors.observe(len(status.members))
        self.merge_gain.set(status.rda_over_avg)
        seconds = {
            "quorum_wait": status.quorum_seconds,
            "grace": status.grace_seconds,
            "last_call": status.last_call_seconds,
            "merge": status.merge_seconds,
            "commit": status.commit_seconds,
        }
        for part, value in seconds.items():
            self._round_seconds[part].observe(value)

    def contribution_ended(self, fate: Fate) -> None:
        """A contribution has its fate."""
        self._contributions.labels(fate=fate.value).inc()

    def bytes_received(self, size_bytes: int) -> None:
        """A chunk arrived."""
        self._bytes["received"].inc(size_bytes)

    def bytes_sent(self, size_bytes: int) -> None:
        """A message with payload was sent."""
        self._bytes["sent"].inc(size_bytes)

    def transferred(self, direction: str, size_bytes: int, seconds: float) -> None:
        """A whole transfer ("upload" or "download") is over."""
        if seconds > 0:
            self._rates[direction].observe(size_bytes / seconds)

    def checkpoint_written(self, global_step: int, size_bytes: int, seconds: float) -> None:
        """A checkpoint is complete."""
        self.checkpoints.labels(outcome="written").inc()
        for name, value in {"global_steps": global_step, "bytes": size_bytes, "seconds": seconds}.items():
            self._checkpoint_gauges[name].set(value)

    def mirror_copied(self, size_bytes: int) -> None:
        """The mirror has a newer position."""
        self._mirror_copies.inc()
        self._mirror_bytes.inc(size_bytes)

    # --- read at the scrape ---

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not read the machine to register this."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Everything that the status tells."""
        if self._read is None:
            return
        figures = self._read()
        yield from _run_metrics(figures.run)
        yield from self._evaluation(figures.run)
        yield from _population(figures)
        for name, text in SHELL_GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, figures.shell[name])
        shown = [status for status in figures.learners if status.state is not LearnerState.LEFT]
        yield from _learner_metrics([s for s in shown if s.role is Role.LEARNER][:LEARNERS_SHOWN_MAX])

    def _evaluation(self, run: RunStatus) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            f"{PREFIX}_evaluation", "Newest evaluation of published parameters.", labels=["figure"]
        )
        for name, value in sorted(run.evaluation.items()):
            if self._figure_names.fold(name) == name:
                family.add_metric([name], value)
        yield family
        step = run.evaluation_global_step
        yield GaugeMetricFamily(f"{PREFIX}_evaluation_global_steps", "Global steps at that evaluation.", step)


def _run_metrics(run: RunStatus) -> Iterator[Metric]:
    goodput = run.goodput
    values: dict[str, float | None] = {
        "goodput_ratio": goodput.goodput,
        "token_goodput_ratio": goodput.token_goodput,
        "participation_ratio": goodput.participation,
        "uptime_ratio": goodput.uptime,
        "global_steps": run.global_step,
        "total_steps": run.total_steps,
        "learners_registered": run.registered_count,
        "learners_live": run.live_count,
        "learners_participating": run.participating_count,
        "effective_interval_steps": run.effective_interval_steps,
        "fastest_step_seconds": run.step_seconds,
        "sync_seconds": run.sync_seconds,
        "quorum_seconds": run.quorum_seconds,
        "loss": float("nan") if run.loss is None else run.loss,
        "warnings": len(run.warnings),
    }
    for name, text in RUN_GAUGES.items():
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, values[name] or 0)
    rounds = CounterMetricFamily(f"{PREFIX}_rounds", "Closed rounds by outcome.", labels=["outcome"])
    rounds.add_metric(["committed"], run.rounds_committed_count)
    rounds.add_metric(["abandoned"], run.rounds_abandoned_count)
    yield rounds
    yield CounterMetricFamily(f"{PREFIX}_tokens_processed", "Tokens of all inner steps.", goodput.tokens_processed)
    redone = "Inner steps made again on the same data, because no committed round held their effect."
    yield CounterMetricFamily(f"{PREFIX}_steps_redone", redone, goodput.steps_redone)
    merged = "Tokens merged; a token counts by the share of parameters whose merge contained it."
    yield CounterMetricFamily(f"{PREFIX}_tokens_merged", merged, goodput.tokens_merged)
    yield _counters("tokens_discarded", "Tokens discarded by cause.", "cause", goodput.tokens_discarded)
    yield _counters("activity_seconds", "Learner-seconds by activity.", "activity", goodput.activity_seconds)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _population(figures: Figures) -> Iterator[Metric]:
    """How many of each kind there are; every kind is there, also with none."""
    phase = {phase.value: int(phase is figures.run.phase) for phase in RunPhase}
    yield _gauges("run_phase", "The phase of the run (1) and all others (0).", "phase", phase)
    states = dict.fromkeys((state.value for state in LearnerState), 0)
    for status in figures.learners:
        states[status.state.value] += status.role is Role.LEARNER
    yield _gauges("learners", "Learners by state.", "state", states)
    observers = sum(s.role is Role.OBSERVER and s.attached for s in figures.learners)
    yield GaugeMetricFamily(f"{PREFIX}_observers_attached", "Observers with a control stream.", observers)
    under_way = dict.fromkeys((state.value for state in RoundState if not state.is_closed), 0)
    for item in figures.rounds_under_way:
        under_way[item.state.value] += 1
    yield _gauges("rounds_under_way", "Rounds under way by state.", "state", under_way)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _learner_metrics(learners: list[LearnerStatus]) -> Iterator[Metric]:
    families = {
        name: GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["learner"]) for name, text in LEARNER_GAUGES.items()
    }
    for status in learners:
        values: dict[str, float | None] = {
            "learner_live": int(status.state is LearnerState.LIVE),
            "learner_local_steps": status.local_step,
            "learner_step_seconds": status.step_seconds,
            "learner_tokens_per_second": status.tokens_per_second,
            "learner_loss": status.loss,
            "learner_last_seen_seconds": status.last_seen_seconds,
            "learner_rounds_behind": status.rounds_behind_count,
            "learner_rounds_merged": status.rounds_merged_count,
            "learner_network_wait_seconds": status.network_wait_seconds,
            "learner_uploaded_bytes": status.uploaded_bytes,
            "learner_downloaded_bytes": status.downloaded_bytes,
        }
        for name, value in values.items():
            if value is not None:
                families[name].add_metric([status.learner], value)
    yield from families.values()


_COUNTED: Final = (
    "rounds_total",
    "steps_redone_total",
    "tokens_processed_total",
    "tokens_merged_total",
    "tokens_discarded_total",
    "activity_seconds_total",
    "contributions_total",
    "received_bytes_total",
    "sent_bytes_total",
    "checkpoints_total",
    "mirror_copies_total",
    "mirror_bytes_total",
    "mirror_failures_total",
)
_OTHERS: Final = (
    "build_info",
    "rda_over_avg_ratio",
    "run_phase",
    "learners",
    "observers_attached",
    "rounds_under_way",
    "evaluation",
    "evaluation_global_steps",
    "checkpoint_global_steps",
    "checkpoint_bytes",
    "checkpoint_seconds",
    "mirror_lag_rounds",
    "mirror_lag_seconds",
)
_HISTOGRAMS: Final = (
    "event_loop_lag_seconds",
    "round_contributors",
    "round_quorum_wait_seconds",
    "round_grace_seconds",
    "round_last_call_seconds",
    "round_merge_seconds",
    "round_commit_seconds",
    "upload_bytes_per_second",
    "download_bytes_per_second",
)

NAMES: Final[frozenset[str]] = frozenset(
    f"{PREFIX}_{name}"
    for name in (
        *RUN_GAUGES,
        *LEARNER_GAUGES,
        *SHELL_GAUGES,
        *_COUNTED,
        *_OTHERS,
        *(f"{name}_{part}" for name in _HISTOGRAMS for part in ("bucket", "sum", "count")),
    )
)
"""Every metric of the syncer as Prometheus stores it, without those of the Python process.

A test compares it with /metrics.
"""
