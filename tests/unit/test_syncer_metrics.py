import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from decoupled_diloco.core.ids import Fate, LearnerState, Role, RoundState
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.status import LearnerStatus, MemberStatus, RoundStatus
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.telemetry import Telemetry
from syncer_service.metrics import (
    FIGURES_SHOWN_MAX,
    LEARNERS_SHOWN_MAX,
    NAMES,
    PREFIX,
    SHELL_GAUGES,
    Figures,
    SyncerMetrics,
)

LEARNER = LearnerStatus(
    learner="a", incarnation=1, role=Role.LEARNER, state=LearnerState.LIVE, reason="", attached=True, local_step=7,
    token_count=700, step_seconds=0.5, tokens_per_second=200.0, last_seen_seconds=0.1, slot=0, cursor=7, loss=2.5,
    schedule_step=7, rounds_behind_count=1, rounds_merged_count=3, rounds_merged_by_fragment=(3,),
    network_wait_seconds=0.0, uploaded_bytes=10, downloaded_bytes=20,
)  # fmt: skip


def samples(*learners, rounds=(), change=lambda run: run, metrics_of=lambda metrics: None):
    telemetry = Telemetry(PREFIX, "1.2.3")
    metrics = SyncerMetrics(telemetry)
    run = change(SyncerMachine(Policy()).status(0.0))
    figures = Figures(run, tuple(learners), tuple(rounds), dict.fromkeys(SHELL_GAUGES, 0.0))
    metrics.connect(lambda: figures)
    metrics_of(metrics)
    _, body = telemetry.exposition()
    return [
        sample
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith(PREFIX)
    ]


def value(found, name, **labels):
    matching = [s.value for s in found if s.name == f"{PREFIX}_{name}" and labels.items() <= s.labels.items()]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


def test_the_list_of_names_is_what_is_exported():
    run_with_figures = lambda run: dataclasses.replace(run, evaluation={"loss": 1.0})  # noqa: E731
    found = {sample.name for sample in samples(LEARNER, change=run_with_figures)}
    assert {name for name in found if not name.endswith("_created")} == NAMES


def test_zeros_are_there_from_the_start():
    found = samples()
    assert value(found, "rounds_total", outcome="committed") == 0
    assert value(found, "rounds_total", outcome="abandoned") == 0
    assert {s.labels["fate"] for s in found if s.name == f"{PREFIX}_contributions_total"} == set(Fate)
    assert {s.labels["cause"] for s in found if s.name == f"{PREFIX}_tokens_discarded_total"} >= {"overlap", "died"}
    assert value(found, "learners", state="lost") == 0
    assert value(found, "run_phase", phase="initializing") == 1
    assert value(found, "round_merge_seconds_count") == 0


def test_a_learners_figures_ride_on_its_reports():
    left = dataclasses.replace(LEARNER, learner="gone", state=LearnerState.LEFT)
    silent = dataclasses.replace(LEARNER, learner="b", state=LearnerState.LOST, loss=None, step_seconds=None)
    observer = dataclasses.replace(LEARNER, learner="eval", role=Role.OBSERVER)
    found = samples(LEARNER, left, silent, observer)
    assert value(found, "learner_step_seconds", learner="a") == 0.5
    assert value(found, "learner_live", learner="a") == 1
    assert value(found, "learner_live", learner="b") == 0
    assert {s.labels["learner"] for s in found if s.name == f"{PREFIX}_learner_loss"} == {"a"}
    assert value(found, "learners", state="left") == 1
    assert value(found, "observers_attached") == 1


def test_labels_are_bounded():
    crowd = [dataclasses.replace(LEARNER, learner=f"l{index}") for index in range(LEARNERS_SHOWN_MAX + 9)]
    many = lambda run: dataclasses.replace(run, evaluation={f"f{index}": 1.0 for index in range(40)})  # noqa: E731
    found = samples(*crowd, change=many)
    assert len([s for s in found if s.name == f"{PREFIX}_learner_live"]) == LEARNERS_SHOWN_MAX
    assert len([s for s in found if s.name == f"{PREFIX}_evaluation"]) == FIGURES_SHOWN_MAX
    assert value(found, "learners", state="live") == LEARNERS_SHOWN_MAX + 9


def test_a_committed_round_leaves_its_times():
    closed = RoundStatus(
        3, 0, 5, RoundState.COMMITTED, "all", (MemberStatus("a", 1.0, 10, 1),), quorum_seconds=0.2, grace_seconds=0.1,
        merge_seconds=0.05, rda_over_avg=1.7,
    )  # fmt: skip

    def happens(metrics):
        metrics.round_closed(closed)
        metrics.round_closed(dataclasses.replace(closed, state=RoundState.ABANDONED))
        metrics.contribution_ended(Fate.LATE)
        metrics.bytes_received(100)
        metrics.bytes_sent(50)
        metrics.transferred("upload", 1000, 0.5)
        metrics.transferred("download", 1000, 0.0)

    found = samples(metrics_of=happens)
    assert value(found, "round_contributors_count") == 1
    assert value(found, "round_quorum_wait_seconds_sum") == 0.2
    assert value(found, "rda_over_avg_ratio") == 1.7
    assert value(found, "contributions_total", fate="late") == 1
    assert value(found, "received_bytes_total") == 100
    assert value(found, "sent_bytes_total") == 50
    assert value(found, "upload_bytes_per_second_sum") == 2000
    assert value(found, "download_bytes_per_second_count") == 0
