"""Carries out the machine's effects, in the order given.

Nothing here decides: messages go into the queues of the control streams, bytes into and out of buffers, and what
takes time (merge, commit) runs in an executor and comes back as an event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, get_args

from decoupled_diloco.arrays.encoding import Encoded
from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.lifecycle import TaskSupervisor
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.wire.control import Instruction
from syncer_service.first_parameters import FirstParameters
from syncer_service.merger import MergeInput, MergeResult, merge_round
from syncer_service.persistence import Persistence
from syncer_service.serving import Serving, completed
from syncer_service.store.interface import FencedError, FragmentCommit, MergedDelta, StorageError

log = get_logger(__name__)

ROUNDS_LOGGER: Final = "syncer_service.rounds"
"""Logger of what happens in every round."""

rounds_log = get_logger(ROUNDS_LOGGER)

BROADCASTS = (fx.CloseRound, fx.PublishFragment, fx.ChangePolicy)
"""Instructions without a learner: they go to everybody."""


@dataclass(frozen=True, slots=True)
class _Merged:
    """A merge that waits for its commit."""

    result: MergeResult
    base: fx.StartMerge
    download_encoding: str


class Shell:
    """The hands of the machine. For the event loop's thread only.

    Args:
        serving: The parts that it works with.
        tasks: Runs what takes time.
        persistence: The way into the store.
    """

    def __init__(self, serving: Serving, tasks: TaskSupervisor, persistence: Persistence) -> None:
        self._serving = serving
        self._machine = serving.machine
        self._driver = serving.driver
        self._clock = serving.clock
        self._uploads = serving.uploads
        self._sessions = serving.sessions
        self._store = serving.store
        self._tasks = tasks
        self._persistence = persistence
        self._newest: dict[int, FragmentCommit] = {}
        self._merged: dict[int, _Merged] = {}
        self.roll_back_states: dict[str, Mapping[int, FragmentState]] = {}
        """Values of the checkpoints that the run is to be rolled back to, by checkpoint."""
        self.first_parameters: FirstParameters | None = None
        """Reads the initial parameters, for a run that does not take those of a learner."""
        self.ended: asyncio.Future[fx.EndRun] = asyncio.get_running_loop().create_future()
        """Completes when the run is over."""
        self._handlers: dict[type[fx.Effect], Callable[..., None]] = {
            fx.AbortUpload: self._abort_upload,
            fx.StartMerge: self._start_merge,
            fx.CommitRound: self._commit_round,
            fx.CloseRound: self._close_round,
            fx.PublishFragment: self._publish,
            fx.LoadInitialParameters: self._load_initial,
            fx.CommitInitialParameters: self._commit_initial,
            fx.DiscardInitialParameters: self._discard_initial,
            fx.ExpireLearner: self._expire,
            fx.RollBack: self._roll_back,
            fx.EndRun: self._end,
            fx.Note: self._note,
        }

    def execute(self, effect: fx.Effect) -> None:
        """Carries out one effect; never waits."""
        handler = self._handlers.get(type(effect))
        if handler is not None:
            handler(effect)
        if isinstance(effect, get_args(Instruction)):
            self._instruct(effect)

    def _instruct(self, effect: Instruction) -> None:
        if isinstance(effect, BROADCASTS):
            self._sessions.send_to_all(effect)
        else:
            self._sessions.send(effect.learner, effect.incarnation, effect)

    # --- rounds ---

    def _abort_upload(self, effect: fx.AbortUpload) -> None:
        self._uploads.abort(effect.learner, effect.incarnation, effect.round, effect.reason)

    def _start_merge(self, effect: fx.StartMerge) -> None:
        base = self._newest.get(effect.fragment)
        slots = [self._uploads.find(learner, inc, effect.round) for learner, inc, _ in effect.contributions]
        ready = [slot for slot in slots if slot is not None and slot.complete]
        if base is None or base.version != effect.base or len(ready) != len(effect.contributions):
            reason = f"base {effect.base} or a contribution of {effect.contributions} is not there"
            log.error("merge_impossible", round=effect.round, reason=reason)
            self._driver.report(ev.MergeFailed(effect.round, reason))
            return
        # The merge has them from now on, and nobody after it: its round is committed or abandoned, and never retried.
        holds = [self._uploads.hand_over(slot) for slot in ready]
        release = ExitStack()
        for hold in holds:
            release.callback(hold.release)
        size = self._serving.agreement.value_count(effect.fragment)
        download_encoding = self._machine.policy.download_encoding
        inputs = [
            MergeInput(Encoded(hold.data, slot.encoding, size), weight, slot.squares)
            for hold, slot, (_, _, weight) in zip(holds, ready, effect.contributions, strict=True)
        ]
        executors = self._serving.executors
        started = self._clock.now()
        # Handed to its thread here, not in the task: that would be a turn of the loop later.
        merging = asyncio.get_running_loop().run_in_executor(
            executors.merge,
            lambda: merge_round(
                base.state,
                inputs,
                self._serving.agreement.known().fragments[effect.fragment].segments,
                learning_rate=effect.outer_learning_rate,
                momentum=effect.outer_momentum,
                download_encoding=download_encoding,
                threads=executors.merge_loops,
                read=release.close,
            ),
        )
        self._start(self._merge(effect, merging, release, download_encoding, started), f"merge of round {effect.round}")

    async def _merge(
        self,
        effect: fx.StartMerge,
        merging: asyncio.Future[MergeResult],
        release: ExitStack,
        download_encoding: str,
        started: float,
    ) -> None:
        try:
            result = await completed(merging)
        except Exception as error:
            log.exception("merge_failed", round=effect.round)
            self._driver.report(ev.MergeFailed(effect.round, f"{type(error).__name__}: {error}"))
            return
        finally:
            release.close()
        self._merged[effect.round] = _Merged(result, effect, download_encoding)
        seconds = self._clock.now() - started
        finished = ev.MergeFinished(effect.round, result.digest, result.finite, seconds, result.rda_over_avg)
        self._driver.report(finished)

    def _commit_round(self, effect: fx.CommitRound) -> None:
        merged = self._merged.pop(effect.round)
        has_delta = merged.result.delta_payload is not None
        commit = FragmentCommit(
            fragment=effect.fragment,
            version=effect.version,
            global_step=self._steps_made(effect.global_step),
            state=merged.result.state,
            delta_base=merged.base.base if has_delta else None,
            delta_payload=merged.result.delta_payload,
        )
        merge = merged.base
        delta = MergedDelta(
            merged.result.delta, merge.outer_learning_rate, merge.outer_momentum, merged.download_encoding
        )
        started = self._clock.now()
        # The state counts the round as open; a restart books it from the row beside it. Taken when it is handed to the
        # store, so that an older state never follows a newer one. That is now: a task would begin a turn later.
        state = self._machine.run_state()
        writing = self._persistence.begin(lambda: self._store.commit_round(commit, delta, effect, state))
        self._start(self._commit(commit, effect, writing, started), f"commit of round {effect.round}")

    def _steps_made(self, global_step: int) -> int:
        """Global steps that the run has made when the round of t(r) is due."""
        total = self._machine.policy.total_steps
        return min(global_step + 1, total) if total else global_step + 1

    async def _commit(
        self, commit: FragmentCommit, row: fx.CommitRound, writing: asyncio.Future[None], started: float
    ) -> None:
        self._serving.publications.prepare(commit)
        try:
            await self._persistence.settled(writing)
        except Exception as error:
            self._serving.publications.drop_prepared(commit.fragment)
            if not isinstance(error, StorageError | FencedError):
                log.exception("commit_failed", round=row.round)
            self._driver.report(ev.CommitFailed(row.round, str(error) or type(error).__name__))
            return
        self._newest[commit.fragment] = commit
        self._driver.report(ev.CommitFinished(row.round, self._clock.now() - started))

    def _close_round(self, effect: fx.CloseRound) -> None:
        self._uploads.close_round(effect.round, f"round {effect.round} has closed")
        if not effect.committed:
            self._serving.executors.store.submit(self._store.record_abandoned, effect)
        self._merged.pop(effect.round, None)
        # After the learners have been told: writing it down takes as long as telling them.
        asyncio.get_running_loop().call_soon(self._tell_closed, effect)

    def _tell_closed(self, effect: fx.CloseRound) -> None:
        """Metrics and log of a round that has ended."""
        closed = self._machine.closed_round(effect.round)
        if closed is not None:
            self._serving.metrics.round_closed(closed)
        say = rounds_log.info if effect.committed else log.info
        say(
            "round_committed" if effect.committed else "round_abandoned",
            round=effect.round,
            fragment=effect.fragment,
            global_step=effect.global_step,
            members=list(effect.members),
            reason=effect.reason,
        )

    def _publish(self, effect: fx.PublishFragment) -> None:
        failpoints.hit("publish")
        self._serving.publications.publish(effect.fragment, effect.version)

    # --- the beginning and the end ---

    def _load_initial(self, _: fx.LoadInitialParameters) -> None:
        self._start(self._initialize_from_file(), "initial parameters from a file")

    async def _initialize_from_file(self) -> None:
        assert self.first_parameters is not None
        staged = await self.first_parameters.stage()
        if staged is not None:
            await self._initialize(staged)

    def _commit_initial(self, effect: fx.CommitInitialParameters) -> None:
        self._start(self._initialize(effect), "commit of the initial parameters")

    async def _initialize(self, effect: fx.CommitInitialParameters) -> None:
        count = self._machine.policy.fragment_count
        commits = await self._persistence.write_when_possible(
            lambda: self._store.commit_initial(effect.learner, effect.incarnation, count)
        )
        self._newest = {commit.fragment: commit for commit in commits}
        digests = tuple(commit.version.digest for commit in commits)
        self._driver.report(ev.InitialParametersCommitted(digests))

    def _discard_initial(self, effect: fx.DiscardInitialParameters) -> None:
        self._serving.executors.store.submit(self._store.discard_initial, effect.learner, effect.incarnation)

    def _expire(self, effect: fx.ExpireLearner) -> None:
        self._uploads.expire(effect.learner, effect.incarnation, effect.reason)
        self._sessions.expire(effect.learner, effect.incarnation, self._expiry(effect))
        self._serving.publications.following.expire(effect.learner, effect.incarnation)

    def _expiry(self, effect: fx.ExpireLearner) -> PeerError | None:
        """What the stream of an expired incarnation ends with; None if it said goodbye itself."""
        record = self._machine.membership.learners.get(effect.learner)
        if record is None or record.incarnation != effect.incarnation:
            return PeerError(Reason.STALE_INCARNATION, f"{effect.learner}: {effect.reason}")
        if record.left:
            return None
        if record.must_join_again:
            return PeerError(Reason.NOT_JOINED, f"{effect.reason}; join again")
        return PeerError(Reason.TRANSFER_IDLE, f"{effect.learner}: {effect.reason}; attach again")

    def restore(self, fragments: Mapping[int, FragmentCommit], effects: Iterable[fx.Effect]) -> None:
        """Takes up what a store held: the newest versions, and what the restored machine wants done."""
        self._newest = dict(fragments)
        for effect in effects:
            self.execute(effect)

    def _roll_back(self, effect: fx.RollBack) -> None:
        self._start(self._rolled_back(effect), f"roll-back to {effect.checkpoint}")

    async def _rolled_back(self, effect: fx.RollBack) -> None:
        states = self.roll_back_states.pop(effect.checkpoint)
        try:
            commits = await self._persistence.write(lambda: self._store.roll_back(states, effect.state))
        except Exception as error:
            log.exception("roll_back_failed", checkpoint=effect.checkpoint)
            self._driver.report(ev.RollBackFailed(str(error) or type(error).__name__))
            return
        self._newest = {commit.fragment: commit for commit in commits}
        self._driver.report(ev.RolledBack())

    def _end(self, effect: fx.EndRun) -> None:
        if not self.ended.done():
            self.ended.set_result(effect)

    def _note(self, effect: fx.Note) -> None:
        say = {"warning": log.warning, "error": log.error}.get(effect.level, log.info)
        say(effect.name, reason=effect.text)

    def newest(self) -> dict[int, FragmentCommit]:
        """The newest committed version of every fragment."""
        return dict(self._newest)

    # --- work in the background ---

    def _start(self, work: Coroutine[object, object, None], name: str) -> None:
        self._tasks.start(work, name, may_finish=True)
