"""Control streams: one bounded queue of outgoing messages for every attached incarnation.

The effects of the machine are written here and the Attach handlers empty the queues. A queue that overflows closes
its stream: the learner does not keep up, and a re-attach repeats what still holds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.wire.control import Instruction

SESSION_MESSAGES_MAX: Final = 1024
"""Messages that may wait for one learner."""


class Session:
    """One control stream.

    Args:
        learner: Whose.
        incarnation: Of which incarnation.
        messages_max: Most messages that wait.
    """

    def __init__(self, learner: str, incarnation: int, messages_max: int = SESSION_MESSAGES_MAX) -> None:
        self.learner = learner
        self.incarnation = incarnation
        self.error: PeerError | None = None
        """Why it was closed; None: in good order."""
        self.replaced = False
        """Whether a newer stream of the same incarnation took over."""
        self._messages_max = messages_max
        self._queue: deque[Instruction] = deque()
        self._news = asyncio.Event()
        self._closed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is sent."""
        return self._closed.is_set()

    def send(self, message: Instruction) -> None:
        """Puts a message into the queue; what does not fit closes the stream."""
        if self.is_closed:
            return
        if len(self._queue) >= self._messages_max:
            text = f"{self._messages_max} messages wait for {self.learner}, which does not read them; attach again"
            self.close(PeerError(Reason.OVERLOADED, text))
            return
        self._queue.append(message)
        self._news.set()

    async def next_message(self, seconds: float) -> Instruction | None:
        """The next message, or None when there was none for so long.

        Messages that were sent before the stream was closed still come.
        """
        if not self._queue:
            self._news.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return None
        return self._queue.popleft() if self._queue else None

    def close(self, error: PeerError | None) -> None:
        """Ends the stream; the first reason stays."""
        if not self.is_closed:
            self.error = error
            self._closed.set()

    async def wait_closed(self) -> None:
        """Until somebody closes the stream."""
        await self._closed.wait()


class Sessions:
    """The control stream of every learner that has one."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, learner: str, incarnation: int) -> Session:
        """A new stream; it takes over from the one before."""
        session = Session(learner, incarnation)
        old = self._sessions.get(learner)
        if old is not None:
            old.replaced = old.incarnation == incarnation
            old.close(PeerError(Reason.OVERLOADED, "a newer control stream took over"))
        self._sessions[learner] = session
        return session

    def ended(self, session: Session) -> None:
        """The handler of a stream is gone."""
        session.close(None)
        if self._sessions.get(session.learner) is session:
            del self._sessions[session.learner]

    def send(self, learner: str, incarnation: int, message: Instruction) -> None:
        """Sends to one incarnation, if its stream is up."""
        session = self._sessions.get(learner)
        if session is not None and session.incarnation == incarnation:
            session.send(message)

    def send_to_all(self, message: Instruction) -> None:
        """Sends to everybody whose stream is up."""
        for session in list(self._sessions.values()):
            session.send(message)

    def expire(self, learner: str, incarnation: int, error: PeerError | None) -> None:
        """Closes the stream of one incarnation."""
        session = self._sessions.get(learner)
        if session is not None and session.incarnation == incarnation:
            session.close(error)

    def close_all(self, error: PeerError | None) -> None:
        """Closes all streams."""
        for session in list(self._sessions.values()):
            session.close(error)
