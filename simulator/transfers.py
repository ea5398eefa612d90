"""The bytes of a world: uploads and downloads that take time, break, and come again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_effects as lfx
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Fate
from simulator import facts
from simulator.learner_process import RETRY_SECONDS, SimulatedLearner

if TYPE_CHECKING:
    from simulator.syncer_process import SyncerProcess
    from simulator.world import World

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
        header = effect.copy.header(learner.name, learner.incarnation, effect.round)
        upload = Upload(learner, header, finite=not learner.poisoned)
        self._uploads[(header.learner, header.incarnation, header.round)] = upload
        self._begin(upload, upload.attempt)

    def cancel(self, learner: SimulatedLearner, round_number: int) -> None:
        """The learner gives a contribution up: its stream ends, and the syncer sees it end."""
        upload = self._uploads.pop((learner.name, learner.incarnation, round_number), None)
        if upload is not None:
            upload.attempt += 1
            header = upload.header
            broken = ev.ContributionFailed(
                header.learner, header.incarnation, header.round, Fate.ABORTED, "the stream was cancelled"
            )
            if learner.speaks:
                self._world.after(learner.speed.latency_seconds, lambda: self._world.tell_syncer(broken))

    def abort(self, effect: fx.AbortUpload) -> None:
        """The syncer breaks an upload off; the learner tries again, as after any broken stream."""
        upload = self._uploads.get((effect.learner, effect.incarnation, effect.round))
        if upload is not None:
            self._again(upload)

    def break_all(self) -> None:
        """The syncer is gone: every upload begins again once there is another one."""
        for upload in list(self._uploads.values()):
            self._again(upload)

    def _is_current(self, upload: Upload, attempt: int) -> bool:
        header, learner = upload.header, upload.learner
        known = self._uploads.get((header.learner, header.incarnation, header.round))
        return known is upload and upload.attempt == attempt and learner.incarnation == header.incarnation

    def _again(self, upload: Upload) -> None:
        upload.attempt += 1
        attempt = upload.attempt
        self._world.after(RETRY_SECONDS, lambda: self._begin(upload, attempt))

    def _begin(self, upload: Upload, attempt: int) -> None:
        if not self._is_current(upload, attempt):
            if upload.learner.incarnation != upload.header.incarnation:
                self._uploads.pop((upload.header.learner, upload.header.incarnation, upload.header.round), None)
            return
        if not upload.learner.speaks:
            self._again(upload)
            return

        def admitted(value: object) -> None:
            assert isinstance(value, fx.Admission)
            if not self._is_current(upload, attempt):
                return
            if value.fate is Fate.ACCEPTED and not value.known:
                self._move(upload, attempt, upload.learner.speed.upload_seconds)
            else:
                self._ended(upload, value.fate)

        self._world.call(
            upload.learner,
            lambda number: ev.ContributionStarted(number, upload.header),
            admitted,
            lambda: self._retry(upload, attempt),
        )

    def _retry(self, upload: Upload, attempt: int) -> None:
        if self._is_current(upload, attempt):
            self._again(upload)

    def _move(self, upload: Upload, attempt: int, left_seconds: float) -> None:
        """Moves the rest of the bytes, with a sign of life every now and then."""
        if not self._is_current(upload, attempt):
            return
        header, world = upload.header, self._world
        breaks = left_seconds <= MOVED_SECONDS and world.chance(self.faults.broken_uploads)
        if breaks or not upload.learner.speaks:
            broken = ev.ContributionFailed(
                header.learner, header.incarnation, header.round, Fate.ABORTED, "the stream broke"
            )
            world.tell_syncer(broken)
            self._again(upload)
        elif left_seconds > MOVED_SECONDS:
            world.tell_syncer(ev.BytesMoved(header.learner, header.incarnation, header.round))
            world.after(MOVED_SECONDS, lambda: self._move(upload, attempt, left_seconds - MOVED_SECONDS))
        else:
            world.after(left_seconds, lambda: self._arrive(upload, attempt))

    def _arrive(self, upload: Upload, attempt: int) -> None:
        if not self._is_current(upload, attempt):
            return
        header = upload.header

        def ended(value: object) -> None:
            assert isinstance(value, Fate)
            if self._is_current(upload, attempt):
                self._ended(upload, value)

        self._world.call(
            upload.learner,
            lambda number: ev.ContributionReceived(
                number, header.learner, header.incarnation, header.round, upload.finite, 1.0
            ),
            ended,
            lambda: self._retry(upload, attempt),
            later=False,
        )

    def _ended(self, upload: Upload, fate: Fate) -> None:
        if not fate.is_terminal:
            self._again(upload)
            return
        upload.learner.fates[fate] = upload.learner.fates.get(fate, 0) + 1
        if self._world.chance(self.faults.repeated_uploads):
            self._again(upload)

    # ---- the initial parameters --------------------------------------------------------------------------------------

    def upload_initial(self, learner: SimulatedLearner) -> None:
        """Sends a learner's own parameters, fragment by fragment."""
        for fragment in range(self._world.policy.fragment_count):
            self._send_initial(learner, learner.incarnation, fragment)

    def _send_initial(self, learner: SimulatedLearner, incarnation: int, fragment: int) -> None:
        if learner.incarnation != incarnation:
            return

        def again() -> None:
            self._world.after(RETRY_SECONDS, lambda: self._send_initial(learner, incarnation, fragment))

        if not learner.speaks:
            again()
            return
        self._world.call(
            learner,
            lambda number: ev.InitialFragmentReceived(number, learner.name, incarnation, fragment, f"{fragment}.1"),
            lambda _: None,
            again,
        )

    # ---- downloads ---------------------------------------------------------------------------------------------------

    def download(self, learner: SimulatedLearner, wanted: lfx.Download) -> None:
        """Fetches a version; a download that breaks starts over, one of a version that is gone is given up."""
        self._ask(learner, learner.incarnation, wanted)

    def _ask(self, learner: SimulatedLearner, incarnation: int, wanted: lfx.Download) -> None:
        world = self._world
        if learner.incarnation != incarnation:
            return
        process = world.process
        if process is None or not learner.reachable or world.now < process.stopped_until:
            world.after(RETRY_SECONDS, lambda: self._ask(learner, incarnation, wanted))
        elif process.serving.get(wanted.fragment) != wanted.version:
            world.after(RETRY_SECONDS, lambda: self._gone(learner, incarnation, wanted))
        else:
            seconds = learner.speed.download_seconds + 2 * learner.speed.latency_seconds
            world.after(seconds, lambda: self._downloaded(process, learner, incarnation, wanted))

    def _gone(self, learner: SimulatedLearner, incarnation: int, wanted: lfx.Download) -> None:
        if learner.incarnation == incarnation:
            learner.take(lev.DownloadFailed(wanted.fragment, wanted.version))

    def _downloaded(
        self, process: SyncerProcess, learner: SimulatedLearner, incarnation: int, wanted: lfx.Download
    ) -> None:
        if learner.incarnation != incarnation:
            return
        world = self._world
        if world.now < learner.stopped_until:
            world.at(learner.stopped_until, lambda: self._downloaded(process, learner, incarnation, wanted))
            return
        if not process.alive or not learner.reachable:
            world.after(RETRY_SECONDS, lambda: self._ask(learner, incarnation, wanted))
            return
        world.note(facts.Held(world.now, learner.name, incarnation, wanted.fragment, wanted.version))
        learner.take(lev.Downloaded(wanted.fragment, wanted.version, wanted.global_step))
