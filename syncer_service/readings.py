"""Downloads under way: how many there may be, and when those of a version that was replaced end.

A download keeps the payload that it sends, and nothing else of its version: theta, or the step. What the payloads of
replaced versions take is bounded three times over, by n, the values of a fragment: one payload (4 n bytes, or 2 n for a
step in bf16) for each of a participant's `PARTICIPANT_DOWNLOADS_MAX` downloads; `DOWNLOADS_MAX` of all participants;
and one of each form, 6 n bytes, for each version that was replaced in the last `superseded_seconds_max`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from google.protobuf.message import Message

from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import Version
from decoupled_diloco.wire.stream import CutPayload

DOWNLOADS_MAX: Final = 256
"""Downloads served at a time, each with one message of 1 MiB in hand; more get OVERLOADED. 64 learners with 4 each."""

PARTICIPANT_DOWNLOADS_MAX: Final = 8
"""Downloads of one participant at a time; more get OVERLOADED. Ours has 4, and some that it asked for in advance."""

DOWNLOAD_RETRY_SECONDS: Final = 1.0
"""What a caller is told to wait when too many downloads are under way."""

SUPERSEDED_SECONDS_MAX: Final = 60.0
"""A download goes on for so long after its version was replaced, and for as long as its payload takes at the slowest
rate; then it ends, and its caller asks for the newest."""

SLOWEST_BYTES_PER_SECOND: Final = 1 << 20
"""A caller on a slow link must get through a whole fragment before it is sent for the next version of it."""


class Reading:
    """One download. For the event loop's thread.

    Args:
        participant: Who reads.
        incarnation: Of which incarnation.
        fragment: Which fragment.
        version: Which version of it.

    Attributes:
        payload: What is sent, once it is there.
    """

    def __init__(self, participant: str, incarnation: int, fragment: int, version: Version) -> None:
        self.participant = participant
        self.incarnation = incarnation
        self.fragment = fragment
        self.version = version
        self.payload: CutPayload | None = None
        self._end: tuple[float, PeerError] | None = None
        self._wait: asyncio.Timeout | None = None

    def end(self, seconds: float, error: PeerError) -> None:
        """Ends it after some time, or at an earlier end that it has already, with this error."""
        ends_at = _now() + seconds
        if self._end is not None:
            if self._end[0] <= _now():
                return
            ends_at = min(ends_at, self._end[0])
        self._end = ends_at, error
        if self._wait is not None and not self._wait.expired():
            self._wait.reschedule(min(ends_at, self._wait.when() or ends_at))

    async def write(self, context: Any, message: Message | bytes, idle_seconds: float) -> None:
        """Writes a message.

        Args:
            context: The call's grpc.aio.ServicerContext.
            message: What to write.
            idle_seconds: A receiver that takes nothing for so long loses the stream.

        Raises:
            PeerError: TRANSFER_IDLE, or what `end` was given.
        """
        self._require_going_on()
        idle_at = _now() + idle_seconds
        self._wait = asyncio.timeout_at(idle_at if self._end is None else min(idle_at, self._end[0]))
        try:
            async with self._wait:
                await context.write(message)
        except TimeoutError:
            self._require_going_on()
            raise PeerError(Reason.TRANSFER_IDLE, f"the receiver took no bytes for {idle_seconds:g} s") from None
        finally:
            self._wait = None

    def _require_going_on(self) -> None:
        if self._end is not None and self._end[0] <= _now():
            raise self._end[1]


def superseded_seconds_max(payload: CutPayload | None) -> float:
    """How long a download of this payload goes on after its version was replaced."""
    return SUPERSEDED_SECONDS_MAX + (payload.payload_bytes / SLOWEST_BYTES_PER_SECOND if payload is not None else 0.0)


class Readings:
    """All downloads under way. For the event loop's thread."""

    def __init__(self) -> None:
        self._readings: set[Reading] = set()

    def __iter__(self) -> Iterator[Reading]:
        return iter(list(self._readings))

    def __len__(self) -> int:
        return len(self._readings)

    @contextmanager
    def begin(self, participant: str, incarnation: int, fragment: int, version: Version) -> Iterator[Reading]:
        """A download, for as long as the context lasts. Those of the participant's other incarnations end.

        Raises:
            PeerError: OVERLOADED, when there are too many.
        """
        own = [reading for reading in self._readings if reading.participant == participant]
        for reading in own:
            if reading.incarnation != incarnation:
                text = f"incarnation {reading.incarnation} of {participant} was replaced by {incarnation}"
                reading.end(0.0, PeerError(Reason.STALE_INCARNATION, text))
        own_count = sum(reading.incarnation == incarnation for reading in own)
        if own_count >= PARTICIPANT_DOWNLOADS_MAX:
            raise _too_many(f"{own_count} downloads of {participant} are under way, which is the limit for one")
        if len(self._readings) >= DOWNLOADS_MAX:
            raise _too_many(f"{DOWNLOADS_MAX} downloads are under way, which is the limit")
        reading = Reading(participant, incarnation, fragment, version)
        self._readings.add(reading)
        try:
            yield reading
        finally:
            self._readings.discard(reading)

    def superseded(self, fragment: int, newest: Version) -> None:
        """A fragment has a new version: downloads of older ones have to end before long."""
        for reading in self._readings:
            if reading.fragment == fragment and reading.version != newest:
                seconds = superseded_seconds_max(reading.payload)
                text = (
                    f"fragment {fragment}: version {reading.version} was replaced, by now by {newest}, and this "
                    f"download was not done {seconds:g} s later"
                )
                error = PeerError(Reason.SUPERSEDED, text, newest_facts(fragment, newest))
                reading.end(seconds, error)


def newest_facts(fragment: int, newest: Version) -> dict[str, str]:
    """What a caller hears of the newest version, who asked for another."""
    return {
        "fragment": str(fragment),
        "newest-timeline": str(newest.timeline),
        "newest-number": str(newest.number),
        "newest-digest": newest.digest,
    }


def _too_many(text: str) -> PeerError:
    return PeerError(Reason.OVERLOADED, f"{text}; call again", retry_seconds=DOWNLOAD_RETRY_SECONDS)


def _now() -> float:
    return asyncio.get_running_loop().time()
