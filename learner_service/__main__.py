"""`decoupled-diloco-learner`: reads the command line and the environment, trains, ends with its exit code.

0: the run has finished, or the learner was asked to stop. 1: a fault of this process. 2: settings, workload or model do
not fit (the message says which). 3: a newer process with the same learner id has taken over.
4: the syncer cannot be reached with these TLS settings. 5: the loss is not finite, however often it starts over.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

from decoupled_diloco.command_line import run_program
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.config import Resolved
from decoupled_diloco.runtime.lifecycle import SignalWatch, StopRequest
from decoupled_diloco.runtime.logs import configure_logs, get_logger
from decoupled_diloco.runtime.malloc import tune_malloc
from learner_service import STARTED_AT
from learner_service.config import LEARNER_PROGRAM, LearnerDocument
from learner_service.recoveries import DivergedError
from learner_service.workload import WorkloadError

STOP_MARGIN_SECONDS: Final = 10.0
"""A stop that takes longer than the drain and this is forced."""
SWITCH_SECONDS: Final = 0.0005
"""How soon the network thread lets the device thread run: neither does anything long in Python."""
OPERATOR_ERRORS: Final = (WorkloadError, DivergedError)
"""End as one paragraph."""
WARM: Final = "warm"
"""The command that prepares data and the compilation cache, and measures a step."""


def main() -> int:
    """Runs the program."""
    arguments = sys.argv[1:]
    if arguments[:1] == [WARM]:
        return run_program(LEARNER_PROGRAM, arguments[1:], os.environ, _warm, operator_errors=OPERATOR_ERRORS)
    return run_program(LEARNER_PROGRAM, arguments, os.environ, _serve, operator_errors=OPERATOR_ERRORS)


def _set_up(resolved: Resolved[LearnerDocument]) -> None:
    settings = resolved.value.learner
    context = {"service": "learner", "learner": settings.learner_id}
    configure_logs(settings.log_level, settings.log_format, settings.log_levels, context=context)
    for warning in resolved.warnings:
        get_logger("learner_service").warning("settings_doubtful", reason=warning)
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    tune_malloc()
    sys.setswitchinterval(SWITCH_SECONDS)


def _serve(resolved: Resolved[LearnerDocument]) -> int:
    _set_up(resolved)
    gc.disable()  # until all programs are there: what imports and tracing make is not garbage, looking costs 0.3 s
    from learner_service.app import serve  # only now: JAX takes its time, and --help does not need it

    stop = StopRequest()
    settings = resolved.value.learner
    with SignalWatch(stop, get_logger("learner_service"), settings.drain_seconds + STOP_MARGIN_SECONDS):
        return serve(resolved.value, STARTED_AT, stop)


def _warm(resolved: Resolved[LearnerDocument]) -> int:
    _set_up(resolved)
    from learner_service.app import warm

    return warm(resolved.value, sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
