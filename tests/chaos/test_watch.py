"""How long recoveries took, from what was seen."""

from __future__ import annotations

import pytest

from chaos.watch import LearnerSeen, Recovery, Sample, recovery


def sample(t: float, committed: int, **learners: tuple[int, str, int]) -> Sample:
    seen = {name: LearnerSeen(*values) for name, values in learners.items()}
    return Sample(t, "RUN_PHASE_RUNNING", committed, ((1, committed),), seen, {})


KILLED = [
    sample(1.0, 5, alpha=(3, "live", 5)),
    sample(2.0, 6, alpha=(3, "live", 6)),
    sample(3.0, 6, alpha=(3, "stalled", 6)),
    sample(4.0, 7, alpha=(3, "lost", 6)),
    sample(5.0, 8, alpha=(4, "recovering", 6)),
    sample(6.0, 9, alpha=(4, "live", 6)),
    sample(7.0, 10, alpha=(4, "live", 7)),
]


def test_a_killed_learner_is_missed_and_comes_back():
    assert recovery(KILLED, "alpha", 2.5, 4.5) == Recovery(detect=0.5, next_commit=1.5, back=2.5)


def test_a_learner_that_is_replaced_before_anybody_noticed_was_not_detected():
    quick = [KILLED[0], KILLED[1], *KILLED[4:]]
    assert recovery(quick, "alpha", 2.5, 2.7).detect is None
    assert recovery(quick, "alpha", 2.5, 4.9).detect == 2.5  # by its new incarnation


def test_what_never_ended_has_no_way_back():
    assert recovery(KILLED[:4], "alpha", 2.5, None) == Recovery(0.5, 1.5, None)


def test_a_syncer_is_back_with_its_next_commit():
    samples = [sample(1.0, 5), sample(2.0, 5), sample(4.0, 5), sample(5.0, 6)]
    assert recovery(samples, "syncer", 2.5, 3.5) == Recovery(None, 2.5, 1.5)


@pytest.mark.parametrize("samples", [[], KILLED[:1]])
def test_too_few_looks_say_nothing(samples):
    assert recovery(samples, "alpha", 2.5, 4.5) == Recovery(None, None, None)
