"""A session compiles its programs once, whatever the run asks of it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import jax

from tests.integration.learner_threads import Trainee, figure, start_values, train
from tests.integration.syncers import config_of, machine_of, syncer

STEP = 0.01
WARM_STEPS = 30


def targets(seed: int) -> dict[str, Any]:
    """Shapes that no other test compiles for."""
    return {**start_values(seed), "odd": jax.numpy.full((13, 3), float(seed)), "head": jax.numpy.full(11, float(seed))}


async def test_after_its_first_rounds_a_session_compiles_nothing_more(tmp_path):
    """A slow learner that gets last calls, a loss that is not finite; and every version is read back."""
    early: Counter[str] = Counter()
    late: Counter[str] = Counter()
    warm: set[str] = set()

    def listen(event: str, _: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            (late if len(warm) == 2 else early)[str(about.get("fun_name"))] += 1

    def note(trainee: Trainee):
        return lambda session, number: warm.add(trainee.name) if number >= WARM_STEPS else None

    fast = Trainee("fast", targets(1), params=targets(3), step_seconds=STEP)
    slow = Trainee("slow", targets(2), params=targets(3), step_seconds=1.7 * STEP)
    slow.loss_of = lambda number, loss: math.nan if number == WARM_STEPS + 20 else loss
    for trainee in (fast, slow):
        trainee.on_step = note(trainee)
    config = config_of(run={"total_steps": 150})
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        async with syncer(tmp_path, config) as running:
            await train(running, config, fast, slow)
            assert machine_of(running).rounds.committed_count >= 50
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert slow.restarts, "it started over"
    assert warm == {"fast", "slow"}
    for trainee in (fast, slow):
        assert figure(trainee.session, "verified_versions_total") >= 30
    fragment_count = config.fragments.count
    for program in ("jit(_copied)", "jit(_overwrite)"):
        assert 1 <= early[program] <= 2 * fragment_count, "each learner compiles for each fragment at most once"
    assert not late, f"compiled after {WARM_STEPS} steps: {dict(late)}"
