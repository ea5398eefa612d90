"""Instants of what happens inside the programs, taken from outside: functions are wrapped, the programs hold no timers.

    instants = Instants(path)
    instants.around(DurableStore, "commit_round", "commit", lambda store, commit, *rest: commit.version.number)

writes a line ["commit", key, begin, end] for every call. All processes of a machine share the monotonic clock, so the
lines of several can be put together. Two programs are watched in this way, each under its production `main`:

    python -m benchmarks.instants syncer LINES [flags of the syncer]
    python -m benchmarks.instants learner LINES SYNCER LEARNER_ID STEP_SECONDS VALUES
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

WRITE_SECONDS: Final = 0.25
"""How often the lines that wait are written."""

Key = Callable[..., object]
"""From a call's arguments to what it was about; None: the call is not of interest."""


class Instants:
    """Keeps and writes the instants of one process.

    Args:
        path: the file of its lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: deque[tuple[object, ...]] = deque()
        self._writing = threading.Lock()
        threading.Thread(target=self._write_for_ever, name="instants", daemon=True).start()

    def put(self, label: str, key: object, began: float, ended: float) -> None:
        """Keeps a line."""
        self._lines.append((label, key, began, ended))

    def around(self, owner: Any, name: str, label: str, key: Key = lambda *_, **__: ()) -> None:
        """Wraps a function, a method or a coroutine function; it keeps a line for every call.

        Raises:
            AttributeError: the owner has none of that name: the program has changed, and so must the probe.
        """
        wrapped = getattr(owner, name)

        @functools.wraps(wrapped)
        def called(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = wrapped(*args, **kwargs)
            about = key(*args, **kwargs)
            if about is not None:
                self.put(label, about, began, time.monotonic())
            return result

        @functools.wraps(wrapped)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return await wrapped(*args, **kwargs)
            finally:
                about = key(*args, **kwargs)
                if about is not None:
                    self.put(label, about, began, time.monotonic())

        setattr(owner, name, awaited if inspect.iscoroutinefunction(wrapped) else called)

    def write(self) -> None:
        """Writes what waits."""
        with self._writing, self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(self._lines.popleft()) + "\n" for _ in range(len(self._lines))))

    def _write_for_ever(self) -> None:
        while True:
            time.sleep(WRITE_SECONDS)
            self.write()


def read(path: Path) -> Iterator[tuple[str, Any, float, float]]:
    """The lines of a file, up to the last whole one."""
    text = path.read_text(encoding="utf-8")
    for line in text[: text.rfind("\n") + 1].splitlines():
        label, key, began, ended = json.loads(line)
        yield label, key, began, ended


# --- the syncer ---


def watch_syncer(instants: Instants) -> None:
    """Takes the instants of a round on its way through the syncer. Call it before the syncer starts."""
    from decoupled_diloco.core import effects as fx
    from decoupled_diloco.core.syncer import SyncerMachine
    from syncer_service import shell
    from syncer_service.servicer import SyncerServicer
    from syncer_service.store.durable import DurableStore
    from syncer_service.store.payloads import FragmentFiles

    decide = SyncerMachine.handle

    @functools.wraps(decide)
    def decided(machine: SyncerMachine, event: Any, now: float) -> list[fx.Effect]:
        began = time.monotonic()
        effects = decide(machine, event, now)
        ended = time.monotonic()
        for effect in effects:
            match effect:
                case fx.StartMerge():
                    instants.put("start_merge", effect.round, began, ended)
                case fx.CommitRound():
                    about = [effect.round, effect.fragment, effect.version.number]
                    instants.put("commit_round", about, began, ended)
                case fx.PublishFragment():
                    instants.put("publish", [effect.fragment, effect.version.number], began, ended)
        return effects

    setattr(SyncerMachine, "handle", decided)  # noqa: B010 (not an assignment for mypy)
    instants.around(shell, "merge_round", "merge")
    instants.around(DurableStore, "commit_round", "commit", lambda store, commit, delta, row, state: row.round)
    instants.around(FragmentFiles, "append", "payload", lambda files, commit, *rest: commit.version.number)
    instants.around(
        SyncerServicer,
        "_send",
        "serve",
        lambda servicer, reading, publication, request, context: [
            request.learner_id,
            publication.fragment,
            publication.version.number,
        ],
    )


def run_syncer() -> int:
    """The syncer's program."""
    from syncer_service.__main__ import main

    return main()


# --- a learner ---


def watch_learner(instants: Instants) -> None:
    """Takes the instants of a version on its way into the hand-over slot. Call it before the learner starts."""
    from decoupled_diloco.core import learner_events as lev
    from decoupled_diloco.wire.stream import PayloadSink
    from learner_service import downloader
    from learner_service.bulk_client import BulkClient, Receipt
    from learner_service.driver import LearnerDriver
    from learner_service.handover import Handover
    from learner_service.transfers import Transfers

    def news(driver: LearnerDriver, instruction: object) -> object:
        if not isinstance(instruction, lev.Published):
            return None
        return [instruction.fragment, instruction.version.number]

    instants.around(LearnerDriver, "on_instruction", "news", news)
    instants.around(
        BulkClient, "download", "download", lambda client, fragment, version, *rest, **_: [fragment, version.number]
    )
    instants.around(Receipt, "open", "header")
    instants.around(PayloadSink, "finish", "received")
    instants.around(downloader, "_decoded", "decode")
    instants.around(Transfers, "_staged", "stage")
    instants.around(
        Handover, "arrive", "hand_over", lambda handover, fragment, version, *rest: [fragment, version.number]
    )


def run_learner(syncer: str, learner_id: str, step_seconds: float, values: dict[str, Any]) -> int:
    """A learner with the demo's model that sleeps instead of computing, until the run ends or it is killed."""
    import decoupled_diloco
    from learner_service.workloads.language_model.model import Decoder, DecoderSizes

    params = Decoder(DecoderSizes(1024, 64, 2, 192, 2, 1, 32)).init(0)
    with decoupled_diloco.learner(values, params, learner_id=learner_id, syncer=syncer) as session:
        params = session.start(params)
        while not session.finished:
            time.sleep(step_seconds)
            params = session.step_boundary(params, tokens=512)
    return 0


def main(arguments: list[str]) -> int:
    """Runs one of the two programs; see the top of this module."""
    program, path, *rest = arguments
    instants = Instants(Path(path))
    if program == "syncer":
        watch_syncer(instants)
        sys.argv[1:] = rest
        return run_syncer()
    watch_learner(instants)
    syncer, learner_id, step_seconds, values = rest
    return run_learner(syncer, learner_id, float(step_seconds), json.loads(values))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
