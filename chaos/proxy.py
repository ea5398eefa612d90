"""A TCP proxy in user space that makes a link slow, deaf, lossy or broken while the run goes on.

    with Proxy() as proxy:
        link = proxy.link(("127.0.0.1", 50051))         # listens on a free port: link.address
        link.impose(Conditions(latency_seconds=0.2))    # any thread, at any time; holds for old and new connections
        link.reset()                                    # every connection ends by RST, now
        link.heal()

All links of a proxy share one thread with an event loop. "Up" is from those who connect to the target, "down" back.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final

READ_BYTES: Final = 65536
"""Most bytes taken from a socket at a time."""
WAITING_PIECES_MAX: Final = 256
"""Pieces of one direction that may be under way; beyond that the sender feels the link's latency as back-pressure."""
LINGER: Final = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: the socket's end is an RST."""

Target = tuple[str, int]


class Direction(StrEnum):
    """Which way bytes move."""

    UP = "up"
    DOWN = "down"


BOTH: Final = frozenset(Direction)


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a link behaves.

    Attributes:
        latency_seconds: added to every piece, each way.
        bytes_per_second: the link's rate, each way, shared by its connections; 0: unlimited.
        window_bytes: each connection has at most so much under way in one direction, and hears of an arrival twice the
            latency after it sent, like TCP; 0: unlimited.
        held: directions in which nothing moves. What is held back goes on when that ends, unless the link was cut.
        is_cut: new connections are accepted and nothing comes of them; those that lived through it end by RST when the
            link heals, as behind a router that has forgotten them.
        flip_every_bytes: one bit is flipped in so many bytes of pieces of at least `FLIP_BYTES_MIN`; 0: none.
        break_after_bytes: every connection ends by RST after so many bytes in one direction; 0: none.
    """

    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    window_bytes: int = 0
    held: frozenset[Direction] = frozenset()
    is_cut: bool = False
    flip_every_bytes: int = 0
    break_after_bytes: int = 0


FLIP_BYTES_MIN: Final = 1024
"""Smaller pieces hold frames of the transport alone, and are left whole: the payload is what should be wrong."""
FAIR: Final = Conditions()
"""A link like any other."""


class Link:
    """One listening port in front of one target. Made by `Proxy.link`."""

    def __init__(self, target: Target, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        """May be changed; new connections go there."""
        self.address = ""
        self.conditions = FAIR
        self.moved_bytes: dict[Direction, int] = dict.fromkeys(Direction, 0)
        self.flipped_count = 0
        self._loop = loop
        self._changed = asyncio.Event()
        self._free_at: dict[Direction, float] = dict.fromkeys(Direction, 0.0)
        self._pairs: set[_Pair] = set()
        self._server: asyncio.Server | None = None

    # ---- any thread --------------------------------------------------------------------------------------------------

    def impose(self, conditions: Conditions) -> None:
        """From now on the link behaves like this."""
        self._call(lambda: self._set(conditions))

    def heal(self) -> None:
        """From now on the link is fair."""
        self.impose(FAIR)

    def reset(self) -> None:
        """Ends every connection by RST."""
        self._call(self._reset_all)

    def _call(self, work: Callable[[], None]) -> None:
        """Runs on the loop and waits for it, so that what comes after it in the caller also does here."""
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    # ---- the loop's thread -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begins to listen."""
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        """Ends everything."""
        if self._server is not None:
            self._server.close()
        self._reset_all()
        await asyncio.gather(*(pair.ended.wait() for pair in self._pairs))

    def _set(self, conditions: Conditions) -> None:
        was_cut, self.conditions = self.conditions.is_cut, conditions
        if was_cut and not conditions.is_cut:
            self._reset_all()
        before, self._changed = self._changed, asyncio.Event()
        before.set()

    def _reset_all(self) -> None:
        for pair in list(self._pairs):
            pair.reset()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = _Pair(self, writer)
        self._pairs.add(pair)
        try:
            await pair.run(reader)
        finally:
            self._pairs.discard(pair)
            pair.ended.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for conditions that allow something."""
        while not condition():
            await self._changed.wait()

    async def admit(self, direction: Direction, byte_count: int) -> None:
        """Waits for so many bytes' turn on the link."""
        await self.until(lambda: direction not in self.conditions.held)
        rate = self.conditions.bytes_per_second
        if rate > 0.0:
            now = self._loop.time()
            self._free_at[direction] = max(now, self._free_at[direction]) + byte_count / rate
            await asyncio.sleep(self._free_at[direction] - now)
        self.moved_bytes[direction] += byte_count

    def altered(self, direction: Direction, data: bytes) -> bytes:
        """The piece as it comes out at the other end."""
        every = self.conditions.flip_every_bytes
        if every <= 0 or len(data) < FLIP_BYTES_MIN:
            return data
        moved = self.moved_bytes[direction]
        if moved // every == (moved - len(data)) // every:
            return data
        self.flipped_count += 1
        wrong = bytearray(data)
        wrong[len(wrong) // (2 if direction is Direction.UP else 3)] ^= 0x10  # so that what is echoed is not healed
        return bytes(wrong)


class _Pair:
    """A connection and the one that it is passed on to."""

    def __init__(self, link: Link, near: asyncio.StreamWriter) -> None:
        self._link = link
        self._writers = [near]
        self._task = asyncio.current_task()
        self.ended = asyncio.Event()

    async def run(self, near_reader: asyncio.StreamReader) -> None:
        link = self._link
        try:
            await link.until(lambda: not link.conditions.is_cut)
            far_reader, far = await asyncio.open_connection(*link.target)
            self._writers.append(far)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(near_reader, far, Direction.UP))
                group.create_task(self._pass_on(far_reader, self._writers[0], Direction.DOWN))
        except* OSError:
            pass  # one end is gone, and so is the other below
        except* asyncio.CancelledError:
            pass
        finally:
            self._abort()

    def reset(self) -> None:
        """Ends both connections by RST."""
        if self._task is not None:
            self._task.cancel()
        self._abort()

    def _abort(self) -> None:
        for writer in self._writers:
            opened = writer.get_extra_info("socket")
            if opened is not None:
                with contextlib.suppress(OSError):
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction) -> None:
        """One direction: reads while there is room, delivers each piece when it is due."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WAITING_PIECES_MAX)
        reading = asyncio.create_task(self._read(reader, pieces))
        passed_bytes = 0
        try:
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(due - asyncio.get_running_loop().time())
                if not data:
                    writer.write_eof()
                    return
                await self._link.admit(way, len(data))
                limit = self._link.conditions.break_after_bytes
                if 0 < limit <= passed_bytes + len(data):
                    writer.write(data[: limit - passed_bytes])
                    await writer.drain()
                    raise ConnectionResetError("the link breaks here")
                passed_bytes += len(data)
                writer.write(self._link.altered(way, data))
                await writer.drain()
        finally:
            reading.cancel()

    async def _read(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[tuple[float, bytes]]) -> None:
        window = _Window()
        while True:
            room = await window.room(self._link.conditions.window_bytes)
            try:
                data = await reader.read(min(READ_BYTES, room))
            except OSError:
                data = b""
            latency = self._link.conditions.latency_seconds
            due = asyncio.get_running_loop().time() + latency
            window.sent(len(data), due + latency)
            await pieces.put((due, data))
            if not data:
                return


class _Window:
    """What one direction of a connection has under way and has not heard of."""

    def __init__(self) -> None:
        self._unheard: collections.deque[tuple[float, int]] = collections.deque()
        self._unheard_bytes = 0

    async def room(self, window_bytes: int) -> int:
        """Waits for room; returns how many bytes may be sent, at least 1."""
        loop = asyncio.get_running_loop()
        while True:
            while self._unheard and self._unheard[0][0] <= loop.time():
                self._unheard_bytes -= self._unheard.popleft()[1]
            if window_bytes <= 0:
                return READ_BYTES
            if self._unheard_bytes < window_bytes:
                return window_bytes - self._unheard_bytes
            await asyncio.sleep(self._unheard[0][0] - loop.time())

    def sent(self, byte_count: int, heard_at: float) -> None:
        """Bytes were sent, of whose arrival is heard at an instant."""
        self._unheard.append((heard_at, byte_count))
        self._unheard_bytes += byte_count


class Proxy:
    """All links, on a thread of their own. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._links: list[Link] = []

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def link(self, target: Target) -> Link:
        """A new link to a target, listening on a free port of the loopback interface."""
        link = Link(target, self._loop)
        asyncio.run_coroutine_threadsafe(link.open(), self._loop).result()
        self._links.append(link)
        return link

    async def _close(self) -> None:
        for link in self._links:
            await link.close()
