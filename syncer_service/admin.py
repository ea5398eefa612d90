"""AdminService: looks at the run and steers it, on a port of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.v1 import admin_pb2 as apb
from decoupled_diloco.wire import status
from syncer_service.admin_calls import REASON_CHARACTERS_MAX, Context, page, page_size, page_start, refuse
from syncer_service.admin_checkpoints import CheckpointAdmin
from syncer_service.checkpoints import Checkpoints
from syncer_service.driver import Driver
from syncer_service.exporting import Exports
from syncer_service.overview import Overview
from syncer_service.persistence import Persistence

LEARNERS_PAGE_DEFAULT: Final = 100
ROUNDS_PAGE_DEFAULT: Final = 50

log = get_logger(__name__)


class AdminServicer(CheckpointAdmin):
    """The operators' service.

    Args:
        overview: What can be seen.
        driver: Takes the commands.
        persistence: Saves what they have changed before they are answered.
        checkpoints: What the run can be rolled back to.
        exports: Writes models.
    """

    def __init__(
        self,
        overview: Overview,
        driver: Driver,
        persistence: Persistence,
        checkpoints: Checkpoints,
        exports: Exports,
    ) -> None:
        super().__init__(overview, checkpoints)
        self._exports = exports
        self._driver = driver
        self._persistence = persistence

    async def GetRun(self, request: apb.GetRunRequest, context: Context) -> apb.GetRunResponse:  # noqa: N802
        """The run."""
        return apb.GetRunResponse(run=self._overview.run())

    async def ListLearners(  # noqa: N802
        self, request: apb.ListLearnersRequest, context: Context
    ) -> apb.ListLearnersResponse:
        """The learners, worst first."""
        try:
            size = page_size(request.page_size, LEARNERS_PAGE_DEFAULT)
            start = page_start(request.page_token)
            learners = self._overview.learners()
        except Exception as error:
            await refuse(context, error, "ListLearners")
        shown, following = page(learners, start, size)
        return apb.ListLearnersResponse(learners=shown, next_page_token=following)

    async def ListRounds(self, request: apb.ListRoundsRequest, context: Context) -> apb.ListRoundsResponse:  # noqa: N802
        """The rounds, newest first. The token is the number of the oldest round shown so far."""
        try:
            size = page_size(request.page_size, ROUNDS_PAGE_DEFAULT)
            before = page_start(request.page_token) or None
            rounds = self._overview.rounds(size + 1, before)
        except Exception as error:
            await refuse(context, error, "ListRounds")
        following = str(rounds[size - 1].round) if len(rounds) > size else ""
        return apb.ListRoundsResponse(rounds=rounds[:size], next_page_token=following)

    async def PauseRun(self, request: apb.PauseRunRequest, context: Context) -> apb.PauseRunResponse:  # noqa: N802
        """Pauses."""
        reason = request.reason[:REASON_CHARACTERS_MAX]
        await self._command("PauseRun", context, lambda token: ev.PauseRequested(token, reason), reason)
        return apb.PauseRunResponse(run=self._overview.run())

    async def ResumeRun(self, request: apb.ResumeRunRequest, context: Context) -> apb.ResumeRunResponse:  # noqa: N802
        """Resumes."""
        await self._command("ResumeRun", context, ev.ResumeRequested)
        return apb.ResumeRunResponse(run=self._overview.run())

    async def FinishRun(self, request: apb.FinishRunRequest, context: Context) -> apb.FinishRunResponse:  # noqa: N802
        """Finishes."""
        reason = request.reason[:REASON_CHARACTERS_MAX]
        warning = self._overview.finish_warning()
        await self._command("FinishRun", context, lambda token: ev.FinishRequested(token, reason), reason)
        run = self._overview.run()
        if warning is not None:
            run.warnings.append(warning)
            log.warning("finishes_below_quorum", reason=warning)
        return apb.FinishRunResponse(run=run)

    async def DrainLearner(  # noqa: N802
        self, request: apb.DrainLearnerRequest, context: Context
    ) -> apb.DrainLearnerResponse:
        """Lets a learner leave."""
        learner, reason = request.learner_id, request.reason[:REASON_CHARACTERS_MAX]
        await self._command("DrainLearner", context, lambda token: ev.DrainRequested(token, learner, reason), reason)
        found = [item for item in self._overview.learners() if item.learner_id == learner]
        return apb.DrainLearnerResponse(learner=found[0] if found else None)

    async def EvictLearner(  # noqa: N802
        self, request: apb.EvictLearnerRequest, context: Context
    ) -> apb.EvictLearnerResponse:
        """Puts a learner out."""
        learner, reason = request.learner_id, request.reason[:REASON_CHARACTERS_MAX]
        await self._command("EvictLearner", context, lambda token: ev.EvictRequested(token, learner, reason), reason)
        return apb.EvictLearnerResponse()

    async def ExportModel(  # noqa: N802
        self, request: apb.ExportModelRequest, context: Context
    ) -> apb.ExportModelResponse:
        """Writes the model."""
        log.info("command", call="ExportModel", caller=context.peer(), reason="")
        try:
            exported = await self._exports.export(request.checkpoint_id)
        except Exception as error:
            await refuse(context, error, "ExportModel")
        return apb.ExportModelResponse(
            path=str(exported.path), size_bytes=exported.size_bytes, global_step=exported.global_step
        )

    async def ReadmitLearner(  # noqa: N802
        self, request: apb.ReadmitLearnerRequest, context: Context
    ) -> apb.ReadmitLearnerResponse:
        """Lets it join again."""
        learner = request.learner_id
        await self._command("ReadmitLearner", context, lambda token: ev.ReadmitRequested(token, learner))
        return apb.ReadmitLearnerResponse()

    async def _command(
        self, call: str, context: Context, make_event: Callable[[int], ev.Event], reason: str = ""
    ) -> None:
        """Has the machine carry out a command; who gave it is in the log."""
        log.info("command", call=call, caller=context.peer(), reason=reason)
        try:
            refusal = await self._driver.request(make_event, fx.Refusal, type(None))
            if refusal is None:
                await self._save()
        except Exception as error:
            await refuse(context, error, call)
        if refusal is not None:
            await refuse(context, status.error_of(refusal), call)

    async def _save(self) -> None:
        """Makes durable what a command has changed.

        Raises:
            PeerError: It cannot be, and what that means.
        """
        try:
            await self._persistence.save()
        except PeerError as error:
            if error.reason is not Reason.OVERLOADED:
                raise
            text = f"it is in effect, but a restart of the syncer would undo it: {error.text}"
            raise PeerError(error.reason, text, retry_seconds=error.retry_seconds) from error
