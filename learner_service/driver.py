"""The network thread of a learner: carries out what its machine asks for.

One asyncio loop in a thread of its own. It owns the connection, all transfers and the reports; what it shares with the
device thread is in `handover`. Nothing here ever makes the device thread wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from decoupled_diloco.arrays.encoding import FloatVector, kernels
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.core.ids import Decline
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.learner_effects import CancelUpload, DeclineRound, Download, Leave, UploadInitialParameters
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.channel import Backoff
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.wire.control import Report
from learner_service.bulk_client import BulkClient
from learner_service.connection import Connection
from learner_service.handed_over import Action, Arrived, UploadJob
from learner_service.handover import Handover
from learner_service.metrics import LearnerMetrics
from learner_service.network_plan import NetworkPlan
from learner_service.optimizer_copies import OptimizerCopies
from learner_service.peer_side import PeerSide, RecoveryOrder
from learner_service.recoveries import DIVERGED_ADVICE, DivergedError, RecoveryWatch
from learner_service.syncer_client import ControlStream, Joined, JoinRequest
from learner_service.transfers import TransferHooks, Transfers
from learner_service.uploader import Sender

log = get_logger(__name__)

REPORT_SECONDS_MIN = 0.05
"""Reports are at least this far apart, however short the steps are."""
TRANSFER_THREADS = 2
"""Threads for decoding, encoding and digests."""
FAREWELL_SECONDS = 2.0
"""How long the goodbye to a syncer may take that may be gone itself."""


class LearnerDriver:
    """The network side of one learner process. Made and started on any thread; a `connection.Participant`.

    Args:
        plan: what it is built from.
        handover: what is shared with the device thread.
        copies: the same, of the optimizer's state.
        initial_values: the learner's own initial values of a fragment; called on a transfer thread, if asked for.
        metrics: told about transfers.
        clock: instants.
    """

    def __init__(
        self,
        plan: NetworkPlan,
        handover: Handover,
        copies: OptimizerCopies,
        initial_values: Callable[[int], FloatVector],
        metrics: LearnerMetrics,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._join = plan.join
        self._handover = handover
        self._initial_values = initial_values
        self._metrics = metrics
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._wake_pending = threading.Event()
        self._executor = ThreadPoolExecutor(TRANSFER_THREADS, "transfer", initializer=kernels)
        self._uploads = RecoveryWatch("a contribution cannot be merged", 0, clock)
        self._peers = PeerSide(
            plan.peers, plan.join.participant_id, plan.join.schema.digest, copies, self._executor, metrics, clock
        )
        self._stream: ControlStream | None = None
        self._transfers: Transfers | None = None
        self._seeds: dict[int, Arrived] = {}
        self._reports: deque[Report] = deque()
        self._hello_progress: ev.Progress | None = None
        self._detached_timer: asyncio.TimerHandle | None = None
        self._is_attached = False
        self.joined: Joined | None = None
        """What the syncer handed out; None before the first join."""
        self.failure: BaseException | None = None
        """Why the network thread has ended before its time."""
        self.end_reason: str | None = None
        """Why there is nothing more to do: the run has finished, or this learner has left."""

    # ---- any thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread; it joins the run by itself."""
        self._handover.wake_network = self._wake
        self._thread.start()
        self._ready.wait()

    def drain(self, reason: str) -> None:
        """Begins to leave: no more steps, what is asked for is answered, then goodbye."""
        self._post(lambda: self._begin_drain(reason))

    def recover(self, reason: str) -> None:
        """Starts over from published versions, at the very next boundary."""
        event = lev.RecoverAsked(reason)
        actions = self._handover.handle(event)
        self._post(lambda: self._act(actions, event))

    def recover_optimizer(self, order: RecoveryOrder) -> None:
        """Looks for another optimizer state; `order.done` hears of it on the network thread."""
        self._post(lambda: self._recover_optimizer(order))

    def close(self, reason: str) -> None:
        """Ends the thread, with a goodbye if that was not said yet. May be called again."""
        self._post(lambda: self._end(reason))
        self._thread.join()

    def _post(self, work: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(work)

    def _wake(self) -> None:
        """The device thread left something; at most one wake-up is on its way at a time."""
        if not self._wake_pending.is_set() and self._loop is not None:
            self._wake_pending.set()
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._empty_outbox)

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # the device thread must hear of whatever ends this one
            if isinstance(error, PeerError) and error.reason is Reason.RUN_FINISHED:
                self.end_reason = error.text
            else:
                self.failure = error
        finally:
            self._ready.set()
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._handover.wake_device()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._connection = Connection(
            self._plan.addresses, self._plan.open_channels, self, Backoff(random.Random()), log
        )
        self._ready.set()
        self._join = replace(self._join, peer_address=await self._peers.open())
        connecting = asyncio.create_task(self._connection.run())
        ending = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((connecting, ending, self._broken), return_when=asyncio.FIRST_COMPLETED)
            for done in (connecting, self._broken):
                if done.done():
                    done.result()
        finally:
            if self._transfers is not None:
                self._transfers.cancel_all()
            for task in (connecting, ending):
                task.cancel()
            await asyncio.gather(connecting, ending, return_exceptions=True)
            if self._ended.is_set():
                await self._say_goodbye()
            await self._connection.close()
            await self._peers.close()

    async def _say_goodbye(self) -> None:
        """Leaves the run, if it was joined and the syncer is there."""
        if self.joined is None:
            return
        try:
            async with asyncio.timeout(FAREWELL_SECONDS):
                client, reason = self._connection.client(), self.end_reason or ""
                await client.leave(self.joined.incarnation, reason, self.joined.policy.deadlines)
        except (PeerError, UnreachableError, TimeoutError) as error:
            log.info("left_without_an_answer", reason=str(error) or "no answer in time")

    # ---- Participant -------------------------------------------------------------------------------------------------

    def join_request(self) -> JoinRequest:
        """What to join with."""
        return self._join

    def on_joined(self, joined: Joined) -> None:
        """A new incarnation: a new machine, no transfers; versions that are here already are kept."""
        if self._transfers is not None:
            self._transfers.cancel_all()
        self._reports.clear()
        machine = LearnerMachine(joined.policy, cursor=joined.cursor)
        self._handover.journal.joined(self._handover.generation + 1, joined)
        newest = self._handover.start_incarnation(machine, joined.versions)
        self._seeds = {} if joined.initialized else newest or self._seeds
        self.joined = joined
        self._peers.run_id = joined.run_id
        self._transfers = Transfers(
            self._bulk,
            Sender(
                self._join.participant_id, joined.incarnation, joined.policy.upload_encoding, self._plan.error_feedback
            ),
            self._plan.fragmentation,
            self._plan.device,
            self._handover,
            TransferHooks(self._act, self._decline, self._not_sent, self._fail, self._uploads.finite),
            self._executor,
            self._metrics,
            self._clock,
        )
        for published in joined.versions:
            self._act(self._handover.handle(published))
        if joined.paused:
            self._act(self._handover.handle(lev.PauseAsked("the run is paused")))

    def hello(self) -> ev.LearnerAttached:
        """What is applied, and the first report."""
        assert self.joined is not None
        self._hello_progress = self._handover.take_progress()
        applied = tuple(sorted(self._handover.snapshot().applied.items()))
        return ev.LearnerAttached(self._join.participant_id, self.joined.incarnation, applied, self._hello_progress)

    def on_attached(self) -> None:
        """The syncer is there (again)."""
        self._is_attached = True
        self._hello_progress = None
        if self._detached_timer is not None:
            self._detached_timer.cancel()
            self._detached_timer = None
        self._metrics.attached(self._clock.now())
        self._act(self._handover.handle(lev.AttachedAgain()))

    def on_detached(self) -> None:
        """The syncer is not there; training goes on, but not for ever."""
        self._is_attached = False
        if self._hello_progress is not None:
            self._handover.give_back(self._hello_progress)
            self._hello_progress = None
        self._metrics.detached(self._clock.now())
        limit = self._plan.max_detached_seconds
        if self._detached_timer is None and limit > 0.0 and self._loop is not None:
            self._detached_timer = self._loop.call_later(limit, self._detached_too_long)

    def on_instruction(self, instruction: lev.LearnerEvent | Policy) -> None:
        """Tells the machine; a finished run ends the thread."""
        if isinstance(instruction, Policy):
            self._handover.change_policy(instruction)
            return
        if isinstance(instruction, lev.RecoverAsked):
            log.warning("recovering", reason=instruction.reason)
        self._act(self._handover.handle(instruction), instruction)
        if isinstance(instruction, lev.DrainAsked) and instruction.leaves:
            self._leave_in_time(instruction.reason)
        if isinstance(instruction, lev.Ended):
            self._end(f"the run has finished: {instruction.reason}")

    async def report(self, stream: ControlStream) -> None:
        """Sends what happened, in order, and a report at least every heartbeat; with news sooner, but not too often."""
        assert self.joined is not None
        self._stream = stream
        heartbeat = self.joined.policy.deadlines.heartbeat_seconds
        while True:
            self._news.clear()
            while self._reports:
                await stream.send(self._reports[0])
                self._reports.popleft()
            progress = self._handover.take_progress()
            try:
                await stream.send(ev.ProgressReported("", 0, progress))
            except BaseException:
                self._handover.give_back(progress)
                raise
            self._metrics.observe(self._handover, self._clock.now())
            if progress.loss is not None:
                self._metrics.loss.set(progress.loss)
            await asyncio.sleep(min(REPORT_SECONDS_MIN, heartbeat / 2))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(heartbeat / 2):
                    await self._news.wait()

    # ---- what happens ------------------------------------------------------------------------------------------------

    def _empty_outbox(self) -> None:
        self._wake_pending.clear()
        outbox = self._handover.take_outbox()
        for applied in outbox.applied:
            self._reports.append(
                ev.FragmentApplied(
                    learner="",
                    incarnation=0,
                    fragment=applied.apply.fragment,
                    version=applied.apply.version,
                    local_step=applied.local_step,
                    token_count=applied.token_count,
                    kept_token_count=applied.apply.kept_token_count,
                    download_seconds=applied.download_seconds,
                )
            )
        self._act(outbox.uploads)
        if outbox.is_draining:
            self._act(self._handover.drained())
        self._news.set()

    def _recover_optimizer(self, order: RecoveryOrder) -> None:
        """Asks those whom the newest instruction to recover names, else those of the join."""
        told = self._stream.peers if self._stream is not None else None
        self._peers.recover(order, told or (self.joined.peers if self.joined is not None else ()))

    def _begin_drain(self, reason: str) -> None:
        if not self._is_attached or self._loop is None:
            self._end(reason)  # there is nobody to answer
            return
        log.info("draining", reason=reason)
        self._reports.append(ev.LeavingAnnounced("", 0, reason))
        self._news.set()
        self._act(self._handover.handle(lev.DrainAsked(reason)))
        self._leave_in_time(reason)

    def _leave_in_time(self, reason: str) -> None:
        """A drained learner leaves some time later even if a fragment has had no round for it."""
        if self._loop is not None:
            self._loop.call_later(self._plan.drain_seconds, self._end, reason)

    def _detached_too_long(self) -> None:
        log.error(
            "detached_too_long",
            seconds=self._plan.max_detached_seconds,
            hint="training pauses until the syncer is back; see inner.max_detached_seconds",
        )
        self._act(self._handover.handle(lev.DetachedTooLong()))

    def _end(self, reason: str) -> None:
        if self.end_reason is None:
            self.end_reason = reason
        self._ended.set()
        self._handover.wake_device()

    def _not_sent(self, reason: str) -> None:
        """A contribution that is not finite, or too large, stays here."""
        if self._uploads.recovering(f": {reason}"):
            self.recover(reason)
        else:
            self._fail(DivergedError(f"{reason}; {self._uploads.in_a_row} times in a row. {DIVERGED_ADVICE}"))

    def _fail(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    def _act(self, actions: Sequence[Action], event: lev.LearnerEvent | None = None) -> None:
        """Carries out what the machine asks for, where that is so after an event that was told to the learner."""
        if self._transfers is not None and event is not None:
            self._transfers.told(event)
        for action in actions:
            assert self._transfers is not None
            match action:
                case UploadJob():
                    self._transfers.upload(action)
                case CancelUpload(round_number):
                    self._transfers.cancel_upload(round_number)
                case Download():
                    self._transfers.download(action)
                case DeclineRound(round_number, reason):
                    self._decline(round_number, reason)
                case UploadInitialParameters():
                    self._transfers.upload_initial(self._initial_values, self._seeds)
                case Leave(reason):
                    self._end(reason)

    def _decline(self, round_number: int, reason: Decline) -> None:
        self._reports.append(ev.ContributionDeclined("", 0, round_number, reason))
        self._news.set()

    def _bulk(self) -> BulkClient:
        assert self.joined is not None
        channels, join = self._connection.channels, self._join
        if channels is None:
            raise UnreachableError("UNAVAILABLE", "the syncer is not connected")
        return BulkClient(
            channels.bulk,
            join.participant_id,
            self.joined.incarnation,
            join.schema.digest,
            self.joined.policy.deadlines,
            self._plan.limits,
        )
