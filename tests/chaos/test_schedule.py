"""The schedule: from the seed alone, with what every run must have."""

from __future__ import annotations

from collections import Counter

import pytest

from chaos.schedule import CALM_SECONDS, KINDS, LEARNER_POINTS, SYNCER, SYNCER_POINTS, draw
from tests.tidy.source_tree import ROOT, python_files

LEARNERS = ("alpha", "beta", "gamma")


def test_the_same_seed_gives_the_same_schedule_and_another_one_another():
    first = draw(7, 180.0, LEARNERS, tuple(KINDS))
    assert draw(7, 180.0, LEARNERS, tuple(KINDS)) == first
    assert draw(8, 180.0, LEARNERS, tuple(KINDS)) != first


@pytest.mark.parametrize("seed", range(20))
def test_a_run_of_three_minutes_has_at_least_what_every_run_has(seed):
    faults = draw(seed, 180.0, LEARNERS, tuple(KINDS))
    counts = Counter(fault.kind for fault in faults)
    assert {name: kind.at_least for name, kind in KINDS.items() if counts[name] < kind.at_least} == {}
    assert all(CALM_SECONDS <= fault.at_seconds <= 180.0 - CALM_SECONDS for fault in faults)
    assert [fault.at_seconds for fault in faults] == sorted(fault.at_seconds for fault in faults)


def test_a_short_run_kills_before_anything_else():
    faults = draw(1, 30.0, LEARNERS, tuple(KINDS))
    assert all(fault.kind.startswith("kill") for fault in faults)


def test_only_the_kinds_that_were_asked_for_on_their_own_victims():
    faults = draw(3, 120.0, LEARNERS, ("kill-syncer", "partition"))
    assert {fault.kind for fault in faults} == {"kill-syncer", "partition"}
    assert all((fault.victim == SYNCER) == (fault.kind == "kill-syncer") for fault in faults)
    assert all(fault.victim in LEARNERS for fault in faults if fault.kind == "partition")


def test_each_failpoint_is_one_of_the_process_that_comes_to_it():
    """The syncer's points are in its service, all others in the learner's."""
    for points, package in ((SYNCER_POINTS, "syncer_service"), (LEARNER_POINTS, "learner_service")):
        text = "".join((ROOT / path).read_text() for path in python_files(package))
        assert [point for point in points if f'failpoints.hit("{point}")' not in text] == []
