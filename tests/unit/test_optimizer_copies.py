import numpy as np
import optax
import pytest

from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments
from decoupled_diloco.arrays.tree import ParameterTree
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Version
from decoupled_diloco.wire.peer import CopyName
from learner_service import optimizer_copies
from learner_service.optimizer_copies import Boundary, OptimizerCopies
from learner_service.workload import default_merge_rule

PARAMS = {"a": np.ones((6, 5), np.float32), "b": np.ones((5, 6), np.float32)}
STATE = optax.adam(1.0).init(PARAMS)
HERE = Boundary(CopyName(2, 17), {0: Version(1, 3, "x")})


def copies_of() -> OptimizerCopies:
    copies = OptimizerCopies()
    schema = ParameterTree(PARAMS, default_merge_rule).schema
    copies.fragments = OptimizerFragments(PARAMS, fragment_schema(schema, 2), STATE)
    copies.open()
    return copies


def serve(copies: OptimizerCopies) -> None:
    copies.serve(STATE, lambda: HERE)


def test_a_boundary_delivers_what_was_asked_for_and_says_which_it_is():
    copies, woken = copies_of(), []
    copies.wake_device = lambda: woken.append(True)
    assert not copies.has_waiting
    first, second = copies.ask(0), copies.ask(2)
    assert copies.has_waiting
    assert copies.ask(0) is first
    assert len(woken) == 3
    serve(copies)
    assert not copies.has_waiting
    assert (first.result(0).name, first.result(0).version) == (CopyName(2, 17), Version(1, 3, "x"))
    assert second.result(0).version is None
    assert copies.ask(0) is not first


def test_nothing_is_looked_up_when_nobody_waits():
    copies_of().serve(None, lambda: pytest.fail("asked for the boundary"))


def test_one_boundary_copies_no_more_than_it_may_but_always_something(monkeypatch):
    monkeypatch.setattr(optimizer_copies, "BOUNDARY_BYTES_MAX", 100)
    copies = copies_of()
    asked = [copies.ask(part) for part in range(3)]
    for count in (1, 2, 3):
        serve(copies)
        assert sum(future.done() for future in asked) == count


def test_who_waits_is_told_when_the_state_becomes_worthless():
    copies = copies_of()
    waiting = copies.ask(1)
    copies.refuse("its loss is not finite")
    for failed in (lambda: waiting.result(0), lambda: copies.ask(0), copies.check):
        with pytest.raises(PeerError, match="its loss is not finite") as refused:
            failed()
        assert refused.value.reason is Reason.NOT_READY
    assert not copies.has_waiting
    copies.open()
    copies.check()


def test_a_caller_that_has_gone_away_is_in_nobodys_way():
    copies = copies_of()
    gone, other = copies.ask(0), copies.ask(1)
    assert gone.cancel()
    serve(copies)
    assert other.result(0).arrays.part == 1
    assert copies.ask(0).cancel()
    copies.refuse("the end")
