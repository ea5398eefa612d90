"""Plain values: what is written down is read back, and what does not fit is refused in words."""

import json
import math
from dataclasses import dataclass, field, replace

import pytest

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.goodput import GoodputLedger
from decoupled_diloco.core.ids import Activity, Role, Version
from decoupled_diloco.core.plain import PlainError, from_plain, from_tagged, tagged, to_plain


@dataclass(frozen=True)
class Cup:
    size: float
    role: Role = Role.LEARNER
    marks: tuple[tuple[int, str], ...] = ()
    by_slot: dict[int, int] = field(default_factory=dict)
    version: Version | None = None


CUP = Cup(math.inf, Role.OBSERVER, ((1, "a"), (2, "b")), {3: 4}, Version(1, 2, "d"))


def through_json(value):
    return json.loads(json.dumps(to_plain(value), allow_nan=False))


def test_a_dataclass_comes_back():
    assert from_plain(Cup, through_json(CUP)) == CUP


def test_a_ledger_comes_back():
    ledger = GoodputLedger((0.5, 0.5))
    ledger.spend(Activity.COMPUTE, 1.5)
    ledger.discard(1, 7, "died")
    assert from_plain(GoodputLedger, through_json(ledger)) == ledger


def test_an_event_comes_back_with_its_class():
    event = ev.FragmentApplied("a", 1, 0, Version(1, 2, "d"), 5, 50, download_seconds=None)
    written = json.loads(json.dumps(tagged(event)))
    assert written["type"] == "FragmentApplied"
    assert from_tagged(ev.Event, written) == event


def test_a_field_that_a_file_does_not_have_takes_its_default():
    assert from_plain(Cup, {"size": 1}) == Cup(1.0)


def test_a_contribution_that_was_taped_without_its_problem_is_read():
    event = ev.ContributionReceived(1, "a", 1, 5, False, 2e18, "the contribution's norm 2e+18 is above 1e+18")
    written = tagged(event)
    assert from_tagged(ev.Event, written) == event
    del written["problem"]
    assert from_tagged(ev.Event, written) == replace(event, problem="")


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"size": "big"}, r"Cup.size = 'big': must be of type float"),
        ({}, r"size of Cup is not there"),
        ({"size": 1.0, "colour": "red"}, r"Cup has no field colour; was it written by a newer release"),
        ({"size": 1.0, "role": "boss"}, r"Cup.role = 'boss': must be one of 'learner', 'observer'"),
        ({"size": 1.0, "marks": [[1]]}, r"Cup.marks = \[1\]: must be 2 values"),
        ({"size": 1.0, "version": 3}, r"Cup.version = 3: must be a mapping with the fields of Version"),
        ({"size": True}, r"Cup.size = True: must be of type float"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(plain, message):
    with pytest.raises(PlainError, match=message):
        from_plain(Cup, plain)


def test_an_event_of_no_known_class_is_refused():
    with pytest.raises(PlainError, match="there is no 'Surprise' among"):
        from_tagged(ev.Event, {"type": "Surprise"})
