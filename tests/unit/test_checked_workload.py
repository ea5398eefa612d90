"""What a user reads whose workload raises or returns something of the wrong kind: one paragraph each."""

from __future__ import annotations

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from decoupled_diloco.runtime.config import ConfigError
from learner_service import checked_workload
from learner_service.app import cut
from learner_service.checked_workload import CheckedWorkload
from learner_service.step import InnerStep
from learner_service.workload import Workload, WorkloadDefaults, WorkloadError


class Good(WorkloadDefaults):
    """A workload without fault; tests replace members."""

    def __init__(self, **members: Any) -> None:
        vars(self).update(members)

    def init(self, seed: int) -> Any:
        return {"w": jnp.ones((3,), jnp.float32) * seed}

    def loss(self, params: Any, batch: Any) -> Any:
        return jnp.mean((params["w"] - batch) ** 2)

    def optimizer(self) -> Any:
        return optax.sgd(1.0)

    def learning_rate(self, schedule_step: int) -> float:
        return 0.5

    def data(self, slot: int, cursor: int) -> Any:
        return itertools.repeat(np.zeros(3, np.float32))

    def batch_tokens(self, batch: Any) -> int:
        return 3

    def evaluate(self, params: Any) -> dict[str, float]:
        return {"loss": 1.0}


def walk(workload: Workload) -> None:
    """All calls that learner and evaluator make, in their order."""
    step = InnerStep(workload)
    params = step.place(workload.init(1))
    cut(params, workload.merge_rule, 1)
    workload.fingerprint()
    batches = workload.data(2, 7)
    state = step.fresh_state(params)
    for batch in itertools.islice(batches, 2):
        step.compile(params, state, batch)
        params, state, _ = step(params, state, batch, workload.learning_rate(4))
        workload.batch_tokens(batch)
    workload.evaluate(params)


def checked(**members: Any) -> Workload:
    return CheckedWorkload(cast(Workload, Good(**members)), "my_model:factory")


def raising(*_: object) -> Any:
    raise KeyError("the culprit")


def test_a_workload_without_fault_passes() -> None:
    walk(checked())


@pytest.mark.parametrize(
    "member",
    [
        "init",
        "loss",
        "optimizer",
        "learning_rate",
        "data",
        "batch_tokens",
        "evaluate",
        "merge_rule",
        "mesh",
        "fingerprint",
    ],
)
def test_whatever_a_member_raises_is_quoted_in_one_paragraph(member: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        walk(checked(**{member: raising}))
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(f"workload.factory = 'my_model:factory': {member}(")
    assert "raised KeyError: 'the culprit'" in text
    assert __file__ in text


def exits(*_: object) -> Any:
    raise SystemExit(3)


def short(_slot: int, _cursor: int) -> Any:
    return iter([np.zeros(3, np.float32)])


def falls_over(_slot: int, _cursor: int) -> Any:
    yield np.zeros(3, np.float32)
    raise OSError("disk gone")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"data": short}, "data(slot=2, cursor=7) ended after 1 batches; data(slot, cursor) must return an iterator"),
        ({"data": falls_over}, "data(slot=2, cursor=7) raised OSError: disk gone"),
        ({"data": lambda *_: 5}, "data(slot=2, cursor=7) raised TypeError"),
        ({"data": lambda *_: itertools.repeat("text")}, "raised TypeError"),
        ({"loss": lambda p, b: (p["w"] - b) ** 2}, "returned an array of shape (3,) and type float32"),
        ({"loss": lambda *_: None}, "loss(params, batch) raised ValueError: None"),
        ({"loss": lambda *_: 1}, "returned an array of shape () and type int32"),
        ({"optimizer": lambda: None}, "optimizer() returned None; it must return an optax.GradientTransformation"),
        (
            {"optimizer": lambda: optax.GradientTransformation(lambda _: (), raising)},
            "the update of optimizer() raised KeyError",
        ),
        ({"learning_rate": lambda _: float("nan")}, "learning_rate(schedule_step=4) returned nan"),
        ({"learning_rate": lambda _: None}, "learning_rate(schedule_step=4) raised TypeError"),
        ({"batch_tokens": lambda _: 0}, "batch_tokens(batch) returned 0"),
        ({"batch_tokens": lambda _: 2.5}, "batch_tokens(batch) raised TypeError"),
        ({"evaluate": lambda _: {"accuracy": 1.0}}, 'a dict with at least "loss"'),
        ({"evaluate": lambda _: 1.0}, "evaluate(params) raised AttributeError"),
        ({"mesh": lambda: "tpu"}, "mesh() returned a str"),
        ({"fingerprint": lambda: {"tokenizer": 5}}, "fingerprint() returned a dict"),
        ({"init": exits}, "init(seed=1) raised SystemExit: 3"),
    ],
)
def test_nonsense_is_answered_with_what_would_be_right(members: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        walk(checked(**members))
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"merge_rule": lambda *_: "avg"}, "The merge rule of tensor 'w' of shape (3,) is a str ('avg')"),
        ({"merge_rule": lambda *_: None}, "is a NoneType (None); merge_rule(name, shape) must return"),
        ({"init": lambda _: {}}, "nothing to exchange"),
    ],
)
def test_parameters_that_cannot_be_exchanged_are_a_setting(members: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        walk(checked(**members))
    assert words in str(raised.value)
    assert raised.value.__suppress_context__


def test_a_fault_of_the_device_passes_as_it_is() -> None:
    def no_memory(_: int) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        walk(checked(init=no_memory))


def test_the_traceback_is_logged_at_the_level_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Log:
        def debug(self, _event: str, *, member: str, exc_info: BaseException) -> None:
            shown.append((member, exc_info))

    monkeypatch.setattr(checked_workload, "log", Log())
    with pytest.raises(WorkloadError):
        checked(init=raising).init(1)
    [(member, error)] = shown
    assert member == "init(seed=1)"
    assert isinstance(error, KeyError)
