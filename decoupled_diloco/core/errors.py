"""What goes wrong between two ends of a call: stable reasons, whose move it is, what the caller does next.

The wire form (gRPC status with ErrorInfo) is in `wire.status`; the operator's mistakes are
`runtime.config.ConfigError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a call was refused: the stable names of ErrorReason in error.proto, without the prefix."""

    PROTOCOL_MISMATCH = "PROTOCOL_MISMATCH"
    RUN_MISMATCH = "RUN_MISMATCH"
    CONFIG_MISMATCH = "CONFIG_MISMATCH"
    SCHEMA_MISMATCH = "SCHEMA_MISMATCH"
    INVALID_FIELD = "INVALID_FIELD"
    TOO_MANY_LEARNERS = "TOO_MANY_LEARNERS"
    OVERLOADED = "OVERLOADED"
    RUN_FINISHED = "RUN_FINISHED"
    NOT_READY = "NOT_READY"
    STALE_INCARNATION = "STALE_INCARNATION"
    NOT_JOINED = "NOT_JOINED"
    NOT_FOUND = "NOT_FOUND"
    SUPERSEDED = "SUPERSEDED"
    CORRUPT = "CORRUPT"
    TRANSFER_IDLE = "TRANSFER_IDLE"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    EVICTED = "EVICTED"
    WRONG_STATE = "WRONG_STATE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


class Blame(StrEnum):
    """Who has to change something so that the call succeeds."""

    CALLER = "caller"
    """The caller: its settings, its model, its release, or what it sent."""
    CALLED = "called"
    """The called end: it is full, starting, stopping or at fault."""
    NOBODY = "nobody"
    """Nobody: the two ends only saw things at different moments, or the network was in the way."""


class Recourse(StrEnum):
    """What the caller does next."""

    STOP = "stop"
    """Give up; the same call will never succeed."""
    RETRY = "retry"
    """Call again, after the time that the error names or with backoff."""
    JOIN_AGAIN = "join_again"
    """Join the run again, then go on."""
    CATCH_UP = "catch_up"
    """Ask for the newest version instead."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What follows from a reason."""

    blame: Blame
    recourse: Recourse


KINDS: Mapping[Reason, Kind] = {
    Reason.PROTOCOL_MISMATCH: Kind(Blame.CALLER, Recourse.STOP),
    Reason.RUN_MISMATCH: Kind(Blame.CALLER, Recourse.STOP),
    Reason.CONFIG_MISMATCH: Kind(Blame.CALLER, Recourse.STOP),
    Reason.SCHEMA_MISMATCH: Kind(Blame.CALLER, Recourse.STOP),
    Reason.INVALID_FIELD: Kind(Blame.CALLER, Recourse.STOP),
    Reason.TOO_MANY_LEARNERS: Kind(Blame.CALLED, Recourse.RETRY),
    Reason.OVERLOADED: Kind(Blame.CALLED, Recourse.RETRY),
    Reason.RUN_FINISHED: Kind(Blame.NOBODY, Recourse.STOP),
    Reason.NOT_READY: Kind(Blame.CALLED, Recourse.RETRY),
    Reason.STALE_INCARNATION: Kind(Blame.CALLER, Recourse.STOP),
    Reason.NOT_JOINED: Kind(Blame.NOBODY, Recourse.JOIN_AGAIN),
    Reason.NOT_FOUND: Kind(Blame.NOBODY, Recourse.CATCH_UP),
    Reason.SUPERSEDED: Kind(Blame.NOBODY, Recourse.CATCH_UP),
    Reason.CORRUPT: Kind(Blame.NOBODY, Recourse.RETRY),
    Reason.TRANSFER_IDLE: Kind(Blame.NOBODY, Recourse.RETRY),
    Reason.SHUTTING_DOWN: Kind(Blame.CALLED, Recourse.RETRY),
    Reason.EVICTED: Kind(Blame.CALLER, Recourse.STOP),
    Reason.WRONG_STATE: Kind(Blame.CALLER, Recourse.STOP),
    Reason.UNIMPLEMENTED: Kind(Blame.CALLER, Recourse.STOP),
    Reason.INTERNAL: Kind(Blame.CALLED, Recourse.RETRY),
}
"""The catalogue; complete by test."""


class DecoupledDilocoError(Exception):
    """Root of the errors of this package."""


class PeerError(DecoupledDilocoError):
    """A refused call, at either end: raised by the end that refuses, and again at the end that called.

    Attributes:
        reason: Stable, for programs to branch on.
        text: For people: names the value and what would be right.
        metadata: Further facts by name, for example the newest version.
        retry_seconds: How long to wait before the call is repeated; None: no advice.
    """

    def __init__(
        self,
        reason: Reason,
        text: str,
        metadata: Mapping[str, str] | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason = reason
        self.text = text
        self.metadata = dict(metadata or {})
        self.retry_seconds = retry_seconds

    @property
    def blame(self) -> Blame:
        """Who has to change something."""
        return KINDS[self.reason].blame

    @property
    def recourse(self) -> Recourse:
        """What the caller does next."""
        return KINDS[self.reason].recourse

    def explanation(self) -> str:
        """One paragraph for people, with the reason and the facts that the text may have had to leave out."""
        facts = "".join(f"\n  {name}: {value}" for name, value in sorted(self.metadata.items()))
        return f"{self.text} [{self.reason}]{facts}"


class UnreachableError(DecoupledDilocoError):
    """No answer of the other end came back; the call may or may not have arrived there. Repeat it.

    Attributes:
        code: Name of the gRPC status code, for example "UNAVAILABLE".
        text: For people.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
