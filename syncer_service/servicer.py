"""SyncerService: translates calls of learners into events of the machine, and its answers into replies.

Uploads of bytes are in `upload_servicer`. A handler never decides anything about the run; it checks what only the
wire can get wrong, asks the driver, and waits.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.errors import PeerError, Reason, Recourse
from decoupled_diloco.core.ids import Version
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.v1.syncer_pb2_grpc import SyncerServiceServicer
from decoupled_diloco.wire import codec, control, enums, status
from syncer_service.agreement import JoinOffer
from syncer_service.persistence import Persistence
from syncer_service.publications import Publication
from syncer_service.readings import Reading, newest_facts
from syncer_service.serving import END_OF_STREAM, Serving
from syncer_service.sessions import Session
from syncer_service.store.interface import VersionGoneError
from syncer_service.upload_servicer import receive_contribution, receive_initial_fragment

log = get_logger(__name__)

ALIVE_SHARE = 1 / 3
"""The syncer says that a control stream lives after this share of the time in which a learner gives it up."""

Context = Any  # grpc.aio.ServicerContext, whose type parameters differ by call


class SyncerServicer(SyncerServiceServicer):
    """The learner-facing service.

    Args:
        serving: What the handlers share.
        persistence: Saves what must hold before it is answered.
    """

    def __init__(self, serving: Serving, persistence: Persistence) -> None:
        self._serving = serving
        self._persistence = persistence
        self._joining = asyncio.Lock()
        self._newest_written: tuple[control.Instruction | None, spb.AttachResponse] = (None, spb.AttachResponse())

    # --- joining and leaving ---

    async def JoinRun(self, request: spb.JoinRunRequest, context: Context) -> spb.JoinRunResponse:  # noqa: N802
        """Compares what both sides must agree on, and admits a new incarnation."""
        try:
            # One at a time, so that the model of the first learner is the run's before the second one is compared.
            async with self._joining:
                return await self._join(request)
        except Exception as error:
            await self._refuse(context, error, "JoinRun", request.learner_id)

    async def _join(self, request: spb.JoinRunRequest) -> spb.JoinRunResponse:
        serving = self._serving
        offer = _offer(request)
        fragmentation = serving.agreement.check(offer)
        admitted = await serving.driver.request(
            lambda token: ev.JoinRequested(
                token, offer.learner, offer.role, request.peer_address, request.software_version
            ),
            fx.Admitted,
            fx.Refusal,
        )
        if isinstance(admitted, fx.Refusal):
            raise status.error_of(admitted)
        if fragmentation is not None and serving.agreement.adopt(offer, fragmentation):
            serving.model_agreed(fragmentation)
            await self._persistence.save_model()
        # An incarnation fences the one before, so it must not be handed out twice.
        await self._persistence.save()
        return self._welcome(admitted)

    def _welcome(self, admitted: fx.Admitted) -> spb.JoinRunResponse:
        policy, agreement = self._serving.machine.policy, self._serving.agreement
        return spb.JoinRunResponse(
            protocol_version=codec.PROTOCOL_VERSION,
            run_id=agreement.run_id,
            incarnation=admitted.incarnation,
            policy=codec.policy_to_wire(policy),
            deadlines=codec.deadlines_to_wire(policy.deadlines),
            fragments=[
                codec.fragment_version_to_wire(fragment, version, step, agreement.value_count(fragment))
                for fragment, version, step in admitted.versions
            ],
            slot=admitted.slot,
            cursor=admitted.cursor,
            global_step=admitted.global_step,
            paused=admitted.paused,
            initialized=admitted.initialized,
            peers=codec.peers_to_wire(admitted.peers),
        )

    async def LeaveRun(self, request: spb.LeaveRunRequest, context: Context) -> spb.LeaveRunResponse:  # noqa: N802
        """Takes an incarnation off the run."""
        try:
            await self._serving.driver.request(
                lambda token: ev.LearnerLeft(token, request.learner_id, request.incarnation, request.reason),
                type(None),
            )
            await self._persistence.save()
            return spb.LeaveRunResponse()
        except Exception as error:
            await self._refuse(context, error, "LeaveRun", request.learner_id)

    # --- the control stream ---

    async def Attach(self, request_iterator: Any, context: Context) -> None:  # noqa: N802
        """Reports in, instructions out, until either side ends it."""
        learner = "?"
        try:
            hello = await self._hello(context)
            learner = hello.learner
            session = self._serving.sessions.open(hello.learner, hello.incarnation)
            try:
                await self._serving.driver.offer(hello)
                await self._converse(session, context)
            finally:
                self._serving.sessions.ended(session)
                if not session.replaced:
                    reason = str(session.error or "it was closed")
                    self._serving.driver.report(ev.LearnerDetached(learner, session.incarnation, reason))
            if session.error is not None:
                raise session.error
        except Exception as error:
            await self._refuse(context, error, "Attach", learner)

    async def _hello(self, context: Context) -> ev.LearnerAttached:
        seconds = self._serving.machine.policy.deadlines.rpc_seconds
        try:
            async with asyncio.timeout(seconds):
                message = await context.read()
        except TimeoutError:
            raise PeerError(Reason.TRANSFER_IDLE, f"no hello came for {seconds:g} s") from None
        if message is END_OF_STREAM:
            raise PeerError(Reason.INVALID_FIELD, "the stream ended before its hello")
        hello = control.hello_from_wire(message)
        self._serving.require_joined(hello.learner, hello.incarnation)
        return hello

    async def _converse(self, session: Session, context: Context) -> None:
        """Until the learner half-closes, breaks the stream, or the session is closed."""
        work = [
            asyncio.create_task(self._read_reports(session, context), name=f"reports of {session.learner}"),
            asyncio.create_task(self._write_instructions(session, context), name=f"instructions to {session.learner}"),
            asyncio.create_task(session.wait_closed(), name=f"session of {session.learner}"),
        ]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _read_reports(self, session: Session, context: Context) -> None:
        while (message := await context.read()) is not END_OF_STREAM:
            report = control.report_from_wire(message, session.learner, session.incarnation)
            if report is not None:
                await self._serving.driver.offer(report)

    async def _write_instructions(self, session: Session, context: Context) -> None:
        serving = self._serving
        alive_seconds = serving.machine.policy.deadlines.attach_idle_seconds * ALIVE_SHARE
        await context.write(control.alive_to_wire(serving.machine.global_step, serving.epoch))
        while True:
            instruction = await session.next_message(alive_seconds)
            if instruction is None:
                await context.write(control.alive_to_wire(serving.machine.global_step, serving.epoch))
                continue
            await context.write(self._written(instruction))

    def _written(self, instruction: control.Instruction) -> spb.AttachResponse:
        """The message of an instruction; one that goes to everybody is written once."""
        if self._newest_written[0] is not instruction:
            value_count = 0
            if isinstance(instruction, fx.PublishFragment | fx.AnnounceFragment):
                value_count = self._serving.agreement.value_count(instruction.fragment)
            self._newest_written = instruction, control.instruction_to_wire(instruction, value_count)
        return self._newest_written[1]

    # --- bytes ---

    async def UploadContribution(self, request_iterator: Any, context: Context) -> None:  # noqa: N802
        """Takes one contribution."""
        try:
            await receive_contribution(self._serving, context)
        except Exception as error:
            await self._refuse(context, error, "UploadContribution")

    async def UploadInitialFragment(  # noqa: N802
        self, request_iterator: Any, context: Context
    ) -> spb.UploadInitialFragmentResponse:
        """Takes one fragment of the initial parameters."""
        try:
            await receive_initial_fragment(self._serving, context)
            return spb.UploadInitialFragmentResponse()
        except Exception as error:
            await self._refuse(context, error, "UploadInitialFragment")

    async def DownloadFragment(self, request: spb.DownloadFragmentRequest, context: Context) -> None:  # noqa: N802
        """Streams one version."""
        try:
            await self._download(request, context)
        except Exception as error:
            await self._refuse(context, error, "DownloadFragment", request.learner_id)

    async def _download(self, request: spb.DownloadFragmentRequest, context: Context) -> None:
        serving = self._serving
        serving.require_joined(request.learner_id, request.incarnation)
        fragment, version = request.fragment, codec.version_from_wire(request.version)
        fragmentation = serving.agreement.known()
        if not 0 <= fragment < len(fragmentation.fragments):
            last = len(fragmentation.fragments) - 1
            raise PeerError(Reason.INVALID_FIELD, f"fragment = {fragment}: must be 0 to {last}")
        if request.next_version:
            following = await self._next_version(request, context)
            if following is None:
                return
            version = following
        held = codec.version_from_wire(request.held) if request.HasField("held") else None
        encodings = enums.known_encodings(request.encodings) or frozenset({"float32"})
        publications = serving.publications
        with publications.readings.begin(request.learner_id, request.incarnation, fragment, version) as reading:
            try:
                publication = await publications.publication(fragment, version, held, encodings)
            except VersionGoneError as error:
                raise _gone(error, fragment, version) from None
            reading.payload = publication.payload
            await self._send(reading, publication, request, context)

    async def _next_version(self, request: spb.DownloadFragmentRequest, context: Context) -> Version | None:
        """The version that follows the one that the caller holds, once it is published; None: none will be served."""
        if request.HasField("version") or not request.HasField("held") or request.offset:
            text = "next_version = true: version must be absent, held must be there, offset must be 0"
            raise PeerError(Reason.INVALID_FIELD, text)
        # What costs turns of the loop is done before the version is there. Much may have happened meanwhile.
        await context.send_initial_metadata(())
        serving = self._serving
        serving.require_joined(request.learner_id, request.incarnation)
        if not serving.machine.versions:
            raise PeerError(Reason.NOT_READY, "the run has no parameters yet", retry_seconds=1.0)
        newest = serving.machine.versions[request.fragment]
        if newest != codec.version_from_wire(request.held):
            return newest
        return await serving.publications.following.wait(request.learner_id, request.incarnation, request.fragment)

    async def _send(
        self, reading: Reading, publication: Publication, request: spb.DownloadFragmentRequest, context: Context
    ) -> None:
        serving, fragment, payload = self._serving, publication.fragment, publication.payload
        idle_seconds = serving.machine.policy.deadlines.upload_idle_seconds
        if not 0 <= request.offset <= payload.payload_bytes:
            raise PeerError(Reason.INVALID_FIELD, f"offset = {request.offset}: must be 0 to {payload.payload_bytes}")
        value_count = serving.agreement.value_count(fragment)
        version = codec.fragment_version_to_wire(fragment, publication.version, publication.global_step, value_count)
        header = spb.DownloadHeader(
            version=version,
            encoding=enums.encoding_to_wire(publication.encoding),
            payload_bytes=payload.payload_bytes,
        )
        if publication.delta_base is not None:
            header.delta_base.CopyFrom(codec.version_to_wire(publication.delta_base))
        moved = serving.movement(request.learner_id, request.incarnation, None)
        await reading.write(context, spb.DownloadFragmentResponse(header=header), idle_seconds)
        for message in payload.messages(request.offset):
            await reading.write(context, message, idle_seconds)
            serving.metrics.bytes_sent(len(message))
            moved.moved()
        moved.ended("download", payload.payload_bytes - request.offset)

    # --- errors ---

    async def _refuse(self, context: Context, failure: Exception, call: str, learner: str = "") -> NoReturn:
        if status.connection_broke(failure):
            log.debug("call_ended", call=call, learner=learner, reason=status.CONNECTION_BROKE)
            await status.abort(context, failure)
        error = status.error_of(failure)
        if error.reason is Reason.INTERNAL:
            log.error("call_failed", call=call, learner=learner, exc_info=failure)
        else:
            say = log.info if error.recourse is Recourse.STOP else log.debug
            say("call_refused", call=call, learner=learner, code=error.reason.value, reason=error.text)
        await status.abort(context, error)


def _offer(request: spb.JoinRunRequest) -> JoinOffer:
    return JoinOffer(
        learner=request.learner_id,
        role=enums.role_from_wire(request.role),
        protocol=(request.protocol.minimum, request.protocol.maximum),
        run_id=request.run_id,
        config_digest=request.config_digest,
        config_values=dict(request.config_values),
        schema=codec.schema_from_wire(request.schema) if request.schema.tensors else None,
    )


def _gone(error: VersionGoneError, fragment: int, version: Version) -> PeerError:
    """What a caller hears who asks for a version that is not there."""
    newest = error.newest
    if newest is None:
        return PeerError(Reason.NOT_READY, "the run has no parameters yet", retry_seconds=1.0)
    is_older = (version.timeline, version.number) < (newest.timeline, newest.number)
    reason = Reason.SUPERSEDED if is_older else Reason.NOT_FOUND
    return PeerError(reason, str(error), newest_facts(fragment, newest))
