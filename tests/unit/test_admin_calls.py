"""What an operator's call that fails leaves in the log: a traceback only where the program is at fault."""

import pytest
import structlog

from decoupled_diloco.core.errors import PeerError, Reason
from syncer_service.admin_calls import refuse


class AbortedError(Exception):
    pass


class Call:
    """The end of a call, as far as it matters here."""

    async def abort(self, code, details="", trailing_metadata=()):
        raise AbortedError(details)


async def logged(failure):
    with structlog.testing.capture_logs() as events, pytest.raises(AbortedError):
        await refuse(Call(), failure, "CreateCheckpoint")
    return events


async def test_what_the_surroundings_refuse_is_said_without_a_traceback():
    (event,) = await logged(PeerError(Reason.INTERNAL, "the bucket cannot be reached"))
    assert (event["event"], event["reason"]) == ("call_failed", "the bucket cannot be reached")
    assert "exc_info" not in event


async def test_a_fault_of_the_program_has_its_traceback():
    failure = KeyError("x")
    (event,) = await logged(failure)
    assert event["exc_info"] is failure


async def test_a_mistake_of_the_operator_is_no_fault():
    assert await logged(PeerError(Reason.NOT_FOUND, "there is no checkpoint 'x'")) == []
