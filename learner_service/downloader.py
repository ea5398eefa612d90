"""Fetches one version of one fragment, however often the stream breaks, and verifies every bit of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

from structlog.stdlib import BoundLogger

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import EncodingError, FloatVector, float32_elements
from decoupled_diloco.arrays.outer import apply_delta
from decoupled_diloco.core.errors import PeerError, Recourse, UnreachableError
from decoupled_diloco.core.ids import Version
from decoupled_diloco.runtime.channel import Backoff
from decoupled_diloco.wire.enums import CodecError
from decoupled_diloco.wire.stream import CorruptPayloadError
from learner_service.bulk_client import BulkClient, Moved, Receipt

DOWNLOADS_MAX = 4
"""Downloads of one process at a time; the rest wait, so that memory and the syncer are not flooded at a recovery."""

INLINE_BYTES_MAX = 64 << 10
"""A payload of at most so many bytes is decoded on the network thread: handing it to another would take longer."""

ResultT = TypeVar("ResultT")


class VersionGoneError(Exception):
    """The wanted version is no longer kept; there is a newer one."""


@dataclass(frozen=True, slots=True)
class Held:
    """A version in host memory, which a delta may build on."""

    version: Version
    values: FloatVector


class Downloader:
    """Downloads for one incarnation.

    Args:
        client: the calls over the present bulk connection; asked again for each attempt.
        sizes: float32 values of each fragment.
        executor: for what takes CPU time.
        moved: told about payload bytes.
        source: randomness for the waits between attempts.
        logger: where broken transfers are told.
    """

    def __init__(
        self,
        client: Callable[[], BulkClient],
        sizes: tuple[int, ...],
        executor: Executor,
        moved: Moved,
        source: random.Random,
        logger: BoundLogger,
    ) -> None:
        self._client = client
        self._sizes = sizes
        self._executor = executor
        self._moved = moved
        self._source = source
        self._log = logger
        self._room = asyncio.Semaphore(DOWNLOADS_MAX)
        self._early: dict[int, _Early] = {}

    def expect(self, fragment: int, held: Version) -> None:
        """Asks for the version that follows `held` before it is there, so that it is sent the moment it is published.

        The fetch of that version then takes what comes; any other fetch of the fragment ends it. It is a saving of time
        and nothing else: should it fail, the version is fetched as ever.

        Args:
            fragment: which.
            held: its newest version here.
        """
        known = self._early.get(fragment)
        if known is not None and known.held == held and not known.has_failed:
            return
        self._drop_early(fragment)
        try:
            client = self._client()
        except UnreachableError:
            return
        self._early[fragment] = _Early(client, fragment, held, self._sizes[fragment], self._moved, self._room)

    def close(self) -> None:
        """Ends what was asked for in advance."""
        for fragment in list(self._early):
            self._drop_early(fragment)

    def _drop_early(self, fragment: int) -> None:
        if (early := self._early.pop(fragment, None)) is not None:
            early.cancel()

    async def _early_receipt(self, fragment: int, version: Version, held: Held | None) -> Receipt:
        """What was asked for in advance has brought of a version, whole or up to a break; else an empty one."""
        early = self._early.pop(fragment, None)
        if early is None:
            return Receipt()
        try:
            if held is not None and held.version == early.held and await early.brings(version):
                return await early.received()
        except (CorruptPayloadError, CodecError) as error:
            self._log.warning("download_corrupt", fragment=fragment, version=str(version), reason=str(error))
        finally:
            early.cancel()
        return Receipt()

    async def fetch(self, fragment: int, version: Version, held: Held | None) -> FloatVector:
        """The values of a version, bit for bit the syncer's; read-only.

        A delta to `held` is taken where the syncer has one; should its result not have the version's digest, the whole
        version is fetched instead.

        Raises:
            VersionGoneError: it is no longer kept.
        """
        return await self.fetch_and(fragment, version, held, _as_they_are)

    async def fetch_and(
        self, fragment: int, version: Version, held: Held | None, then: Callable[[FloatVector], ResultT]
    ) -> ResultT:
        """What `then` makes of the values that `fetch` would return, on the thread that has just verified them.

        Raises:
            VersionGoneError: it is no longer kept.
        """
        receipt = await self._early_receipt(fragment, version, held)
        async with self._room:
            backoff = Backoff(self._source)
            while True:
                try:
                    if not receipt.is_complete:
                        await self._client().download(
                            fragment,
                            version,
                            held.version if held is not None else None,
                            receipt,
                            element_count=self._sizes[fragment],
                            moved=self._moved,
                        )
                    return await self._verified(fragment, version, held, receipt, then)
                except (CorruptPayloadError, CodecError, EncodingError) as error:
                    self._log.warning("download_corrupt", fragment=fragment, version=str(version), reason=str(error))
                    held, receipt, wait = None, Receipt(), 0.0
                except PeerError as error:
                    if error.recourse is Recourse.CATCH_UP:
                        raise VersionGoneError(error.text) from error
                    wait = error.retry_seconds or 0.0
                    self._tell_broken(fragment, version, receipt, str(error), backoff.attempt_count == 0)
                except UnreachableError as error:
                    wait = 0.0
                    self._tell_broken(fragment, version, receipt, str(error), backoff.attempt_count == 0)
                await asyncio.sleep(backoff.next_seconds(wait))

    async def _verified(
        self,
        fragment: int,
        version: Version,
        held: Held | None,
        receipt: Receipt,
        then: Callable[[FloatVector], ResultT],
    ) -> ResultT:
        def work() -> ResultT:
            values, digest = _decoded(receipt, held)
            if values.size != self._sizes[fragment] or digest != version.digest:
                raise CorruptPayloadError(
                    f"the result has {values.size} values and digest {digest}; "
                    f"the version has {self._sizes[fragment]} and {version.digest}"
                )
            return then(values)

        if len(receipt.payload) <= INLINE_BYTES_MAX:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _tell_broken(self, fragment: int, version: Version, receipt: Receipt, reason: str, is_first: bool) -> None:
        tell = self._log.info if is_first else self._log.debug
        tell(
            "download_broken",
            fragment=fragment,
            version=str(version),
            received_bytes=receipt.received_bytes,
            payload_bytes=len(receipt.payload),
            reason=reason,
        )


class _Early:
    """A download that was asked for before its version was there.

    Args:
        client: the calls.
        fragment: which.
        held: the version that the wanted one follows.
        size: float32 values of the fragment.
        moved: told about payload bytes.
        room: entered before a payload is read.
    """

    def __init__(
        self, client: BulkClient, fragment: int, held: Version, size: int, moved: Moved, room: asyncio.Semaphore
    ) -> None:
        self.held = held
        self._idle_seconds = client.idle_seconds
        self._receipt = Receipt()
        self._begun: asyncio.Future[Version] = asyncio.get_running_loop().create_future()
        self._call = asyncio.create_task(
            client.download_next(
                fragment,
                held,
                self._receipt,
                element_count=size,
                moved=moved,
                begun=self._begun.set_result,
                room=room,
            )
        )
        self._call.add_done_callback(_look_at)

    @property
    def has_failed(self) -> bool:
        """Whether it will bring nothing more, and has not brought all."""
        return self._call.done() and not self._receipt.is_complete

    async def brings(self, version: Version) -> bool:
        """Whether it brings this version, of which there is news; what has begun by then or begins soon shows it."""
        if not self._begun.done():
            waits_for: tuple[asyncio.Future[Any], ...] = (self._begun, self._call)
            await asyncio.wait(waits_for, timeout=self._idle_seconds, return_when=asyncio.FIRST_COMPLETED)
        return self._begun.done() and self._begun.result() == version

    async def received(self) -> Receipt:
        """Waits until all is here, or the stream broke.

        Raises:
            CorruptPayloadError: the stream did not hold what it promised.
            CodecError: it was written in a way that is not known here.
        """
        await asyncio.wait((self._call,))
        error = None if self._call.cancelled() else self._call.exception()
        if error is not None and not isinstance(error, PeerError | UnreachableError):
            raise error
        return self._receipt

    def cancel(self) -> None:
        """Ends it if it still goes on."""
        self._call.cancel()


def _look_at(call: asyncio.Task[None]) -> None:
    """The event loop would complain of an error that nobody asks for."""
    if not call.cancelled():
        call.exception()


def _as_they_are(values: FloatVector) -> FloatVector:
    return values


def _decoded(receipt: Receipt, held: Held | None) -> tuple[FloatVector, str | None]:
    """Values and digest of what was received. Takes CPU time.

    A whole version's payload is its values, so its digest, which was verified on the way, is the version's.
    """
    if receipt.delta_base is None:
        if receipt.encoding != "float32":
            raise CorruptPayloadError(f"a whole version comes in float32, not in {receipt.encoding}")
        values, digest = float32_elements(receipt.payload), receipt.digest
    elif held is None or receipt.delta_base != held.version:
        raise CorruptPayloadError(f"the payload is a delta to version {receipt.delta_base}, which is not held here")
    else:
        values = apply_delta(held.values, receipt.payload, receipt.encoding)
        digest = vector_digest(values)
    values.flags.writeable = False
    return values, digest
