"""Fetches one version of one fragment, however often the stream breaks, and verifies every bit of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

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
        async with self._room:
            backoff = Backoff(self._source)
            receipt = Receipt()
            while True:
                try:
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


def _as_they_are(values: FloatVector) -> FloatVector:
    return values


def _decoded(receipt: Receipt, held: Held | None) -> tuple[FloatVector, str]:
    """Values and digest of what was received. Takes CPU time."""
    if receipt.delta_base is None:
        if receipt.encoding != "float32":
            raise CorruptPayloadError(f"a whole version comes in float32, not in {receipt.encoding}")
        values = float32_elements(receipt.payload)
    elif held is None or receipt.delta_base != held.version:
        raise CorruptPayloadError(f"the payload is a delta to version {receipt.delta_base}, which is not held here")
    else:
        values = apply_delta(held.values, receipt.payload, receipt.encoding)
    values.flags.writeable = False
    return values, vector_digest(values)
