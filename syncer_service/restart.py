"""Takes a run up where an earlier start of the syncer left it."""

from __future__ import annotations

from typing import Final

from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.config import RunConfig, describe_differences
from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.core.rounds import CLOSED_ROUNDS_KEPT
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.serving import Serving
from syncer_service.shell import Shell
from syncer_service.store.interface import Restored

FIXED_SETTINGS: Final = (
    "run.id",
    "run.seed",
    "run.learners_expected",
    "fragments.count",
    "fragments.interval_steps",
    "data.slot_count",
    "workload.factory",
)
"""Settings that a run keeps from its first start to its end: its state, its schedule or its data follow from them."""

log = get_logger(__name__)


def check_same_run(restored: Restored, config: RunConfig, where: str) -> None:
    """Compares the run file with the one that a state directory was written under.

    Args:
        restored: What the directory holds.
        config: The run file.
        where: The setting that says where it is, with its value, for the message.

    Raises:
        ConfigError: It holds another run, or one whose fixed settings were others.
    """
    before, now = dict(restored.config_values or {}), config.agreed_values()
    differences = describe_differences(before, now, "before", "now") if before else ()
    fixed = [line for line in differences if line.split(":", 1)[0] in FIXED_SETTINGS]
    if fixed:
        raise ConfigError(
            f"{where} holds the state of a run that was started with other settings: "
            f"{'; '.join(fixed)}. Start it with the settings of then, or give an empty directory to begin a new run"
        )
    if differences:
        log.warning("settings_changed", reason="; ".join(differences))


async def take_up(restored: Restored, serving: Serving, shell: Shell, now: float) -> None:
    """Puts a restored state into a machine that has seen no event yet, and what belongs to it into the other parts."""
    for loss in restored.losses:
        log.error("committed_state_lost", reason=loss)
    effects = serving.machine.restore(restored.state, restored.newer, now)
    if restored.model is not None:
        model = restored.model
        schema = Schema.from_dict(model.schema)
        serving.model_agreed(serving.agreement.restore(schema, model.fingerprint, model.first_learner))
    shell.restore(restored.fragments, effects)
    machine = serving.machine
    machine.rounds.closed.extend(await serving.in_store(lambda: serving.store.recent_rounds(CLOSED_ROUNDS_KEPT)))
    log.info(
        "run_restored",
        epoch=serving.epoch,
        phase=machine.phase.value,
        global_step=machine.global_step,
        timeline=machine.timeline,
        rounds_committed=machine.rounds.committed_count,
        rounds_open=len(machine.rounds.under_way),
        learners=machine.membership.registered_count(),
        stopped_seconds=None if restored.stopped_seconds is None else round(restored.stopped_seconds, 1),
    )
    if machine.phase is RunPhase.FINISHED:
        log.warning(
            "run_has_finished",
            reason=f"the run in this state directory has finished ({machine.steering.finish_reason}); its model is "
            "exported once more. To begin a new run give --state-dir an empty directory",
        )
