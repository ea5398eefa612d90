"""Stays in touch with the syncer: joins, attaches, reconnects, joins again, by itself and for as long as it takes.

    join  ->  attach  ->  stream ends: attach again, after a growing and random wait
                      ->  NOT_JOINED (the lease ran out, or the syncer forgot): join again
                      ->  STALE_INCARNATION, or any other refusal that a repetition cannot cure: stop

With several addresses each failed attempt moves on to the next, so that a syncer that comes back elsewhere is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from structlog.stdlib import BoundLogger

from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Recourse, UnreachableError
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime.channel import Backoff, Channels
from decoupled_diloco.runtime.ports import Address
from learner_service.syncer_client import ControlStream, Joined, JoinRequest, SyncerClient


class Participant(Protocol):
    """What is kept connected: a learner or an evaluator. All methods run on the network thread."""

    def join_request(self) -> JoinRequest:
        """What to join with."""
        ...

    def on_joined(self, joined: Joined) -> None:
        """A new incarnation exists; all that was in flight for the old one is void."""
        ...

    def hello(self) -> ev.LearnerAttached:
        """What to open the control stream with."""
        ...

    def on_attached(self) -> None:
        """The control stream is up; the syncer will repeat what still holds."""
        ...

    def on_detached(self) -> None:
        """The control stream is gone."""
        ...

    def on_instruction(self, instruction: lev.LearnerEvent | Policy) -> None:
        """The syncer said something."""
        ...

    async def report(self, stream: ControlStream) -> None:
        """Sends reports until it is cancelled."""
        ...


class Connection:
    """One participant's way to the syncer.

    Args:
        addresses: where the syncer may be, tried in turn.
        open_channels: opens control and bulk connection to an address, in the running event loop.
        participant: whom it serves.
        backoff: waits between attempts.
        logger: where each outage and each return is told once.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        open_channels: Callable[[Address], Channels],
        participant: Participant,
        backoff: Backoff,
        logger: BoundLogger,
    ) -> None:
        self._addresses = addresses
        self._open_channels = open_channels
        self._participant = participant
        self._backoff = backoff
        self._log = logger
        self._address_index = 0
        self._outage: str | None = None
        self.channels: Channels | None = None
        """The present connections; they change when another address is tried."""

    async def run(self) -> None:
        """Keeps the participant connected until it is cancelled.

        Raises:
            PeerError: the syncer refuses this participant for good.
        """
        while True:
            joined = await self._join()
            self._participant.on_joined(joined)
            await self._stay_attached(joined)

    async def close(self) -> None:
        """Closes the present connections; calls in flight are cancelled."""
        channels, self.channels = self.channels, None
        if channels is not None:
            await channels.close()

    def client(self) -> SyncerClient:
        """Calls over the present control connection."""
        if self.channels is None:
            self.channels = self._open_channels(self._addresses[self._address_index])
        return SyncerClient(self.channels.control, self._participant.join_request().participant_id)

    async def _join(self) -> Joined:
        while True:
            try:
                joined = await self.client().join(self._participant.join_request())
            except (PeerError, UnreachableError) as error:
                if isinstance(error, PeerError) and error.recourse is not Recourse.RETRY:
                    raise
                await self._wait_after(error, "join")
            else:
                self._log.info(
                    "joined",
                    run=joined.run_id,
                    incarnation=joined.incarnation,
                    slot=joined.slot,
                    cursor=joined.cursor,
                    global_step=joined.global_step,
                )
                return joined

    async def _stay_attached(self, joined: Joined) -> None:
        """Attaches again and again; returns when the syncer wants a new join."""
        while True:
            try:
                await self._converse(joined)
            except (PeerError, UnreachableError) as error:
                self._participant.on_detached()
                if isinstance(error, PeerError):
                    if error.recourse is Recourse.JOIN_AGAIN:
                        self._log.warning("joining_again", reason=error.text)
                        return
                    if error.recourse is not Recourse.RETRY:
                        raise
                await self._wait_after(error, "attach")

    async def _converse(self, joined: Joined) -> None:
        """One control stream, from hello to its end, which is always an error."""
        async with self.client().attach(self._participant.hello(), joined.policy) as stream:
            reporter = asyncio.create_task(self._participant.report(stream))
            reporter.add_done_callback(lambda _: stream.close())
            try:
                # Reports go out at once; that the syncer is there is known from its first word.
                instruction = await stream.received()
                self._recovered()
                self._participant.on_attached()
                while True:
                    if instruction is not None:
                        self._participant.on_instruction(instruction)
                    instruction = await stream.received()
            finally:
                reporter.cancel()
                await asyncio.wait((reporter,))
                fault = None if reporter.cancelled() else reporter.exception()
                if fault is not None and not isinstance(fault, PeerError | UnreachableError):
                    raise fault

    def _recovered(self) -> None:
        self._backoff.reset()
        if self._outage is not None:
            self._log.info("syncer_is_back", outage=self._outage)
            self._outage = None

    async def _wait_after(self, error: PeerError | UnreachableError, call: str) -> None:
        """Tells an outage once, moves to the next address, and waits."""
        address = self._addresses[self._address_index]
        if self._outage != str(error):
            self._outage = str(error)
            hint = "training goes on; this learner reconnects by itself" if call == "attach" else "it keeps trying"
            self._log.warning("syncer_unreachable", syncer=str(address), call=call, reason=self._outage, hint=hint)
        if len(self._addresses) > 1 and isinstance(error, UnreachableError):
            self._address_index = (self._address_index + 1) % len(self._addresses)
            await self.close()
        at_least = error.retry_seconds if isinstance(error, PeerError) else None
        await asyncio.sleep(self._backoff.next_seconds(at_least or 0.0))
