"""What can be seen of the run, for the admin service, the page and the metrics alike."""

from __future__ import annotations

import asyncio
from typing import Final

from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.runtime.logs import ChangeLog, get_logger
from decoupled_diloco.wire.admin import (
    LearnerMessage,
    Plain,
    RoundMessage,
    RunMessage,
    learner_to_wire,
    plain,
    round_to_wire,
    run_to_wire,
)
from syncer_service.metrics import Figures
from syncer_service.safekeeping import Safekeeping
from syncer_service.serving import Serving
from syncer_service.tape import EventTape, TapeFigures

PAGE_ROUNDS: Final = 24
"""Rounds on the status page."""

WAITS_LOOK_SECONDS: Final = 1.0
"""How often the log looks whether the run waits for learners."""

PROGRESS_SECONDS: Final = 10.0
"""How often the log says how far the run has come."""

log = get_logger(__name__)


class Overview:
    """Reads; for the event loop's thread only.

    Args:
        serving: What is looked at.
        queue_events_max: Limit of the driver's queue.
    """

    def __init__(self, serving: Serving, queue_events_max: int) -> None:
        self._serving = serving
        self._machine = serving.machine
        self._clock = serving.clock
        self._agreement = serving.agreement
        self._queue_events_max = queue_events_max
        self._started_at = serving.clock.now()
        self.tape: EventTape | None = None
        """What is taken down of the run, if anything is."""
        self.safekeeping: Safekeeping | None = None
        """What is kept of it elsewhere."""

    def run(self) -> RunMessage:
        """The run as a message."""
        now = self._clock.now()
        fragmentation = self._agreement.fragmentation
        run = run_to_wire(
            self._machine.status(now),
            run_id=self._agreement.run_id,
            uptime_seconds=now - self._started_at,
            config_values=self._agreement.config_values,
            value_counts=fragmentation.sizes if fragmentation is not None else (),
        )
        if self.safekeeping is not None:
            run.warnings.extend(self.safekeeping.warnings())
        return run

    def learners(self) -> list[LearnerMessage]:
        """Learners and observers as messages, worst first."""
        return [learner_to_wire(status) for status in self._machine.learners(self._clock.now())]

    def rounds(self, limit: int, before: int | None = None) -> list[RoundMessage]:
        """Rounds as messages, newest first."""
        found = self._machine.list_rounds(limit, before, self._clock.now())
        return [round_to_wire(status) for status in found]

    def finish_warning(self) -> str | None:
        """What an operator who finishes the run now should know: too few learners are live for the last rounds."""
        policy, status = self._machine.policy, self._machine.status(self._clock.now())
        required = policy.quorum_minimum if policy.below_quorum == "wait" else 1
        missing = required - status.live_count
        if missing <= 0 or status.phase not in (RunPhase.RUNNING, RunPhase.PAUSED):
            return None
        return (
            f"only {status.live_count} of {required} learners that a round needs (quorum.minimum) are live, "
            f"{missing} too few: the last rounds cannot be merged, and the model is that of the newest committed rounds"
        )

    def page(self) -> Plain:
        """All that the status page shows, as plain values."""
        return {
            "run": plain(self.run()),
            "learners": [plain(learner) for learner in self.learners()],
            "rounds": [plain(item) for item in self.rounds(PAGE_ROUNDS)],
        }

    async def tell_waits(self) -> None:
        """Logs once whenever the run begins to wait for learners, and when it goes on; until it is cancelled."""
        changes = ChangeLog(log)
        has_waited = False
        while True:
            status = self._machine.status(self._clock.now())
            # A pause and the end have lines of their own; a run that waited before them has not gone on.
            if status.phase in (RunPhase.INITIALIZING, RunPhase.RUNNING):
                if status.live_count == 0:
                    changes.note("run_waits", status.reason)
                    has_waited = True
                elif has_waited:
                    count = status.live_count
                    log.info("run_goes_on", reason="1 learner is live" if count == 1 else f"{count} learners are live")
                    changes.forget("run_waits")
                    has_waited = False
            await asyncio.sleep(WAITS_LOOK_SECONDS)

    async def tell_progress(self) -> None:
        """Logs every `PROGRESS_SECONDS` how far the run has come, if it has come any further; until cancelled."""
        told = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            status = self._machine.status(self._clock.now())
            if status.rounds_committed_count == told:
                continue
            told = status.rounds_committed_count
            log.info(
                "run_progress",
                global_step=status.global_step,
                total_steps=status.total_steps,
                rounds_committed=told,
                rounds_abandoned=status.rounds_abandoned_count,
                learners_live=status.live_count,
                training_loss=None if status.loss is None else round(status.loss, 4),
            )

    def figures(self) -> Figures:
        """All that the metrics read."""
        now = self._clock.now()
        under_way = [item.status(now) for item in self._machine.rounds.in_order()]
        tape = self.tape.figures() if self.tape is not None else TapeFigures()
        return Figures(
            run=self._machine.status(now),
            learners=tuple(self._machine.learners(now)),
            rounds_under_way=tuple(under_way),
            shell={
                "queue_events": self._serving.driver.waiting_count,
                "queue_events_highest": self._serving.driver.waiting_count_highest,
                "queue_events_max": self._queue_events_max,
                "upload_buffer_used_bytes": self._serving.uploads.pool.used_bytes,
                "upload_buffer_allocated_bytes": self._serving.uploads.pool.allocated_bytes,
                "upload_buffer_max_bytes": self._serving.uploads.pool.bytes_max,
                "download_payload_bytes": self._serving.publications.held_bytes,
                "downloads_active": self._serving.publications.reading_count,
                "downloads_waiting": len(self._serving.publications.following),
                "control_streams_active": len(self._serving.sessions),
                "tape_written_bytes": tape.written_bytes,
                "tape_missed_events": tape.missed_count,
            },
        )
