"""The evaluator's own files, and the reason with which it leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.lifecycle import StopRequest
from learner_service.connection import Connection
from learner_service.evaluator import app
from learner_service.evaluator.app import Evaluation, Evaluator, EvaluatorMetrics
from learner_service.evaluator.follower import Follower, Published


class Run:
    """A run that has one version, as a connection and a follower in one."""

    end = None
    is_empty = False
    is_complete = True
    global_step = 4
    downloaded_bytes = 0
    joined: Any = SimpleNamespace(incarnation=1, policy=SimpleNamespace(deadlines=None))

    def __init__(self) -> None:
        self.left: list[str] = []

    async def run(self) -> None:
        await StopRequest().wait_async()

    async def wait_until(self, condition: Any) -> None:
        assert condition(self)

    def published(self) -> Published:
        return Published({}, {}, self.global_step)

    def client(self) -> Any:
        return self

    async def leave(self, _incarnation: int, reason: str, _deadlines: object) -> None:
        self.left.append(reason)

    async def close(self) -> None: ...


class Following(Run):
    """As a follower it closes at once."""

    def close(self) -> None:  # type: ignore[override]
        return None


async def test_a_full_disk_is_a_setting_and_the_reason_of_the_goodbye() -> None:
    run = Run()
    follower = cast(Follower, Following())
    evaluation = cast(Evaluation, SimpleNamespace(figures=lambda _: {"loss": 1.0}))
    evaluator = Evaluator(follower, evaluation, 1, Path("/dev/full"), EvaluatorMetrics("0"))
    with pytest.raises(ConfigError, match=r'^evaluator\.output_file = "/dev/full": cannot be written \(No space left'):
        await app._until_end(cast(Connection, run), follower, evaluator, StopRequest())
    assert run.left == ["the evaluator stops after a ConfigError"]
