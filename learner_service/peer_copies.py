"""What a donor keeps of the copies it has made, so that a broken stream goes on and two callers share one copy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from decoupled_diloco.arrays.optimizer_fragments import Payload
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime.clock import Clock
from decoupled_diloco.wire.peer import CopyName, PartHeader
from learner_service.optimizer_copies import OptimizerCopies

KEPT_BYTES_MAX: Final = 1 << 30
"""Most bytes of copies in host memory; a single larger one is kept alone."""
KEPT_SECONDS_MAX: Final = 60.0
"""A copy is given to callers for this long after it was made."""
BOUNDARY_SECONDS_MAX: Final = 30.0
"""A caller waits for a step boundary for at most this long."""


@dataclass(slots=True)
class KeptCopy:
    """A copy of one part in host memory."""

    part: int
    header: PartHeader
    payload: Payload
    made_at: float
    reader_count: int = 0


class KeptCopies:
    """At most one copy of each part, within a limit of bytes. Lives on the network thread.

    Args:
        copies: where they come from.
        executor: for what waits for devices.
        clock: instants.
        bytes_max: most bytes kept.
    """

    def __init__(
        self, copies: OptimizerCopies, executor: Executor, clock: Clock, bytes_max: int = KEPT_BYTES_MAX
    ) -> None:
        self._copies = copies
        self._executor = executor
        self._clock = clock
        self._bytes_max = bytes_max
        self._kept: dict[int, KeptCopy] = {}
        self._making: dict[int, asyncio.Task[KeptCopy]] = {}
        self._promised_bytes = 0

    @asynccontextmanager
    async def reading(self, part: int, wanted: CopyName | None) -> AsyncIterator[KeptCopy]:
        """The copy of a part: the wanted one if it is still kept, else one that is not too old.

        Raises:
            PeerError: OVERLOADED without room for another copy, NOT_READY without a state or a boundary in time.
        """
        self._copies.check()
        self._forget_old()
        copy = self._kept.get(part)
        if copy is None or (self._is_old(copy) and copy.header.copy != wanted):
            copy = await self._made(part)
        copy.reader_count += 1
        try:
            yield copy
        finally:
            copy.reader_count -= 1

    def forget_all(self) -> None:
        """Nobody will read any more."""
        for task in self._making.values():
            task.cancel()
        self._kept.clear()

    async def _made(self, part: int) -> KeptCopy:
        task = self._making.get(part)
        if task is None:
            task = self._making[part] = asyncio.create_task(self._make(part))
            task.add_done_callback(lambda done: self._finished(part, done))
        return await asyncio.shield(task)

    def _finished(self, part: int, task: asyncio.Task[KeptCopy]) -> None:
        self._making.pop(part, None)
        if not task.cancelled():
            task.exception()  # callers that have gone away meanwhile do not hear of it

    async def _make(self, part: int) -> KeptCopy:
        assert self._copies.fragments is not None
        size = self._copies.fragments.payload_bytes(part)
        self._make_room(size)
        self._promised_bytes += size
        try:
            asked = asyncio.wrap_future(self._copies.ask(part))
            try:
                copied = await asyncio.wait_for(asyncio.shield(asked), BOUNDARY_SECONDS_MAX)
            except TimeoutError:
                text = f"this learner came to no step boundary for {BOUNDARY_SECONDS_MAX:g} s"
                raise PeerError(Reason.NOT_READY, text, None, BOUNDARY_SECONDS_MAX) from None
            loop = asyncio.get_running_loop()
            payload = await loop.run_in_executor(self._executor, copied.arrays.to_host)
        finally:
            self._promised_bytes -= size
        header = PartHeader(copied.name, payload.size, copied.version)
        copy = self._kept[part] = KeptCopy(part, header, payload, self._clock.now())
        loop.call_later(KEPT_SECONDS_MAX + 1.0, self._forget_old)
        return copy

    def _make_room(self, size: int) -> None:
        """Forgets copies that nobody reads, the oldest first, until there is room.

        Raises:
            PeerError: there is none.
        """
        unread = sorted((c for c in self._kept.values() if not c.reader_count), key=lambda copy: copy.made_at)
        for copy in unread:
            if self._held_bytes() + size <= self._bytes_max:
                return
            del self._kept[copy.part]
        if self._held_bytes() and self._held_bytes() + size > self._bytes_max:
            raise PeerError(
                Reason.OVERLOADED,
                f"a copy of {size} bytes has no room beside the {self._held_bytes()} bytes that are being read; "
                f"kept are at most {self._bytes_max}",
            )

    def _held_bytes(self) -> int:
        return self._promised_bytes + sum(copy.payload.size for copy in self._kept.values())

    def _forget_old(self) -> None:
        for copy in [c for c in self._kept.values() if self._is_old(c) and not c.reader_count]:
            del self._kept[copy.part]

    def _is_old(self, copy: KeptCopy) -> bool:
        return self._clock.now() - copy.made_at > KEPT_SECONDS_MAX
