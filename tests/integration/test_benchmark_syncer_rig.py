"""The rig that benchmarks of the service stand on: a syncer's process and learners without a model."""

import numpy as np
import pytest

from benchmarks.rig_learner import RigLearner, cycle
from benchmarks.syncer_rig import SyncerProcess, flat_schema, run_values
from decoupled_diloco.core.ids import Fate, Role

SIZES = (512, 1024)


@pytest.mark.parametrize("store", ["memory", "durable"])
async def test_a_lone_learner_goes_through_rounds_and_an_observer_downloads_the_same(store):
    values = run_values(fragments={"count": 2})
    schema = flat_schema(SIZES)
    with SyncerProcess(values, store=store) as syncer:
        async with (
            RigLearner(syncer, "alpha", schema) as alpha,
            RigLearner(syncer, "eye", schema, Role.OBSERVER) as eye,
        ):
            assert sorted(alpha.sizes) == sorted(SIZES)
            await alpha.initialize()
            payloads = [alpha.payload(fragment) for fragment in range(2)]
            with syncer.measured() as measurement:
                first = await cycle(alpha, payloads[0], 0)
                await cycle(alpha, payloads[1], 1)
            await cycle(alpha, payloads[0], 0, await alpha.asked(0, after_round=first.round))
            news = await eye.published(0, after=first.base)
            values_seen = [learner.values_of(await learner.download(news)) for learner in (alpha, eye)]
            assert np.array_equal(*values_seen)
            assert await alpha.echo() > 0
        usage = measurement.usage
        assert usage.wall_seconds > 0
        assert usage.cpu_seconds > 0
        assert usage.syncer_peak_bytes > 4 * sum(SIZES)
        assert syncer.resident_bytes() > 0


async def test_what_the_syncer_answers_is_what_the_learner_gets():
    with SyncerProcess(run_values(quorum={"minimum": 2})) as syncer:
        async with RigLearner(syncer, "alpha", flat_schema([512])) as alpha:
            await alpha.initialize()
            ask = await alpha.asked(0)
            broken = np.full(512, np.nan, np.float32)
            assert await alpha.upload(ask, broken.data.cast("B")) is Fate.NONFINITE


def test_a_syncer_that_does_not_start_says_why():
    with (
        pytest.raises(RuntimeError, match="no-such-level"),
        SyncerProcess(run_values(), settings={"log-level": "no-such-level"}),
    ):
        pass
