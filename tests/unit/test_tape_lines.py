"""Every event goes through a line of the tape and comes back, whatever a peer put into it."""

from __future__ import annotations

import dataclasses
import json
from typing import get_args

import pytest
from hypothesis import given, settings

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.plain import from_tagged
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.tape_file import record_line
from tests.unit.test_core_strange_peers import FROM_PEERS


@settings(max_examples=300, deadline=None, derandomize=True)
@given(FROM_PEERS)
def test_what_a_peer_says_comes_back_with_the_same_bits(event: ev.Event) -> None:
    line = record_line(1.5, event, [])
    plain = json.loads(line)
    again = from_tagged(ev.Event, plain["event"])
    assert type(again) is type(event)
    assert record_line(1.5, again, []) == line  # as texts: a NaN is not equal to itself


def filled(kind: type) -> object:
    """A value of a class, with something of each field's type."""
    state = SyncerMachine(Policy(fragment_count=2, interval_steps=4)).run_state()
    by_type = {"int": 3, "str": "x", "float": 0.1, "bool": True, "RunState": state, "tuple[float, ...]": (0.1, 0.9)}
    by_type["tuple[str, ...]"] = ("x",)
    fields = [field for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return kind(**{field.name: by_type[str(field.type)] for field in fields if str(field.type) in by_type})


OF_SHELL = [
    kind
    for kind in get_args(ev.Event)
    if kind.__name__.startswith(("Merge", "Commit", "Drain", "Evict", "Readmit", "Roll", "Storage", "Model", "Finish"))
]


@pytest.mark.parametrize("kind", OF_SHELL, ids=lambda kind: kind.__name__)
def test_what_the_shell_and_operators_say_comes_back(kind: type) -> None:
    event = filled(kind)
    assert from_tagged(ev.Event, json.loads(record_line(0.0, event, []))["event"]) == event


def test_every_effect_of_a_roll_back_can_be_written_down() -> None:
    state = SyncerMachine(Policy(fragment_count=2, interval_steps=4)).run_state()
    effects = [fx.RollBack("c-1", state), fx.ChangePolicy(Policy())]
    assert "RollBack" in record_line(0.0, ev.TimerFired(), effects)
