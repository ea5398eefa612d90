"""`decoupled-diloco-evaluator`: reads the command line and the environment, evaluates, ends with its exit code.

The exit codes are those of `learner_service.__main__`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from decoupled_diloco.command_line import run_program
from decoupled_diloco.runtime.config import Resolved
from decoupled_diloco.runtime.lifecycle import SignalWatch, StopRequest
from decoupled_diloco.runtime.logs import configure_logs, get_logger
from decoupled_diloco.runtime.malloc import tune_malloc
from learner_service.config import EVALUATOR_PROGRAM, EvaluatorDocument
from learner_service.workload import WorkloadError

STOP_SECONDS_MAX: Final = 15.0
"""A stop that takes longer is forced."""


def main() -> int:
    """Runs the program."""
    return run_program(EVALUATOR_PROGRAM, sys.argv[1:], os.environ, _serve, operator_errors=(WorkloadError,))


def _serve(resolved: Resolved[EvaluatorDocument]) -> int:
    settings = resolved.value.evaluator
    context = {"service": "evaluator", "evaluator": settings.evaluator_id}
    configure_logs(settings.log_level, settings.log_format, settings.log_levels, context=context)
    log = get_logger("learner_service.evaluator")
    for warning in resolved.warnings:
        log.warning("settings_doubtful", reason=warning)
    tune_malloc()
    from learner_service.evaluator.app import serve  # only now: JAX takes its time, and --help does not need it

    stop = StopRequest()
    with SignalWatch(stop, log, STOP_SECONDS_MAX):
        return asyncio.run(serve(resolved.value, stop))


if __name__ == "__main__":
    sys.exit(main())
