"""What a fault of the network does to a link, alone and with others."""

from __future__ import annotations

import random

import pytest

from chaos.inject import combined, conditions_of
from chaos.proxy import BOTH, FAIR, Conditions, Direction
from chaos.schedule import KINDS, Fault

NETWORK_KINDS = ("partition", "deaf", "throttle", "latency", "stall", "cut", "corrupt")


@pytest.mark.parametrize("name", NETWORK_KINDS)
def test_every_fault_of_the_network_makes_a_link_unfair(name):
    kind = KINDS[name]
    for choice in kind.choices or ("",):
        assert conditions_of(Fault(1.0, name, "alpha", 1.0, choice)) != FAIR


def test_a_kind_that_is_no_fault_of_the_network_is_refused():
    with pytest.raises(ValueError, match="kind = 'kill-learner'"):
        conditions_of(Fault(1.0, "kill-learner", "alpha", 1.0))


def test_several_faults_hold_together_in_any_order():
    faults = [
        Conditions(latency_seconds=0.1),
        Conditions(latency_seconds=0.3, bytes_per_second=5000.0),
        Conditions(bytes_per_second=9000.0, held=frozenset({Direction.UP})),
        Conditions(held=frozenset({Direction.DOWN}), flip_every_bytes=10, window_bytes=4096),
        Conditions(is_cut=True, flip_every_bytes=20, break_after_bytes=7),
    ]
    expected = Conditions(0.3, 5000.0, 4096, BOTH, True, 10, 7)
    for _ in range(5):
        random.Random(1).shuffle(faults)
        assert combined(faults) == expected
    assert combined([]) == FAIR
