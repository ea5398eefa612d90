"""Errors as gRPC statuses and back: one catalogue of reasons and codes.

Every refusal is a google.rpc.Status with one ErrorInfo (domain `ERROR_DOMAIN`, reason a name of ErrorReason)
and, where the caller is told when to come back, a RetryInfo. Statuses travel in trailing metadata, of which
gRPC takes 8 KiB, so all text is cut to fit.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Iterable, Mapping
from typing import Final, NoReturn, Protocol, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from decoupled_diloco.core.effects import Refusal
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.wire.enums import CodecError
from decoupled_diloco.wire.stream import CorruptPayloadError

ERROR_DOMAIN: Final = "decoupled-diloco"
REASON_PREFIX: Final = "ERROR_REASON_"
DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailing metadata that carries the google.rpc.Status, by gRPC's convention."""

MESSAGE_BYTES_MAX: Final = 1500
"""Longest message in its percent-encoded form."""
METADATA_BYTES_MAX: Final = 2500
"""Most bytes of all metadata names and values together."""
CONNECTION_BROKE: Final = "the connection broke"
"""Why a call ended that its caller, or the network, has cut off."""

RETRY_SECONDS_DEFAULT: Final = 1.0
"""What a caller that met a limit is told, where the error itself does not say."""

CODES: Final[Mapping[Reason, grpc.StatusCode]] = {
    Reason.PROTOCOL_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.RUN_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.CONFIG_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.SCHEMA_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.TOO_MANY_LEARNERS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RUN_FINISHED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Reason.STALE_INCARNATION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_JOINED: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Reason.SUPERSEDED: grpc.StatusCode.NOT_FOUND,
    Reason.CORRUPT: grpc.StatusCode.DATA_LOSS,
    Reason.TRANSFER_IDLE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    Reason.EVICTED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.WRONG_STATE: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.UNIMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}

_TLS_HINTS: Final = (
    ("WRONG_VERSION_NUMBER", "this end speaks TLS, the other one plaintext"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not signed by the authorities given here"),
    ("Hostname Verification Check failed", "the server's certificate is for another name"),
    ("BAD_CERTIFICATE", "the server does not accept this end's certificate"),
    ("CERTIFICATE_REQUIRED", "the server wants a certificate of this end"),
)

_CLOSED: Final = "Socket closed"
_ESTABLISHED: Final = "Stream removed"
"""What gRPC says of a call whose connection had been up."""


class AsyncContext(Protocol):
    """The part of grpc.aio.ServicerContext that is used here."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, bytes], ...] = ()
    ) -> NoReturn:
        """Ends the call."""


def error_of(failure: BaseException | Refusal) -> PeerError:
    """What a servicer answers for a failure: the caller's faults by name, all else INTERNAL."""
    if isinstance(failure, PeerError):
        return failure
    if isinstance(failure, Refusal):
        return PeerError(Reason(failure.reason.removeprefix(REASON_PREFIX)), failure.text)
    if isinstance(failure, CodecError):
        return PeerError(Reason.INVALID_FIELD, str(failure))
    if isinstance(failure, CorruptPayloadError):
        return PeerError(Reason.CORRUPT, str(failure))
    if isinstance(failure, NotImplementedError):
        return PeerError(Reason.UNIMPLEMENTED, str(failure) or "this release does not have it")
    return PeerError(Reason.INTERNAL, f"{type(failure).__name__}; the log of the called process has the story")


def connection_broke(failure: BaseException) -> bool:
    """Whether a call failed because there is nobody at the other end any more, or its server has stopped.

    gRPC cancels the handler of such a call; should the handler be reading or writing just then, that fails first.
    """
    stopped = isinstance(failure, grpc.aio.BaseError)
    return stopped and not isinstance(failure, grpc.aio.UsageError | grpc.aio.AbortError)


def to_status(error: PeerError) -> status_pb2.Status:
    """The google.rpc.Status of a refusal."""
    message = _cut(error.text, MESSAGE_BYTES_MAX)
    info = error_details_pb2.ErrorInfo(
        reason=REASON_PREFIX + error.reason,
        domain=ERROR_DOMAIN,
        metadata=_fitting(error.metadata),
    )
    details = [_packed(info)]
    seconds = error.retry_seconds
    if seconds is None and CODES[error.reason] is grpc.StatusCode.RESOURCE_EXHAUSTED:
        seconds = RETRY_SECONDS_DEFAULT
    if seconds is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(seconds * 1e9))
        details.append(_packed(retry))
    return status_pb2.Status(code=CODES[error.reason].value[0], message=message, details=details)


async def abort(context: AsyncContext, failure: BaseException | Refusal) -> NoReturn:
    """Ends a call of an asyncio servicer with the status of a failure.

    Raises:
        CancelledError: There is nobody to tell; so does gRPC end the handler of a call whose caller is gone.
    """
    if not isinstance(failure, Refusal) and connection_broke(failure):
        raise asyncio.CancelledError(CONNECTION_BROKE) from failure
    error = error_of(failure)
    status = to_status(error)
    trailing = ((DETAILS_KEY, status.SerializeToString()),)
    try:
        await context.abort(CODES[error.reason], status.message, trailing)
    except grpc.aio.InternalError as broken:
        raise asyncio.CancelledError(CONNECTION_BROKE) from broken


def from_status(status: status_pb2.Status) -> PeerError | None:
    """The refusal in a status; None if it is not ours, or of a release with other reasons."""
    reason: Reason | None = None
    metadata: dict[str, str] = {}
    retry_seconds: float | None = None
    for detail in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            reason = _known_reason(info.reason)
            metadata = dict(info.metadata)
        elif detail.Unpack(retry):
            retry_seconds = retry.retry_delay.ToNanoseconds() / 1e9
    return PeerError(reason, status.message, metadata, retry_seconds) if reason is not None else None


def from_rpc_error(error: grpc.RpcError) -> PeerError | UnreachableError:
    """What a failed call means at the caller, for grpc and grpc.aio alike."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return UnreachableError("UNKNOWN", str(error))
    code, text = error.code(), error.details()
    trailing = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                refusal = from_status(status_pb2.Status.FromString(value))
            except DecodeError:
                continue
            if refusal is not None:
                return refusal
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return PeerError(Reason.UNIMPLEMENTED, f"the other end does not know this call: {text}")
    name = code.name if code is not None else "UNKNOWN"
    return UnreachableError(name, _with_hint(text or "no details"))


def is_tls_fault(error: PeerError | UnreachableError) -> bool:
    """Whether two ends surely do not meet because of their TLS settings, as the failed call shows.

    One that is closed at once proves nothing: a tunnel or load balancer does the same while the server is away.
    """
    return isinstance(error, UnreachableError) and any(sign in error.text for sign, _ in _TLS_HINTS)


def _with_hint(text: str) -> str:
    hint = next((words for sign, words in _TLS_HINTS if sign in text), None)
    if hint is None and _CLOSED in text and _ESTABLISHED not in text:
        hint = (
            "the connection was closed at once; perhaps the other end speaks TLS and this one plaintext, or "
            "something in between takes connections for a server that is away"
        )
    return f"{text} ({hint})" if hint else text


def _known_reason(name: str) -> Reason | None:
    try:
        return Reason(name.removeprefix(REASON_PREFIX))
    except ValueError:
        return None


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _cut(text: str, bytes_max: int) -> str:
    """The start of a text whose percent-encoded form fits."""
    if len(urllib.parse.quote(text)) <= bytes_max:
        return text
    kept: list[str] = []
    size = len(urllib.parse.quote("..."))
    for character in text:
        size += len(urllib.parse.quote(character))
        if size > bytes_max:
            break
        kept.append(character)
    return "".join(kept) + "..."


def _fitting(metadata: Mapping[str, str]) -> dict[str, str]:
    """As many metadata entries, in order of their names, as fit; the rest are counted under "left-out"."""
    fitting: dict[str, str] = {}
    size = 32  # for "left-out" itself
    left_out = 0
    for name, value in sorted(metadata.items()):
        size += len(name.encode()) + len(value.encode())
        if size > METADATA_BYTES_MAX:
            left_out += 1
        else:
            fitting[name] = value
    if left_out:
        fitting["left-out"] = str(left_out)
    return fitting
