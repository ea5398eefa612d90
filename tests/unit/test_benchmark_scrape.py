import math

import pytest

from benchmarks.scrape import LOOP_LAG, histogram, parsed
from decoupled_diloco.runtime.telemetry import Telemetry
from tests.integration.syncers import syncer, until


def exposed(telemetry: Telemetry) -> str:
    return telemetry.exposition()[1].decode()


def test_quantiles_are_of_what_came_between_two_looks():
    telemetry = Telemetry("t", "1")
    waits = telemetry.histogram("wait_seconds", "Waits.", (0.01, 0.02, 0.05))
    waits.observe(9.0)
    before = parsed(exposed(telemetry), "t_wait_seconds")
    for seconds in [0.005] * 98 + [0.015, 0.03]:
        waits.observe(seconds)
    found = parsed(exposed(telemetry), "t_wait_seconds").since(before)
    assert [found.quantile(share) for share in (0.5, 0.98, 0.99, 1.0)] == [0.01, 0.01, 0.02, 0.05]
    assert found.share_above(0.02) == pytest.approx(0.01)
    assert math.isnan(before.since(before).quantile(0.5))


def test_what_cannot_be_answered_is_refused():
    telemetry = Telemetry("t", "1")
    telemetry.histogram("wait_seconds", "Waits.", (0.01, 0.02)).observe(0.1)
    found = parsed(exposed(telemetry), "t_wait_seconds")
    with pytest.raises(ValueError, match=r"bound = 0\.015: the histogram's are 0\.01, 0\.02, inf"):
        found.share_above(0.015)
    with pytest.raises(ValueError, match="another process"):
        found.since(found).since(found)
    with pytest.raises(KeyError, match="no histogram 'u'"):
        parsed(exposed(telemetry), "u")


async def test_a_running_syncer_samples_the_lag_of_its_event_loop(tmp_path):
    async with syncer(tmp_path) as running:
        page = running.addresses.page
        before = await histogram(page, LOOP_LAG)
        registry = running.telemetry.registry
        await until(running, lambda: registry.get_sample_value(f"{LOOP_LAG}_count") > before.counts[-1])
        found = (await histogram(page, LOOP_LAG)).since(before)
    assert found.counts[-1] >= 1
