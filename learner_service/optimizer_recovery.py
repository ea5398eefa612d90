"""Where a learner that lost its optimizer's state gets another one: from a peer, else its own snapshot, else nowhere.

Peers are asked part by part in the order given. One that dies in the middle, stalls, refuses or sends rubbish is passed
over for the next; the parts that are complete stay. The whole state comes, or none of it: half of the moments with the
step count of fresh ones would be worse than fresh ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments, Payload
from decoupled_diloco.core.errors import PeerError, Recourse, UnreachableError
from decoupled_diloco.core.ids import Version
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.channel import Backoff
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.wire.peer import PartRequest
from decoupled_diloco.wire.stream import CorruptPayloadError
from learner_service.peer_client import PartReceipt, PeerClient

log = get_logger(__name__)

PARTS_AT_A_TIME: Final = 4
"""Parts that are fetched side by side, so that waiting for a donor's boundary and moving bytes overlap."""
ATTEMPTS_MAX: Final = 3
"""A peer that fails so often for one part, without a byte, is not asked again."""
WAIT_SECONDS_MAX: Final = 2.0
"""Longest wait before all peers are asked once more, on top of a random one of the same length."""

Peers = Sequence[tuple[str, str]]
"""Learner id and address, those to try first coming first."""
Source = Literal["peer", "snapshot", "fresh"]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a recovering learner needs.

    Attributes:
        learner: who recovers.
        run_id: its run.
        schema_digest: of its parameters.
        fragments: how its state is cut.
        versions: what it begins with, by fragment.
        peers: whom to ask.
    """

    learner: str
    run_id: str
    schema_digest: str
    fragments: OptimizerFragments
    versions: Mapping[int, Version]
    peers: Peers

    def request(self, part: int, receipt: PartReceipt) -> PartRequest:
        """For one part, from where its receipt stands."""
        return PartRequest(
            learner=self.learner,
            run_id=self.run_id,
            part=part,
            schema_digest=self.schema_digest,
            entries=self.fragments.entries[part],
            version=self.versions.get(part),
            offset=receipt.received_bytes,
            copy=receipt.copy,
        )


@dataclass(frozen=True, slots=True)
class Recovered:
    """What came of it.

    Attributes:
        source: where the state came from; "fresh": nowhere.
        payloads: by part; empty if fresh.
        origin: in words: whose, or why none.
        seconds: how long it took.
    """

    source: Source
    payloads: tuple[Payload, ...] = field(repr=False)
    origin: str
    seconds: float

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole state."""
        return sum(payload.size for payload in self.payloads)

    @property
    def megabytes_per_second(self) -> float:
        """Over the whole time, waits included."""
        return self.payload_bytes / self.seconds / 1e6 if self.seconds > 0 else 0.0


class NoDonorError(Exception):
    """No peer gives the state; the message says of each why not."""


@dataclass(slots=True)
class Donor:
    """A peer that may help. `lost`: why it does not; `gave`: something of the state came from it."""

    learner: str
    client: PeerClient
    lost: str | None = None
    gave: bool = False


class OptimizerRecovery:
    """One recovery from peers.

    Args:
        wanted: what is needed.
        client_of: the calls to an address; may raise `ConfigError` for one that must not be dialled.
        executor: for what takes CPU time.
        moved: told about payload bytes.
    """

    def __init__(
        self,
        wanted: Wanted,
        client_of: Callable[[str], PeerClient],
        executor: Executor,
        moved: Callable[[int], None],
    ) -> None:
        self._wanted = wanted
        self._client_of = client_of
        self._executor = executor
        self._moved = moved
        self._room = asyncio.Semaphore(PARTS_AT_A_TIME)
        self._donors: list[Donor] = []
        self._unusable: list[str] = []

    async def run(self, seconds_max: float, clock: Clock) -> Recovered:
        """All parts, from whoever has them.

        Raises:
            NoDonorError: they cannot be had, or not in time.
        """
        began = clock.now()
        self._donors = self._found_donors()
        if not self._donors:
            raise NoDonorError("; ".join(self._unusable) or "there is no peer to ask")
        try:
            async with asyncio.timeout(seconds_max):
                payloads = await self._all_parts()
        except TimeoutError:
            raise NoDonorError(f"it took longer than {seconds_max:g} s{self._complaints(': ')}") from None
        origin = ", ".join(donor.learner for donor in self._donors if donor.gave)
        return Recovered("peer", payloads, origin, clock.now() - began)

    async def _all_parts(self) -> tuple[Payload, ...]:
        """All parts; the first one that cannot be had ends the others."""
        tasks = [asyncio.create_task(self._part(part)) for part in range(self._wanted.fragments.part_count)]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _found_donors(self) -> list[Donor]:
        found = []
        for learner, address in self._wanted.peers:
            if learner == self._wanted.learner or not address:
                continue
            try:
                found.append(Donor(learner, self._client_of(address)))
            except ValueError as error:
                self._unusable.append(f"{learner} at {address}: {error}")
        return found

    async def _part(self, part: int) -> Payload:
        async with self._room:
            if self._wanted.fragments.payload_bytes(part) == 0:
                return np.empty(0, np.uint8)
            backoff = Backoff(random.Random(), seconds_max=WAIT_SECONDS_MAX)
            receipts = [PartReceipt(self._wanted.fragments.payload_bytes(part)) for _ in self._donors]
            for attempt in range(1, ATTEMPTS_MAX + 1):
                wait = 0.0
                for donor, receipt in zip(self._donors, receipts, strict=True):
                    if donor.lost is None:
                        try:
                            return await self._from(donor, part, receipt, attempt == ATTEMPTS_MAX)
                        except _TryAgainError as error:
                            wait = max(wait, error.wait_seconds)
                if all(donor.lost is not None for donor in self._donors):
                    break
                await asyncio.sleep(backoff.next_seconds(min(wait, WAIT_SECONDS_MAX)))
            raise NoDonorError(self._complaints(""))

    async def _from(self, donor: Donor, part: int, receipt: PartReceipt, is_last_attempt: bool) -> Payload:
        """A part from one donor, going on where a broken stream stopped as long as bytes flow.

        Raises:
            _TryAgainError: not now; perhaps another one.
        """
        while True:
            before, wait = receipt.received_bytes, 0.0
            try:
                await donor.client.download(self._wanted.request(part, receipt), receipt, self._moved)
                await self._check(part, receipt.payload)
            except PeerError as error:
                reason, wait = str(error), error.retry_seconds or 0.0
                if error.recourse is not Recourse.RETRY:
                    self._lose(donor, reason)
            except UnreachableError as error:
                reason = str(error)
                if receipt.received_bytes > before:
                    log.info("optimizer_state_broken_off", donor=donor.learner, part=part, reason=reason)
                    continue
            except CorruptPayloadError as error:
                reason = str(error)
            else:
                donor.gave = True
                failpoints.hit("recovery.after_part")
                return receipt.payload
            if is_last_attempt:
                self._lose(donor, reason)
            raise _TryAgainError(wait)

    async def _check(self, part: int, payload: Payload) -> None:
        """A donor may not have seen yet that its own state has gone bad."""
        if part < self._wanted.fragments.part_count - 1:
            loop = asyncio.get_running_loop()
            finite = await loop.run_in_executor(self._executor, lambda: bool(np.isfinite(payload.view("<f4")).all()))
            if not finite:
                raise CorruptPayloadError(f"the donor's part {part} is not finite")

    def _lose(self, donor: Donor, reason: str) -> None:
        if donor.lost is None:
            donor.lost = reason
            log.info("optimizer_donor_lost", donor=donor.learner, reason=reason)

    def _complaints(self, before: str) -> str:
        lost = [f"{donor.learner}: {donor.lost}" for donor in self._donors if donor.lost is not None]
        return before + "; ".join(self._unusable + lost) if self._unusable or lost else ""


class _TryAgainError(Exception):
    """A donor did not give a part this time."""

    def __init__(self, wait_seconds: float) -> None:
        super().__init__()
        self.wait_seconds = wait_seconds
