"""`decoupled-diloco-syncer`: reads the command line and the environment, runs the syncer, ends with its exit code."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Final

from decoupled_diloco.command_line import run_program
from decoupled_diloco.run_file import no_file_hint
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.config import Resolved
from decoupled_diloco.runtime.lifecycle import SignalWatch, StopRequest
from decoupled_diloco.runtime.logs import configure_logs, get_logger
from decoupled_diloco.runtime.malloc import tune_malloc
from syncer_service.app import serve
from syncer_service.config import PROGRAM, SyncerDocument
from syncer_service.shell import ROUNDS_LOGGER

SWITCH_SECONDS: Final = 0.0005
"""How soon a busy thread lets another one run: a merge in Python code would otherwise starve the event loop."""


def main() -> int:
    """Runs the program."""
    return run_program(PROGRAM, sys.argv[1:], os.environ, _serve)


def _serve(resolved: Resolved[SyncerDocument]) -> int:
    settings = resolved.value.syncer
    configure_logs(
        settings.log_level,
        settings.log_format,
        settings.log_levels,
        context={"service": "syncer"},
        details=(ROUNDS_LOGGER,),
    )
    log = get_logger("syncer_service")
    for warning in resolved.warnings:
        log.warning("settings_doubtful", reason=warning)
    if hint := no_file_hint(resolved):
        log.info("no_run_file", run=resolved.value.run.id, reason=hint)
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    # Numba would load it where it is installed (JAX brings it), and no loop uses it: 15 MiB and 0.15 s.
    sys.modules.setdefault("scipy", None)  # type: ignore[arg-type]
    malloc = tune_malloc(one_arena=True)
    log.debug("malloc", tuned=malloc.is_applied, reason=malloc.reason)
    sys.setswitchinterval(SWITCH_SECONDS)
    stop = StopRequest()
    with SignalWatch(stop, log, 2 * settings.drain_seconds):
        return asyncio.run(serve(resolved.value, settings, stop))


if __name__ == "__main__":
    sys.exit(main())
