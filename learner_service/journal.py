"""The learner's own account of what it did: one JSON object a line, for audits and for tests of the syncer's ledger.

Every line has "t" (seconds on the machine's monotonic clock), "kind" and, but for those of the whole process,
"generation": the incarnation within this process, whose number stands in the line "joined".

| kind | fields |
|---|---|
| started | learner, process, wall_time |
| joined | incarnation, slot, cursor, is_synchronous (the run's barrier) |
| step | local_step, cursor (of the next batch), tokens |
| boundary | seconds that the device thread spent between two steps, hold |
| waited | hold, seconds that the device thread waited for news |
| contribution | round, fragment, base, local_step, step_count, token_count, total_token_count, cursor |
| fate | round, fragment, fate; "cancelled" where the round ended first, "not_sent" where the copy was not finite |
| applied | fragment, version, digest (of what came), local_step, token_count, kept_token_count, rule |
| recovery | reason |
| dropped | count of lines that the writer could not take in |
| ended | (the process stops in good order: no line is missing) |

Whoever writes a line only puts it into a bounded queue; a thread of its own encodes and writes. What it has written
survives a SIGKILL: at most the lines of the last few milliseconds are lost.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from queue import Empty, SimpleQueue

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.learner_effects import Apply, Copy
from decoupled_diloco.runtime.clock import Clock, MonotonicClock
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.logs import get_logger
from learner_service.syncer_client import Joined

log = get_logger(__name__)

LINES_MAX = 65536
"""Lines that may wait for the disk; more are dropped and counted."""

Line = dict[str, object]
"""What will be a line; an array stands for its digest, which the writing thread takes."""


class Journal:
    """An append-only file of lines. Any thread may write; no call waits for the disk, except `close`.

    Args:
        path: the file; its folder is made. None: nothing is written.
        learner: whose journal it is.
        clock: instants.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path | None = None, learner: str = "", clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._queue: SimpleQueue[Line | None] = SimpleQueue()
        self._dropped_count = 0
        self._stepped_at: float | None = None
        self._thread: threading.Thread | None = None
        self.is_on = path is not None
        if path is None:
            return
        self._file = _opened(path)
        self._thread = threading.Thread(target=self._write_for_ever, name="journal", daemon=True)
        self._thread.start()
        self._put("started", learner=learner, process=os.getpid(), wall_time=self._clock.wall_time())

    def close(self) -> None:
        """Writes what waits, and ends."""
        self._put("ended")
        thread, self._thread, self.is_on = self._thread, None, False
        if thread is not None:
            self._queue.put(None)
            thread.join()
            os.close(self._file)

    # ---- what is written ---------------------------------------------------------------------------------------------

    def joined(self, generation: int, joined: Joined) -> None:
        """An incarnation begins."""
        self._put(
            "joined",
            generation=generation,
            incarnation=joined.incarnation,
            slot=joined.slot,
            cursor=joined.cursor,
            is_synchronous=joined.policy.barrier,
        )

    def step(self, generation: int, local_step: int, cursor: int, tokens: int) -> None:
        """An inner step is done; `cursor` is that of the next batch."""
        self._stepped_at = self._clock.now()
        self._put("step", generation=generation, local_step=local_step, cursor=cursor, tokens=tokens)

    def boundary(self, generation: int, hold: str | None) -> None:
        """The device thread is through with what lies between two steps, or with another look while it holds."""
        if self._stepped_at is not None:
            seconds, self._stepped_at = self._clock.now() - self._stepped_at, None
            self._put("boundary", generation=generation, seconds=round(seconds, 6), hold=hold)

    def waited(self, generation: int, hold: str | None, seconds: float) -> None:
        """The device thread has waited for news."""
        self._put("waited", generation=generation, hold=hold, seconds=round(seconds, 6))

    def contribution(self, generation: int, round_number: int, copy: Copy) -> None:
        """A copy was handed to the uploader."""
        self._put(
            "contribution",
            generation=generation,
            round=round_number,
            fragment=copy.fragment,
            base=_named(copy.base),
            local_step=copy.local_step,
            step_count=copy.step_count,
            token_count=copy.token_count,
            total_token_count=copy.total_token_count,
            cursor=copy.cursor,
        )

    def fate(self, generation: int, round_number: int, fragment: int, fate: str) -> None:
        """What became of it, as far as this learner heard."""
        self._put("fate", generation=generation, round=round_number, fragment=fragment, fate=fate)

    def applied(self, generation: int, apply: Apply, values: FloatVector, local_step: int, token_count: int) -> None:
        """A version was written into the parameters. `values` are its own, which nobody writes to."""
        self._put(
            "applied",
            generation=generation,
            fragment=apply.fragment,
            version=_named(apply.version),
            digest=values,
            local_step=local_step,
            token_count=token_count,
            kept_token_count=apply.kept_token_count,
            rule=apply.rule,
        )

    def recovery(self, generation: int, reason: str) -> None:
        """This learner starts over from published versions."""
        self._put("recovery", generation=generation, reason=reason)

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _put(self, kind: str, **fields: object) -> None:
        if not self.is_on:
            return
        if self._queue.qsize() >= LINES_MAX:
            self._dropped_count += 1
            return
        self._queue.put({"t": round(self._clock.now(), 6), "kind": kind, **fields})

    def _write_for_ever(self) -> None:
        ended = False
        while not ended:
            lines = [self._queue.get()]
            try:
                while len(lines) < LINES_MAX:
                    lines.append(self._queue.get_nowait())
            except Empty:
                pass
            ended = lines[-1] is None
            self._write([line for line in lines if line is not None])

    def _write(self, lines: list[Line]) -> None:
        if self._dropped_count:
            lines.append({"t": round(self._clock.now(), 6), "kind": "dropped", "count": self._dropped_count})
        text = "".join(json.dumps(line, separators=(",", ":"), default=vector_digest) + "\n" for line in lines)
        try:
            os.write(self._file, text.encode())
            self._dropped_count = 0
        except OSError as error:
            if not self._dropped_count:
                log.error("journal_not_written", reason=str(error))
            self._dropped_count += len(lines)


def _named(version: Version) -> list[object]:
    return [version.timeline, version.number, version.digest]


def _opened(path: Path) -> int:
    """Opens the file to append; a line that an earlier process did not end is ended."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
    except OSError as error:
        raise ConfigError(f'learner.journal = "{path}": cannot be written: {error.strerror}') from None
    return file
