"""Calls that wait for the version that follows the one that their caller holds.

A download that was asked for in advance goes out the moment its version is published; otherwise it would begin a round
trip later, after the news has gone down and the request has come up.
"""

from __future__ import annotations

import asyncio

from decoupled_diloco.core.ids import Version
from decoupled_diloco.wire.stream import NEXT_VERSION_SECONDS_MAX

Answer = asyncio.Future[Version | None]


class Following:
    """At most one waiting call for each fragment of a participant. For the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[str, tuple[int, Answer]]] = {}
        """By fragment and participant: the incarnation, and what its call waits for."""
        self._is_closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def wait(self, participant: str, incarnation: int, fragment: int) -> Version | None:
        """The next version of a fragment to be published, or None: the call will not be served.

        Args:
            participant: Whose call it is. An earlier one of the same participant and fragment ends.
            incarnation: Of which incarnation.
            fragment: The fragment.
        """
        if self._is_closed:
            return None
        loop = asyncio.get_running_loop()
        answer: Answer = loop.create_future()
        calls = self._waiting.setdefault(fragment, {})
        if participant in calls:
            _give(calls[participant][1], None)
        calls[participant] = incarnation, answer
        timer = loop.call_later(NEXT_VERSION_SECONDS_MAX, _give, answer, None)
        try:
            return await answer
        finally:
            timer.cancel()
            if participant in calls and calls[participant][1] is answer:
                del calls[participant]

    def published(self, fragment: int, version: Version) -> None:
        """There is a new version: whoever waits for it gets it."""
        for _, answer in self._waiting.pop(fragment, {}).values():
            _give(answer, version)

    def expire(self, participant: str, incarnation: int) -> None:
        """An incarnation is no longer part of the run."""
        for calls in self._waiting.values():
            if participant in calls and calls[participant][0] == incarnation:
                _give(calls[participant][1], None)

    def close(self) -> None:
        """The syncer stops: nobody waits for what will not come."""
        self._is_closed = True
        for calls in self._waiting.values():
            for _, answer in calls.values():
                _give(answer, None)


def _give(answer: Answer, version: Version | None) -> None:
    if not answer.done():
        answer.set_result(version)
