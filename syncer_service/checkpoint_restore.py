"""A run from a restore point: begins in an empty state directory where a checkpoint or a mirror stands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.restoring import in_new_timeline
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.logs import get_logger
from syncer_service.checkpoint_files import Manifest, read_manifest, read_states
from syncer_service.checkpoint_storage import open_folder
from syncer_service.mirror import write_lineage
from syncer_service.store.interface import Restored, Store
from syncer_service.store.records import DamageError, DamageKind

READS_MAX: Final = 5
"""A mirror may be replaced while it is read; then it is read again."""

RESTORING_FILE: Final = "restoring.json"
"""In a state directory: what a restore point is being written from. It goes when all of it is durable."""

RESTORED_FILE: Final = "restored.json"
"""In a state directory: the restore point that its run came from. A syncer that is started again with the same
`restore_from`, as a supervisor does, goes on with what it holds."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A checkpoint or mirror in memory, verified."""

    url: str
    manifest: Manifest
    states: Mapping[int, FragmentState]

    @property
    def held(self) -> Restored:
        """What it says of the run, as a store would."""
        return Restored(self.manifest.state, (), {}, self.manifest.model, (), self.manifest.config_values)


def find_restore_point(url: str, state_dir: Path, restored: Restored | None) -> RestorePoint | None:
    """What `syncer.restore_from` names; None if it is empty. Blocks.

    Raises:
        ConfigError: It cannot be used, the state directory holds a run already, or it would begin a new run where
            another one was being restored.
    """
    cut_short = "" if restored is not None and restored.state.versions else _noted(state_dir, RESTORING_FILE)
    if not url and cut_short:
        raise ConfigError(
            f'syncer.state_dir = "{state_dir}": a syncer ended while it restored the run from "{cut_short}", and '
            "nothing of it is there yet; start it with --restore-from again, or begin a new run in another state_dir"
        )
    if not url:
        return None
    if restored is not None and not cut_short:
        if url in (_noted(state_dir, RESTORED_FILE), _noted(state_dir, RESTORING_FILE)):
            log.info("restored_before", url=url, reason="the run in the state directory came from there; it goes on")
            return None
        raise ConfigError(
            f'syncer.restore_from = "{url}" is for an empty state directory, and syncer.state_dir = "{state_dir}" '
            "holds a run already: leave restore_from out to go on with that one, or give another state_dir; "
            "`syncerctl rollback` takes a run back to one of its checkpoints"
        )
    return read_restore_point(url)


def _noted(state_dir: Path, name: str) -> str:
    """The restore point that one of the two files names; empty: there is no such file."""
    try:
        return str(json.loads(open_folder(str(state_dir)).read(name))["url"])
    except FileNotFoundError:
        return ""


def read_restore_point(url: str) -> RestorePoint:
    """Reads all of a restore point; blocks.

    Raises:
        ConfigError: There is none, or it is damaged; with what it is.
    """
    setting = f'syncer.restore_from = "{url}"'
    for attempt in range(1, READS_MAX + 1):
        try:
            folder = open_folder(url)
            manifest = read_manifest(folder, "")
            return RestorePoint(url, manifest, read_states(folder, "", manifest))
        except FileNotFoundError as error:
            text = "there is no manifest.json in it; give the folder of one checkpoint, or that of a mirror"
            raise ConfigError(f"{setting}: {text}") from error
        except DamageError as damage:
            if damage.kind is not DamageKind.MISSING or attempt == READS_MAX:
                raise ConfigError(f"{setting}: {damage}") from damage
        except Exception as error:  # whatever the file system's library raises
            raise ConfigError(f"{setting} cannot be read: {type(error).__name__}: {error}") from error
    raise AssertionError("the last attempt returns or raises")


def restore_into(store: Store, state_dir: Path, point: RestorePoint, policy: Policy) -> Restored:
    """Writes a restore point into a store that holds nothing; blocks. The store has been begun.

    The run goes on in a new timeline, and every learner joins again: what was committed since is lost, and nothing that
    is based on it may be merged.

    Returns:
        What the store holds now.
    """
    manifest, folder = point.manifest, open_folder(str(state_dir))
    note = memoryview(json.dumps({"url": point.url}).encode() + b"\n")
    folder.write(RESTORING_FILE, [note])
    if manifest.kind == "mirror":
        write_lineage(state_dir, manifest.id)
    state = new_timeline(manifest.state, policy, f"the run was restored from {point.url}")
    store.save_model(manifest.model)
    commits = store.roll_back(point.states, state)
    folder.write(RESTORED_FILE, [note])
    folder.remove(RESTORING_FILE)
    log.warning(
        "run_restored_from",
        url=point.url,
        kind=manifest.kind,
        written_at=manifest.created_at,
        global_step=state.global_step,
        rounds_committed=state.committed_count,
        timeline=state.timeline,
        reason="what was committed after it is lost; learners join again by themselves",
    )
    fragments = {commit.fragment: commit for commit in commits}
    return Restored(state, (), fragments, manifest.model, (), manifest.config_values)


def new_timeline(cut: RunState, policy: Policy, reason: str) -> RunState:
    """The state of a run whose newest known state is `cut`; one that was in its last rounds goes on running."""
    state = in_new_timeline(cut, None, policy, reason)
    if state.phase is RunPhase.FINISHING:
        state = replace(state, phase=RunPhase.RUNNING, finish_reason=None)
    return state
