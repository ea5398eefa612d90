"""What the syncer keeps of a run, behind one interface.

Methods may block (a durable store writes and syncs), so callers run them in the store's own executor thread: one caller
at a time. `newest` and `find` never wait for a disk, and any thread may call them. Values are immutable: a version,
once committed, never changes, and whoever has a part of it may keep that. What a method has returned from is durable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.effects import CloseRound, CommitRound
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.core.status import RoundStatus

FIRST_TIMELINE: Final = 1
FIRST_NUMBER: Final = 1


class VersionGoneError(LookupError):
    """A version does not exist, or is no longer kept.

    Attributes:
        newest: The fragment's newest version; None before the run has parameters.
    """

    def __init__(self, fragment: int, version: Version, newest: Version | None) -> None:
        self.newest = newest
        super().__init__(f"fragment {fragment} has no version {version} (newest: {newest or 'none'})")


class StorageError(OSError):
    """The store cannot write now: no room, or a disk that fails. What was durable still is; try again later."""


class FencedError(Exception):
    """Another syncer has taken the store over. This one must stop: it can write nothing any more."""


@dataclass(frozen=True, slots=True)
class FragmentCommit:
    """One version of one fragment with all that belongs to it.

    Attributes:
        fragment: The fragment.
        version: Its name.
        global_step: Global steps that the run had made when its round was due; 0 for the initial parameters.
        state: Theta, outer momentum, downlink residual.
        delta_base: The version that `delta_payload` turns into this one, or None.
        delta_payload: The step in the download encoding, for holders of exactly `delta_base`, or None.
    """

    fragment: int
    version: Version
    global_step: int
    state: FragmentState
    delta_base: Version | None = None
    delta_payload: memoryview | None = None


@dataclass(frozen=True, slots=True)
class MergedDelta:
    """What a commit's state follows from, given the state before: the arguments of `outer_step`.

    Attributes:
        delta: The merged delta, float32.
        learning_rate: Outer learning rate.
        momentum: Outer momentum (mu).
        download_encoding: How the step was handed to holders of the version before.
    """

    delta: FloatVector
    learning_rate: float
    momentum: float
    download_encoding: str


@dataclass(frozen=True, slots=True)
class RunModel:
    """What the run's learners have agreed on, as plain values.

    Attributes:
        schema: As `Schema.to_dict` gives it.
        fingerprint: What learners have in common beyond the run file, by name.
        first_learner: The learner that brought it.
    """

    schema: dict[str, Any]
    fingerprint: dict[str, str]
    first_learner: str


@dataclass(frozen=True, slots=True)
class Restored:
    """What a store holds of a run.

    Attributes:
        state: The newest state that was written down.
        newer: Committed rounds that the state may not know, in the order of their commits.
        fragments: The newest version of every fragment, verified; empty before the run has parameters.
        model: The run's model; None before the first learner.
        losses: What was found damaged, and what became of it, in sentences for people; empty if all is whole.
        config_values: The run file's values by dotted name as of the last start.
        stopped_seconds: How long ago the state was written, by this host's wall clock; only for display.
    """

    state: RunState
    newer: tuple[CommitRound, ...]
    fragments: Mapping[int, FragmentCommit]
    model: RunModel | None
    losses: tuple[str, ...] = ()
    config_values: Mapping[str, str] | None = None
    stopped_seconds: float | None = None


class Store(Protocol):
    """The interface that the syncer works with."""

    @property
    def epoch(self) -> int:
        """Counts the starts of a syncer on this store, from 1. A syncer with an older one is fenced."""

    def restored(self) -> Restored | None:
        """What the store held when it was opened; None: no run. Payloads that are damaged were dealt with."""

    def begin(self, run_id: str, config_values: Mapping[str, str], fragment_count: int) -> None:
        """Takes down which run it is, at every start, before anything else is written; differences are ledgered."""

    def save_model(self, model: RunModel) -> None:
        """Takes down what the run's learners have agreed on."""

    def save_state(self, state: RunState) -> None:
        """Takes down the run's state, for an answer that must hold (a join, a pause)."""

    def stage_initial(self, learner: str, incarnation: int, fragment: int, theta: FloatVector) -> str:
        """Keeps a fragment of the initial parameters aside and returns its digest.

        A second one replaces the first. Need not be durable: who uploads it does so again.
        """

    def commit_initial(self, learner: str, incarnation: int, fragment_count: int) -> tuple[FragmentCommit, ...]:
        """Turns the staged fragments of one incarnation into the first versions, in one transaction.

        Raises:
            ValueError: Not all fragments are staged.
            StorageError: It cannot be written now.
        """

    def discard_initial(self, learner: str, incarnation: int) -> None:
        """Drops what an incarnation has staged."""

    def commit_round(self, commit: FragmentCommit, merged: MergedDelta, row: CommitRound, state: RunState) -> None:
        """Makes a version, its ledger row and the run's state durable; the version is the newest from now on.

        The payload is durable before the one transaction that makes it count.

        Raises:
            StorageError: It cannot be written now; the version before is still the newest.
            FencedError: Another syncer has taken the store over.
        """

    def record_abandoned(self, row: CloseRound) -> None:
        """Takes a round down that came to nothing. Need not be durable at once."""

    def roll_back(self, states: Mapping[int, FragmentState], state: RunState) -> tuple[FragmentCommit, ...]:
        """Makes these values the newest versions, under the names in `state`, with that state, in one transaction."""

    def recent_rounds(self, limit: int) -> tuple[RoundStatus, ...]:
        """The newest rounds that have ended, oldest first; durations are not kept."""

    def probe(self) -> None:
        """Finds out whether the store can write again.

        Raises:
            StorageError: It cannot.
        """

    def newest(self) -> Mapping[int, FragmentCommit]:
        """The newest version of every fragment; empty before the run has parameters."""

    def find(self, fragment: int, version: Version) -> FragmentCommit:
        """A version that is still kept.

        Raises:
            VersionGoneError: It is not there.
        """

    def close(self) -> None:
        """Ends the use of the store; releases it for another process."""
