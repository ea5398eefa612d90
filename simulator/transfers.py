"""The bytes of a world: uploads and downloads that take time, break, and come again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_effects as lfx
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Fate, Version

if TYPE_CHECKING:
    from simulator.world import SimulatedLearner, World

RETRY_SECONDS = 0.5
"""Wait before a broken transfer is tried again."""
MOVED_SECONDS = 1.0
"""A transfer says that it is alive this often."""


@dataclass(slots=True)
class Faults:
    """What goes wrong; shares from 0 to 1, drawn from the world's seed."""

    broken_uploads: float = 0.0
    """Share of the attempts to upload that break half-way."""
    repeated_uploads: float = 0.0
    """Share of the answered contributions that are sent once more, header and bytes."""
    failed_merges: float = 0.0
    """Share of the merges that come to nothing, and of the commits that fail."""


@dataclass(slots=True, eq=False)
class Upload:
    """One contribution on its way; `attempt` tells the newest attempt from the ones before."""

    learner: SimulatedLearner
    header: ev.ContributionHeader
    finite: bool
    attempt: int = 0


class Transfers:
    """All transfers of one world."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world = world
        self.faults = faults
        self._uploads: dict[tuple[str, int, int], Upload] = {}

    # ---- uploads -----------------------------------------------------------------------------------------------------

    def upload(self, learner: SimulatedLearner, effect: lfx.Upload) -> None:
        """Starts to send a contribution."""
        copy = effect.copy
        header = ev.ContributionHeader(
            learner.name,
            learner.incarnation,
            effect.round,
            copy.fragment,
            copy.base,
            copy.local_step,
            copy.total_token_count,
            copy.step_count,
            copy.token_count,
            copy.cursor,
        )
        upload = Upload(learner, header, finite=not learner.poisoned)
        self._uploads[(header.learner, header.incarnation, header.round)] = upload
        self._world.after(learner.speed.latency_seconds, lambda: self._begin(upload, upload.attempt))

    def cancel(self, learner: SimulatedLearner, round_number: int) -> None:
        """The learner gives a contribution up."""
        upload = self._uploads.pop((learner.name, learner.incarnation, round_number), None)
        if upload is not None:
            upload.attempt += 1

    def abort(self, effect: fx.AbortUpload) -> None:
        """The syncer breaks an upload off; the learner tries again, as after any broken stream."""
        upload = self._uploads.get((effect.learner, effect.incarnation, effect.round))
        if upload is not None:
            self._again(upload)

    def _is_current(self, upload: Upload, attempt: int) -> bool:
        header = upload.header
        known = self._uploads.get((header.learner, header.incarnation, header.round))
        return known is upload and upload.attempt == attempt and upload.learner.incarnation == header.incarnation

    def _again(self, upload: Upload) -> None:
        upload.attempt += 1
        attempt = upload.attempt
        self._world.after(RETRY_SECONDS, lambda: self._begin(upload, attempt))

    def _begin(self, upload: Upload, attempt: int) -> None:
        if not self._is_current(upload, attempt):
            return
        if not upload.learner.reachable:
            self._again(upload)
            return

        def admitted(value: object) -> None:
            assert isinstance(value, fx.Admission)
            if value.fate is Fate.ACCEPTED and not value.known:
                self._move(upload, attempt, upload.learner.speed.upload_seconds)
            else:
                self._ended(upload, value.fate)

        self._world.request(lambda number: ev.ContributionStarted(number, upload.header), admitted)

    def _move(self, upload: Upload, attempt: int, left_seconds: float) -> None:
        """Moves the rest of the bytes, with a sign of life every now and then."""
        if not self._is_current(upload, attempt):
            return
        header = upload.header
        breaks = left_seconds <= MOVED_SECONDS and self._world.draw() < self.faults.broken_uploads
        if breaks or not upload.learner.reachable:
            broken = ev.ContributionFailed(
                header.learner, header.incarnation, header.round, Fate.ABORTED, "the stream broke"
            )
            self._world.tell_syncer(broken)
            self._again(upload)
        elif left_seconds > MOVED_SECONDS:
            self._world.tell_syncer(ev.BytesMoved(header.learner, header.incarnation, header.round))
            self._world.after(MOVED_SECONDS, lambda: self._move(upload, attempt, left_seconds - MOVED_SECONDS))
        else:
            self._world.after(left_seconds, lambda: self._arrive(upload, attempt))

    def _arrive(self, upload: Upload, attempt: int) -> None:
        if not self._is_current(upload, attempt):
            return
        header = upload.header

        def ended(value: object) -> None:
            assert isinstance(value, Fate)
            self._ended(upload, value)

        self._world.request(
            lambda number: ev.ContributionReceived(
                number, header.learner, header.incarnation, header.round, upload.finite, 1.0
            ),
            ended,
        )

    def _ended(self, upload: Upload, fate: Fate) -> None:
        if not fate.is_terminal:
            self._again(upload)
            return
        upload.learner.fates[fate] = upload.learner.fates.get(fate, 0) + 1
        if self._world.draw() < self.faults.repeated_uploads:
            self._again(upload)

    # ---- downloads ---------------------------------------------------------------------------------------------------

    def download(self, learner: SimulatedLearner, fragment: int, version: Version) -> None:
        """Fetches a version; a download that breaks starts over."""
        incarnation, step = learner.incarnation, self._world.syncer.version_steps[fragment]

        def arrived() -> None:
            if learner.incarnation != incarnation:
                return
            if learner.reachable:
                self._world.deliver(learner, incarnation, lev.Downloaded(fragment, version, step))
            else:
                self._world.after(RETRY_SECONDS, arrived)

        self._world.after(learner.speed.download_seconds + 2 * learner.speed.latency_seconds, arrived)
