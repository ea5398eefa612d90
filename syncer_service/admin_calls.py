"""What the operators' calls share: pages, reasons, refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NoReturn, TypeVar

from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.wire import status

PAGE_SIZE_MAX: Final = 1000

REASON_CHARACTERS_MAX: Final = 500
"""Longest reason that an operator may give."""

Context = Any  # grpc.aio.ServicerContext
ItemT = TypeVar("ItemT")

log = get_logger(__name__)


def page_size(wanted: int, default: int) -> int:
    """How many items are wanted.

    Raises:
        PeerError: INVALID_FIELD.
    """
    if not 0 <= wanted <= PAGE_SIZE_MAX:
        raise PeerError(Reason.INVALID_FIELD, f"page_size = {wanted}: must be 1 to {PAGE_SIZE_MAX}, or 0 for {default}")
    return wanted or default


def page_start(token: str) -> int:
    """Where a page begins.

    Raises:
        PeerError: INVALID_FIELD.
    """
    if token and not (token.isascii() and token.isdigit() and len(token) < 19):
        raise PeerError(Reason.INVALID_FIELD, f"page_token = {token!r}: must be one that an earlier answer gave")
    return int(token or 0)


def page(items: Sequence[ItemT], start: int, size: int) -> tuple[Sequence[ItemT], str]:
    """A page, and the token of the next one; empty after the last."""
    end = start + size
    return items[start:end], str(end) if end < len(items) else ""


async def refuse(context: Context, failure: Exception, call: str) -> NoReturn:
    """Ends a call with what failed; only a fault of the program is logged with its traceback."""
    if status.connection_broke(failure):
        log.debug("call_ended", call=call, reason=status.CONNECTION_BROKE)
        await status.abort(context, failure)
    error = status.error_of(failure)
    if error is failure and error.reason is Reason.INTERNAL:
        log.error("call_failed", call=call, reason=error.text)
    elif error.reason is Reason.INTERNAL:
        log.error("call_failed", call=call, exc_info=failure)
    await status.abort(context, error)
