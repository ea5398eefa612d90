"""Stays in touch with the syncer: joins, attaches, reconnects, joins again, by itself and for as long as it takes.

    join  ->  attach  ->  stream ends: attach again, after a growing and random wait
                      ->  NOT_JOINED (the lease ran out, or the syncer forgot): join again
                      ->  STALE_INCARNATION, or any other refusal that a repetition cannot cure: stop

With several addresses each failed attempt moves on to the next, so that a syncer that comes back elsewhere is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from structlog.stdlib import BoundLogger

from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, Recourse, UnreachableError
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.channel import Backoff, Channels
from decoupled_diloco.runtime.ports import Address
from decoupled_diloco.wire.status import is_tls_fault
from learner_service.syncer_client import ControlStream, Joined, JoinRequest, SyncerClient

OUTAGE_LOG_SECONDS: Final = 60.0
"""An outage that goes on is told this often, with its newest reason."""
TLS_FAULTS_MAX: Final = 5
"""So many TLS faults in a row before the first join are taken for wrong settings."""
_HINTS: Final = {
    "attach": "work goes on; it reconnects by itself. If the run has finished meanwhile, stop this process",
    "join": "it keeps trying. If the run has finished meanwhile, stop this process",
}


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
        self._told_at = 0.0
        self._tls_fault_count = 0
        self._has_joined = False
        self.channels: Channels | None = None
        """The present connections; they change when another address is tried."""

    async def run(self) -> None:
        """Keeps the participant connected until it is cancelled.

        Raises:
            PeerError: the syncer refuses this participant for good.
            UnreachableError: before the first join, the TLS settings of the two ends do not fit, again and again.
        """
        self._log.info("waiting_for_the_syncer", syncer=self._everywhere())
        while True:
            joined = await self._join()
            failpoints.hit("join.after_answer")
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
                self._look_for_tls(error)
                await self._wait_after(error, "join")
            else:
                self._has_joined = True
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

    def _everywhere(self) -> str:
        return ", ".join(map(str, self._addresses))

    def _look_for_tls(self, error: PeerError | UnreachableError) -> None:
        """Before the first join, a TLS fault that repeats is a setting, and not for waiting."""
        self._tls_fault_count = self._tls_fault_count + 1 if is_tls_fault(error) else 0
        if not self._has_joined and self._tls_fault_count >= TLS_FAULTS_MAX and isinstance(error, UnreachableError):
            raise UnreachableError(
                error.code,
                f"the syncer at {self._everywhere()} cannot be reached with the TLS settings given here "
                f"({self._tls_fault_count} attempts): {error.text}. Check tls_ca, tls_system_roots, tls_server_name "
                "and tls_certificate of this end against the certificate and the settings of the syncer",
            ) from error

    async def _wait_after(self, error: PeerError | UnreachableError, call: str) -> None:
        """Tells an outage at once and then once a minute, moves to the next address, and waits."""
        address = self._addresses[self._address_index]
        now = asyncio.get_running_loop().time()
        if self._outage is None or now - self._told_at >= OUTAGE_LOG_SECONDS:
            self._told_at = now
            hint = _HINTS[call] if self._has_joined else "waiting for the syncer; it keeps trying"
            self._log.warning("syncer_unreachable", syncer=str(address), call=call, reason=str(error), hint=hint)
        self._outage = str(error)
        if len(self._addresses) > 1 and isinstance(error, UnreachableError):
            self._address_index = (self._address_index + 1) % len(self._addresses)
            await self.close()
        at_least = error.retry_seconds if isinstance(error, PeerError) else None
        await asyncio.sleep(self._backoff.next_seconds(at_least or 0.0))
