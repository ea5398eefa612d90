"""Calls of AdminService, answers as plain values (see `wire.admin`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from decoupled_diloco.core.errors import UnreachableError
from decoupled_diloco.runtime.channel import open_sync_channel
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.runtime.tls import channel_credentials, speaks_tls
from decoupled_diloco.v1 import admin_pb2 as apb
from decoupled_diloco.v1.admin_pb2_grpc import AdminServiceStub
from decoupled_diloco.wire.admin import Plain, plain
from decoupled_diloco.wire.status import from_rpc_error
from syncerctl.settings import ConnectionSettings

PAGE_SIZE: Final = 500
"""Learners or rounds asked for at a time."""


LONG_SECONDS: Final = 3600.0
"""Longest wait for calls that move a whole model to or from a disk or an object store."""


class TransportError(Exception):
    """The syncer is there, but the two ends do not agree on TLS. The text says what to change."""


class AdminClient:
    """One connection to a syncer's admin port; a context manager.

    Args:
        settings: Where, and how encrypted.

    Raises:
        ConfigError: The TLS files cannot be used.
    """

    def __init__(self, settings: ConnectionSettings) -> None:
        files = settings.tls_files("syncerctl")
        credentials = channel_credentials(files) if files is not None else None
        address = parse_address(settings.address)
        self._settings = settings
        self._timeout_seconds = settings.timeout_seconds
        self._channel = open_sync_channel(address, credentials, settings.tls_server_name)
        self._stub = AdminServiceStub(self._channel)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def run(self) -> Plain:
        """The run."""
        return plain(self._call(self._stub.GetRun, apb.GetRunRequest()).run)

    def learners(self) -> list[Plain]:
        """All learners and observers, worst first."""
        found: list[Plain] = []
        token = ""
        while True:
            request = apb.ListLearnersRequest(page_size=PAGE_SIZE, page_token=token)
            answer = self._call(self._stub.ListLearners, request)
            found += [plain(learner) for learner in answer.learners]
            if not (token := answer.next_page_token):
                return found

    def rounds(self, limit: int) -> list[Plain]:
        """At most `limit` rounds, newest first."""
        found: list[Plain] = []
        token = ""
        while len(found) < limit:
            size = min(PAGE_SIZE, limit - len(found))
            answer = self._call(self._stub.ListRounds, apb.ListRoundsRequest(page_size=size, page_token=token))
            found += [plain(item) for item in answer.rounds]
            if not (token := answer.next_page_token):
                break
        return found

    def pause(self, reason: str) -> Plain:
        """Pauses; returns the run."""
        return plain(self._call(self._stub.PauseRun, apb.PauseRunRequest(reason=reason)).run)

    def resume(self) -> Plain:
        """Resumes; returns the run."""
        return plain(self._call(self._stub.ResumeRun, apb.ResumeRunRequest()).run)

    def finish(self, reason: str) -> Plain:
        """Finishes; returns the run."""
        return plain(self._call(self._stub.FinishRun, apb.FinishRunRequest(reason=reason)).run)

    def drain(self, learner: str, reason: str) -> Plain:
        """Lets a learner leave; returns it."""
        request = apb.DrainLearnerRequest(learner_id=learner, reason=reason)
        return plain(self._call(self._stub.DrainLearner, request).learner)

    def evict(self, learner: str, reason: str) -> None:
        """Puts a learner out until it is readmitted."""
        self._call(self._stub.EvictLearner, apb.EvictLearnerRequest(learner_id=learner, reason=reason))

    def export(self, checkpoint: str) -> Plain:
        """Has the model written; returns path, size and global step."""
        return plain(self._call(self._stub.ExportModel, apb.ExportModelRequest(checkpoint_id=checkpoint), LONG_SECONDS))

    def readmit(self, learner: str) -> None:
        """Lets an evicted learner join again."""
        self._call(self._stub.ReadmitLearner, apb.ReadmitLearnerRequest(learner_id=learner))

    def create_checkpoint(self, checkpoint: str, reason: str) -> Plain:
        """Keeps the run as it is; waits until it is kept."""
        request = apb.CreateCheckpointRequest(checkpoint_id=checkpoint, reason=reason)
        return plain(self._call(self._stub.CreateCheckpoint, request, LONG_SECONDS).checkpoint)

    def checkpoint(self, checkpoint: str) -> Plain:
        """One checkpoint."""
        return plain(
            self._call(self._stub.GetCheckpoint, apb.GetCheckpointRequest(checkpoint_id=checkpoint)).checkpoint
        )

    def checkpoints(self) -> tuple[list[Plain], list[str]]:
        """All checkpoints, newest first, and in words what cannot be read."""
        found: list[Plain] = []
        token = ""
        while True:
            request = apb.ListCheckpointsRequest(page_size=PAGE_SIZE, page_token=token)
            answer = self._call(self._stub.ListCheckpoints, request)
            found += [plain(item) for item in answer.checkpoints]
            if not (token := answer.next_page_token):
                return found, list(answer.unreadable)

    def delete_checkpoint(self, checkpoint: str) -> None:
        """Removes a checkpoint for good."""
        self._call(self._stub.DeleteCheckpoint, apb.DeleteCheckpointRequest(checkpoint_id=checkpoint), LONG_SECONDS)

    def roll_back(self, checkpoint: str, reason: str) -> Plain:
        """Takes the run back; waits until it goes on from there, and returns it."""
        request = apb.RollBackRunRequest(checkpoint_id=checkpoint, reason=reason)
        return plain(self._call(self._stub.RollBackRun, request, LONG_SECONDS).run)

    def _call(self, method: Callable[..., Any], request: Message, seconds_min: float = 0.0) -> Any:
        """One call.

        Args:
            method: Which one.
            request: What is asked.
            seconds_min: Waits at least so long for the answer, whatever the settings say.

        Raises:
            PeerError: The syncer refused.
            UnreachableError: No answer came.
            TransportError: No answer came because of TLS.
        """
        try:
            return method(request, timeout=max(self._timeout_seconds, seconds_min))
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            if isinstance(failure, UnreachableError) and (words := self._transport_problem(failure.text)):
                raise TransportError(words) from error
            raise failure from error

    def _transport_problem(self, text: str) -> str | None:
        """Why TLS is the reason that a call failed with this text, or None if it is not."""
        settings = self._settings
        spoken = speaks_tls(parse_address(settings.address), self._timeout_seconds)
        if spoken is None or not (spoken or settings.uses_tls):
            return None
        if not settings.uses_tls:
            return (
                f"{settings.address} speaks TLS and this call was plaintext: give --tls-ca FILE with the authority "
                "that signed the syncer's certificate (or --tls-system-roots)"
            )
        if not spoken:
            return (
                f"{settings.address} speaks plaintext and this call was TLS: leave out --tls-ca and --tls-system-roots"
                " (off loopback --insecure is needed then), or give the syncer a certificate"
            )
        if settings.tls_certificate is None and "CERTIFICATE_VERIFY_FAILED" not in text and "Hostname" not in text:
            return (
                f"{settings.address} speaks TLS but closed the connection: it may want a certificate of this end; "
                f"give --tls-certificate FILE and --tls-key FILE ({text})"
            )
        return f"{settings.address} speaks TLS, but no connection came about: {text}"
