"""The inner optimizer's state on the network thread: served to peers, fetched from them, kept in a snapshot."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import grpc.aio

from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments
from decoupled_diloco.core.errors import PeerError
from decoupled_diloco.core.ids import Version
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.runtime.ports import Address
from learner_service.metrics import LearnerMetrics
from learner_service.network_plan import PeerPlan
from learner_service.optimizer_copies import OptimizerCopies
from learner_service.optimizer_recovery import NoDonorError, OptimizerRecovery, Peers, Recovered, Wanted
from learner_service.optimizer_snapshot import SnapshotError, SnapshotWriter, read_snapshot
from learner_service.peer import DonorIdentity, PeerServicer, start_peer_server
from learner_service.peer_client import PeerClient
from learner_service.peer_copies import KeptCopies

log = get_logger(__name__)

WILDCARDS: Final = ("0.0.0.0", "::")
"""Hosts that are listened on and cannot be dialled."""


@dataclass(frozen=True, slots=True)
class RecoveryOrder:
    """What the device thread wants, and how it hears of the result.

    Attributes:
        reason: why the state is needed, for the log.
        fragments: how it is cut.
        versions: what the parameters begin with, by fragment, as far as that is known.
        done: called once, on the network thread.
    """

    reason: str
    fragments: OptimizerFragments
    versions: Mapping[int, Version]
    done: Callable[[Recovered], None]


class PeerSide:
    """One learner among others. Made on any thread, used on the network thread.

    Args:
        plan: see there.
        learner: this learner's id.
        schema_digest: of its parameters.
        copies: made by the device thread.
        executor: for what takes CPU time or waits for disks.
        metrics: told what moves.
        clock: instants.
    """

    def __init__(
        self,
        plan: PeerPlan,
        learner: str,
        schema_digest: str,
        copies: OptimizerCopies,
        executor: Executor,
        metrics: LearnerMetrics,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._learner = learner
        self._schema_digest = schema_digest
        self._copies = copies
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        self._kept = KeptCopies(copies, executor, clock)
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.run_id = ""
        """The run that was joined."""

    async def open(self) -> str:
        """Begins to serve; returns the address that others are told, or nothing.

        Raises:
            ConfigError: it cannot be listened on.
        """
        if self._plan.snapshot_path is not None:
            self._start(self._keep_snapshots())
        if self._plan.listen is None:
            return ""
        identity = DonorIdentity(self._learner, lambda: self.run_id, self._schema_digest)
        sent = self._metrics.optimizer_served_bytes.inc
        servicer = PeerServicer(identity, self._copies, self._kept, sent, self._plan.limits.upload)
        self._server, taken = await start_peer_server(
            self._plan.listen, self._plan.credentials, "learner.peer_listen", servicer
        )
        return self._plan.advertise or _reachable(taken)

    async def close(self) -> None:
        """Ends all calls and writes; who waits for a copy is told."""
        self._copies.refuse("it leaves the run")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(None)
        self._kept.forget_all()

    def recover(self, order: RecoveryOrder, peers: Peers) -> None:
        """Starts to look for a state; `order.done` hears of it in any case."""
        self._start(self._recover(order, peers))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- recovery ----------------------------------------------------------------------------------------------------

    async def _recover(self, order: RecoveryOrder, peers: Peers) -> None:
        began = self._clock.now()
        log.info("optimizer_recovering", reason=order.reason, peers=[learner for learner, _ in peers])
        try:
            recovered = await self._found(order, peers, began)
        except Exception as error:
            log.error("optimizer_recovery_failed", exc_info=error)
            text = f"{type(error).__name__}; the log has the story"
            recovered = Recovered("fresh", (), text, self._clock.now() - began)
        if recovered.source == "fresh":
            log.warning("optimizer_fresh", reason=recovered.origin, seconds=round(recovered.seconds, 3))
        else:
            log.info(
                "optimizer_recovered",
                source=recovered.source,
                origin=recovered.origin,
                seconds=round(recovered.seconds, 3),
                payload_bytes=recovered.payload_bytes,
                megabytes_per_second=round(recovered.megabytes_per_second, 1),
            )
        self._metrics.observe_optimizer_recovery(recovered)
        order.done(recovered)

    async def _found(self, order: RecoveryOrder, peers: Peers, began: float) -> Recovered:
        reasons = []
        channels: list[grpc.aio.Channel] = []

        def client_of(address: str) -> PeerClient:
            channels.append(self._plan.dial(address))
            return PeerClient(channels[-1], self._plan.limits.download)

        wanted = Wanted(self._learner, self.run_id, self._schema_digest, order.fragments, order.versions, peers)
        try:
            if self._plan.recovery_seconds_max <= 0:
                raise NoDonorError("peers are not asked (learner.peer_recovery_seconds = 0)")
            moved = self._metrics.optimizer_received_bytes.inc
            recovery = OptimizerRecovery(wanted, client_of, self._executor, moved)
            return await recovery.run(self._plan.recovery_seconds_max, self._clock)
        except NoDonorError as error:
            reasons.append(f"no peer gives it ({error})")
        finally:
            for channel in channels:
                await channel.close(None)
        try:
            return await self._read_snapshot(order, began)
        except SnapshotError as error:
            reasons.append(str(error))
        return Recovered("fresh", (), "; ".join(reasons), self._clock.now() - began)

    # ---- snapshots ---------------------------------------------------------------------------------------------------

    async def _read_snapshot(self, order: RecoveryOrder, began: float) -> Recovered:
        path = self._plan.snapshot_path
        if path is None:
            raise SnapshotError("no snapshots are kept (learner.snapshot_dir)")
        loop = asyncio.get_running_loop()
        payloads = await loop.run_in_executor(
            self._executor, read_snapshot, path, self._learner, self.run_id, self._schema_digest, order.fragments
        )
        return Recovered("snapshot", payloads, str(path), self._clock.now() - began)

    async def _keep_snapshots(self) -> None:
        while True:
            await asyncio.sleep(self._plan.snapshot_seconds)
            try:
                await self._write_snapshot()
            except PeerError as error:
                log.debug("snapshot_not_now", reason=error.text)
            except OSError as error:
                log.warning("snapshot_not_written", path=str(self._plan.snapshot_path), reason=str(error))

    async def _write_snapshot(self) -> None:
        """Part by part, each copied at a boundary of its own, so that one of them is in memory at a time."""
        path, fragments = self._plan.snapshot_path, self._copies.fragments
        if path is None or fragments is None:
            return
        began, loop = self._clock.now(), asyncio.get_running_loop()
        writer = await loop.run_in_executor(
            self._executor, SnapshotWriter, path, self._learner, self.run_id, self._schema_digest, fragments
        )
        try:
            for part in range(fragments.part_count):
                copied = await asyncio.wrap_future(self._copies.ask(part))
                payload = await loop.run_in_executor(self._executor, copied.arrays.to_host)
                await loop.run_in_executor(self._executor, writer.add, payload)
            size = await loop.run_in_executor(self._executor, writer.commit)
        finally:
            writer.discard()
        log.info("snapshot_written", path=str(path), bytes=size, seconds=round(self._clock.now() - began, 3))
        self._metrics.snapshots.inc()


def _reachable(address: Address) -> str:
    """The address as others may dial it: with this host's name in place of a wildcard."""
    return str(Address(socket.gethostname(), address.port) if address.host in WILDCARDS else address)
