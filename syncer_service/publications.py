"""Published versions as payloads: encoded once, with checksums and digest, and served to all who ask.

A holder of exactly the version before gets the step as a delta, everybody else float32. Who reads a version keeps the
payload that it reads, and nothing else of the version: momentum and residual go with the version's replacement, the
payload when nobody reads it any more (`readings` bounds that). The delta of a version is cut while the version is being
made durable; nobody can have it before that.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.arrays.encoding import encoding_named
from decoupled_diloco.core.ids import Version
from decoupled_diloco.wire.stream import CutPayload
from syncer_service.following import Following
from syncer_service.readings import Readings
from syncer_service.store.interface import FragmentCommit, Store

Form = Literal["full", "delta"]

FULL_ENCODING = "float32"
"""What is served to those who do not hold the version before."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A version in the form that one caller can use.

    Attributes:
        fragment: The fragment.
        version: The version.
        global_step: As in `FragmentCommit`.
        encoding: How the payload is written.
        delta_base: The version that the payload is a delta to, or None.
        payload: What gives the messages.
    """

    fragment: int
    version: Version
    global_step: int
    encoding: str
    delta_base: Version | None
    payload: CutPayload


class Publications:
    """Serves the versions of a store. For the event loop's thread; the work is done in executors.

    Args:
        store: Where the versions are.
        bulk_executor: Threads for encoding and cutting.
        download_encoding: The encoding of deltas.
    """

    def __init__(self, store: Store, bulk_executor: Executor, download_encoding: str) -> None:
        self._store = store
        self._bulk_executor = bulk_executor
        self._download_encoding = download_encoding
        self._cut: dict[tuple[int, Form], tuple[Version, asyncio.Future[CutPayload]]] = {}
        self._prepared: dict[int, tuple[Version, asyncio.Future[CutPayload]]] = {}
        """Deltas of versions that are being made durable, by fragment."""
        self.readings = Readings()
        """Downloads under way."""
        self.following = Following()
        """Calls that wait for the next version."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the payloads that are ready or being read; most of them are the store's own memory."""
        known = [*self._cut.values(), *self._prepared.values()]
        ready = (future for _, future in known if future.done() and not future.cancelled())
        payloads = {future.result() for future in ready if future.exception() is None}
        payloads.update(reading.payload for reading in self.readings if reading.payload is not None)
        return sum(payload.payload_bytes for payload in payloads)

    @property
    def reading_count(self) -> int:
        """Downloads under way."""
        return len(self.readings)

    def prepare(self, commit: FragmentCommit) -> None:
        """Cuts the delta of a version that is about to be made durable: it will be asked for at once.

        `publish` or `drop_prepared` has to follow.
        """
        if commit.delta_payload is not None:
            self._prepared[commit.fragment] = (commit.version, self._start_cutting(commit, "delta"))

    def publish(self, fragment: int, version: Version) -> None:
        """A version is durable. Lets go of the payloads of older ones; who still reads one keeps it for a while.

        Calls that wait for it are served.
        """
        for form in ("full", "delta"):
            known = self._cut.get((fragment, form))
            if known is not None and _order(known[0]) < _order(version):
                del self._cut[fragment, form]
        prepared = self._prepared.pop(fragment, None)
        if prepared is not None and prepared[0] == version:
            self._keep((fragment, "delta"), *prepared)
        self.readings.superseded(fragment, version)
        self.following.published(fragment, version)

    def drop_prepared(self, fragment: int) -> None:
        """The version that was prepared has not become durable."""
        self._prepared.pop(fragment, None)

    async def publication(
        self, fragment: int, version: Version, held: Version | None, encodings: frozenset[str]
    ) -> Publication:
        """A version as one caller can use it.

        Args:
            fragment: The fragment.
            version: The wanted version.
            held: What the caller holds.
            encodings: What the caller can read.

        Raises:
            VersionGoneError: It is not there.
        """
        commit = self._store.find(fragment, version)
        as_delta = (
            commit.delta_payload is not None
            and held is not None
            and held == commit.delta_base
            and self._download_encoding in encodings
        )
        payload = await self._payload(commit, "delta" if as_delta else "full")
        encoding = self._download_encoding if as_delta else FULL_ENCODING
        delta_base = commit.delta_base if as_delta else None
        return Publication(fragment, version, commit.global_step, encoding, delta_base, payload)

    async def _payload(self, commit: FragmentCommit, form: Form) -> CutPayload:
        """The cut payload; made by the first who asks, while the others wait for the same."""
        key = (commit.fragment, form)
        known = self._cut.get(key)
        if known is not None and known[0] == commit.version:
            return await asyncio.shield(known[1])
        future = self._start_cutting(commit, form)
        if known is None or _order(known[0]) < _order(commit.version):
            self._keep(key, commit.version, future)
        return await asyncio.shield(future)

    def _start_cutting(self, commit: FragmentCommit, form: Form) -> asyncio.Future[CutPayload]:
        return asyncio.get_running_loop().run_in_executor(self._bulk_executor, _cut, commit, form)

    def _keep(self, key: tuple[int, Form], version: Version, future: asyncio.Future[CutPayload]) -> None:
        self._cut[key] = (version, future)
        future.add_done_callback(lambda done: self._drop_failed(key, done))

    def _drop_failed(self, key: tuple[int, Form], done: asyncio.Future[CutPayload]) -> None:
        """The next one who asks tries again."""
        failed = done.cancelled() or done.exception() is not None
        if failed and key in self._cut and self._cut[key][1] is done:
            del self._cut[key]


def _cut(commit: FragmentCommit, form: Form) -> CutPayload:
    if form == "delta":
        assert commit.delta_payload is not None
        return CutPayload(commit.delta_payload)
    # A version's digest is that of its float32 bytes (`arrays.digest`), which are this payload.
    return CutPayload(encoding_named(FULL_ENCODING).encode(commit.state.theta), commit.version.digest)


def _order(version: Version) -> tuple[int, int]:
    return version.timeline, version.number
