"""Settings of several connections and of rate limits: what is refused, what is doubted, what reaches the transfers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from decoupled_diloco.core.policy import Deadlines, Policy
from decoupled_diloco.runtime.config import ConfigError, resolve
from decoupled_diloco.runtime.config_layers import Layer, table_layer
from decoupled_diloco.runtime.ports import Address
from decoupled_diloco.runtime.rate_limit import BYTES_PER_SECOND_MAX, PIECE_BYTES_MIN
from decoupled_diloco.runtime.spread_channel import SpreadChannel
from learner_service.app import opener_of
from learner_service.config import EvaluatorDocument, LearnerDocument, LearnerSettings
from learner_service.network_plan import limits_of, peer_plan_of
from learner_service.transfer_rates import upload_doubt

RATE_SETTINGS = ("upload_bytes_per_second_max", "download_bytes_per_second_max")


def layer(document: type[Any], **sections: Mapping[str, object]) -> Layer:
    return table_layer(document, sections, "test")


def problems_of(document: type[Any], **sections: Mapping[str, object]) -> str:
    try:
        resolve(document, [layer(document, **sections)])
    except ConfigError as error:
        return str(error)
    return ""


def test_the_lowest_limit_that_is_allowed_is_the_one_that_the_refusal_names() -> None:
    fragments = {"count": 8}
    lowest = 2 * 8 * PIECE_BYTES_MIN // 5 + 1
    said = problems_of(LearnerDocument, fragments=fragments, learner={"upload_bytes_per_second_max": lowest - 1})
    assert f"learner.upload_bytes_per_second_max = {lowest - 1} (test)" in said
    assert "deadlines.upload_idle_seconds = 5.0 (default)" in said
    assert f"Make the limit {lowest} or more" in said
    assert not problems_of(LearnerDocument, fragments=fragments, learner={"upload_bytes_per_second_max": lowest})


def test_a_longer_deadline_allows_a_lower_limit() -> None:
    learner = {"download_bytes_per_second_max": 1_000_000, "peer_recovery_seconds": 0.0}
    assert "4 streams take turns in pieces of 1048576 bytes" in problems_of(LearnerDocument, learner=learner)
    assert not problems_of(LearnerDocument, learner=learner, deadlines={"upload_idle_seconds": 10.0})


def test_streams_to_and_from_peers_take_turns_with_those_of_the_syncer() -> None:
    alone = {"download_bytes_per_second_max": 2_000_000, "peer_recovery_seconds": 0.0}
    assert not problems_of(LearnerDocument, learner=alone)
    assert "up to 8 streams" in problems_of(LearnerDocument, learner=alone | {"peer_recovery_seconds": 60.0})
    donor = {"upload_bytes_per_second_max": 60_000, "peer_listen": "127.0.0.1:0"}
    assert "up to 16 streams" in problems_of(LearnerDocument, learner=donor, fragments={"count": 8})
    assert not problems_of(LearnerDocument, learner=donor | {"peer_listen": ""}, fragments={"count": 8})


def test_an_evaluator_has_a_limit_of_its_own() -> None:
    said = problems_of(EvaluatorDocument, evaluator={"download_bytes_per_second_max": 1000})
    assert "evaluator.download_bytes_per_second_max = 1000 (test)" in said
    assert not problems_of(EvaluatorDocument, evaluator={"download_bytes_per_second_max": 2_000_000})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("bulk_connections", 0, "a whole number >= 1 and <= 16"),
        ("bulk_connections", 17, "a whole number >= 1 and <= 16"),
        ("upload_bytes_per_second_max", -1, "a whole number >= 0 and <= 1000000000000"),
        ("upload_bytes_per_second_max", 10**18, "a whole number >= 0 and <= 1000000000000"),
        ("download_bytes_per_second_max", 1.5, "a whole number >= 0 and <= 1000000000000"),
        ("download_bytes_per_second_max", 10**12 + 1, "a whole number >= 0 and <= 1000000000000"),
        ("step_seconds_min", 1e300, "a number >= 0 and <= 10000000"),
        ("drain_seconds", 1e300, "a number > 0 and <= 10000000"),
        ("peer_recovery_seconds", 1e300, "a number >= 0 and <= 10000000"),
        ("snapshot_seconds", 1e300, "a number > 0 and <= 10000000"),
    ],
)
def test_other_values_are_refused_with_what_would_be_right(name: str, value: object, wanted: str) -> None:
    said = problems_of(LearnerDocument, learner={name: value})
    assert f"learner.{name} = {value} (test): must be {wanted}" in said


@pytest.mark.parametrize(
    ("count", "idle_seconds"), [(8, 5e-324), (8, 1e-300), (8, 1e-9), (10**15, 5.0), (10**300, 1e300), (10**400, 5.0)]
)
def test_a_limit_that_no_number_helps_is_to_be_left_away(count: int, idle_seconds: float) -> None:
    sections = {"fragments": {"count": count}, "deadlines": {"upload_idle_seconds": idle_seconds}}
    said = problems_of(LearnerDocument, learner={"upload_bytes_per_second_max": 10_000}, **sections)
    assert "Make it 0, or give streams longer" in said or "Make the limit 32768 or more" in said
    assert "deadlines.upload_idle_seconds" in said


def test_an_evaluator_s_limit_is_bounded_likewise() -> None:
    said = problems_of(EvaluatorDocument, evaluator={"download_bytes_per_second_max": 10**18})
    assert (
        "evaluator.download_bytes_per_second_max = 1000000000000000000 (test): must be a whole number >= 0 and" in said
    )


def test_the_highest_limits_that_are_allowed_can_be_used() -> None:
    """Channels are made with what the transport may read ahead, an int32 option of gRPC; nothing divides by zero."""
    settings = LearnerSettings(
        upload_bytes_per_second_max=BYTES_PER_SECOND_MAX, download_bytes_per_second_max=BYTES_PER_SECOND_MAX
    )
    assert not problems_of(LearnerDocument, learner=dict.fromkeys(RATE_SETTINGS, BYTES_PER_SECOND_MAX))
    assert upload_doubt(settings, Policy(), [10**9]) == ""
    assert limits_of(settings).upload.piece_bytes(1 << 20) == 1 << 20

    async def opened() -> None:
        await opener_of(settings, "learner")(Address("127.0.0.1", 1)).close()

    asyncio.run(opened())


def test_an_upload_that_can_never_be_whole_in_time_is_doubted_with_both_numbers() -> None:
    policy = Policy(upload_encoding="bf16", deadlines=Deadlines(upload_seconds_min=30.0))
    settings = LearnerSettings(upload_bytes_per_second_max=1_000_000)
    assert upload_doubt(settings, policy, [10_000_000, 15_000_000]) == ""
    said = upload_doubt(settings, policy, [10_000_000, 20_000_000])
    assert "40000000 bytes takes 40 s" in said
    assert "upload_seconds_min = 30 s" in said
    assert upload_doubt(LearnerSettings(), policy, [10**12]) == ""


def test_one_limit_is_shared_with_peers() -> None:
    settings = LearnerSettings(upload_bytes_per_second_max=7, download_bytes_per_second_max=9)
    limits = limits_of(settings)
    assert (limits.upload.bytes_per_second, limits.download.bytes_per_second) == (7, 9)
    assert peer_plan_of(settings, limits).limits is limits


def test_as_many_connections_are_opened_as_the_setting_says() -> None:
    async def opened(count: int) -> object:
        channels = opener_of(LearnerSettings(bulk_connections=count), "learner")(Address("127.0.0.1", 1))
        await channels.close()
        return channels.bulk

    assert not isinstance(asyncio.run(opened(1)), SpreadChannel)
    several = asyncio.run(opened(5))
    assert isinstance(several, SpreadChannel)
    assert len(several.calls_under_way) == 5
