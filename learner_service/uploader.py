"""Sends contributions and initial parameters, however often the stream breaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from structlog.stdlib import BoundLogger

from decoupled_diloco.arrays.encoding import Encoded, FloatVector, encoding_named
from decoupled_diloco.arrays.merge import examine
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.channel import Backoff
from learner_service.bulk_client import BulkClient, Moved
from learner_service.error_feedback import ErrorFeedback, dropped_by
from learner_service.handed_over import UploadJob


class NotFiniteError(Exception):
    """A contribution that this learner refuses to send; the text says why."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sends, and how the run wants it written.

    Attributes:
        learner: the learner's id.
        incarnation: of this start.
        encoding: of contributions.
        feeds_errors_back: whether what the encoding drops of a contribution is sent with the next one.
    """

    learner: str
    incarnation: int
    encoding: str
    feeds_errors_back: bool = False


class Uploader:
    """Uploads of one incarnation.

    Args:
        client: the calls over the present bulk connection; asked again for each attempt.
        sender: whose they are.
        executor: for what takes CPU time.
        moved: told about payload bytes.
        source: randomness for the waits between attempts.
        logger: where broken transfers are told.
    """

    def __init__(
        self,
        client: Callable[[], BulkClient],
        sender: Sender,
        executor: Executor,
        moved: Moved,
        source: random.Random,
        logger: BoundLogger,
    ) -> None:
        self._client = client
        self._sender = sender
        self._executor = executor
        self._moved = moved
        self._source = source
        self._log = logger
        drops = sender.feeds_errors_back and not encoding_named(sender.encoding).is_exact
        self._feedback = ErrorFeedback() if drops else None

    async def contribute(self, job: UploadJob) -> Fate:
        """Sends one contribution until the syncer has given its terminal answer; cancelled when the round ends.

        Raises:
            NotFiniteError: NaN, Inf, or a norm beyond what may be merged; nothing was sent.
        """
        encoding = self._sender.encoding
        payload = await self._payload(job, encoding)
        sender = self._sender
        header = job.slot.copy.header(sender.learner, sender.incarnation, job.round, len(payload))
        backoff = Backoff(self._source)
        resume = False
        while True:
            failpoints.hit("contribution.before_send")
            try:
                fate = await self._client().upload(header, payload, encoding=encoding, resume=resume, moved=self._moved)
            except (PeerError, UnreachableError) as error:
                wait = error.retry_seconds or 0.0 if isinstance(error, PeerError) else 0.0
                reason = str(error)
            else:
                if fate.is_terminal:
                    return fate
                wait, reason = 0.0, f"the syncer answered {fate}"
            resume = True
            tell = self._log.info if backoff.attempt_count == 0 else self._log.debug
            tell("upload_broken", round=job.round, fragment=header.fragment, reason=reason)
            await asyncio.sleep(backoff.next_seconds(wait))

    def round_closed(self, round_number: int, fragment: int, is_merged: bool) -> None:
        """A round has ended; `is_merged`: it was committed with a contribution of this learner."""
        if self._feedback is not None:
            self._feedback.settle(round_number, fragment, is_merged)

    def forget_errors(self) -> None:
        """The parameters are taken anew from the run: what was dropped of their steps is worth nothing."""
        if self._feedback is not None:
            self._feedback.forget()

    async def send_initial(self, fragment: int, values: FloatVector) -> bool:
        """Sends one fragment of the initial parameters; False if the syncer does not want them (any more)."""
        backoff = Backoff(self._source)
        while True:
            wait = 0.0
            try:
                await self._client().upload_initial(fragment, values, self._moved)
                return True
            except PeerError as error:
                if error.reason is Reason.WRONG_STATE:
                    return False
                wait, reason = error.retry_seconds or 0.0, str(error)
            except UnreachableError as error:
                reason = str(error)
            tell = self._log.info if backoff.attempt_count == 0 else self._log.debug
            tell("initial_upload_broken", fragment=fragment, reason=reason)
            await asyncio.sleep(backoff.next_seconds(wait))

    async def _payload(self, job: UploadJob, encoding: str) -> memoryview:
        loop, fragment, feedback = asyncio.get_running_loop(), job.slot.copy.fragment, self._feedback
        if feedback is None:
            return await loop.run_in_executor(self._executor, encoded_delta, job, encoding)
        carried = feedback.carried(job.round, fragment)
        payload, dropped = await loop.run_in_executor(self._executor, compensated_delta, job, encoding, carried)
        feedback.sent(job.round, fragment, dropped)
        return payload


def encoded_delta(job: UploadJob, encoding: str) -> memoryview:
    """The delta theta - Theta_base as it goes on the wire. Waits for the device and takes CPU time.

    Raises:
        NotFiniteError: by the rule that the syncer examines contributions with.
    """
    return _checked_payload(_delta(job, None), encoding)


def compensated_delta(job: UploadJob, encoding: str, carried: FloatVector | None) -> tuple[memoryview, FloatVector]:
    """The same with error feedback: the delta and `carried` as they go on the wire, and what the encoding dropped.

    Args:
        job: what to send.
        encoding: how to write it.
        carried: what encodings dropped of earlier contributions to this fragment; None: nothing. Only read.

    Raises:
        NotFiniteError: as for `encoded_delta`.
    """
    delta = _delta(job, carried)
    payload = _checked_payload(delta, encoding)
    return payload, dropped_by(encoding, payload, delta)


def _delta(job: UploadJob, carried: FloatVector | None) -> FloatVector:
    delta = job.slot.arrays().to_host()
    with np.errstate(all="ignore"):  # what is not finite is found in the payload
        np.subtract(delta, job.base, out=delta)
        if carried is not None:
            delta += carried
    return delta


def _checked_payload(delta: FloatVector, encoding: str) -> memoryview:
    with np.errstate(all="ignore"):
        payload = encoding_named(encoding).encode(delta)
    problem = examine(Encoded(payload, encoding, delta.size)).problem
    if problem is not None:
        raise NotFiniteError(problem)
    return payload
