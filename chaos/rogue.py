"""`python -m chaos.rogue MODE`: a participant that speaks the protocol and breaks its manners, for the syncer to bear.

    duplicate   sends every contribution twice at once, and once more after the answer; it is merged once
    nan         its contributions hold a NaN; all are refused, and the run is none the worse
    huge        its contributions hold 1e38, beyond what can be merged

It joins as a learner of the run's model, follows the syncer's asks, keeps a journal, and leaves on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.core import learner_effects as le
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.core.learner_events import Ended
from decoupled_diloco.run_file import resolve_run
from learner_service.app import cut, workload_of
from learner_service.config import LearnerDocument
from learner_service.journal import Journal
from learner_service.syncer_client import Joined
from tests.integration.protocol_learner import ProtocolLearner, Script

MODES = ("duplicate", "nan", "huge")
GENERATION = 1
STEP_SECONDS = 0.15


class Rogue(ProtocolLearner):
    """A protocol learner with a journal, and with bad manners."""

    mode = "duplicate"
    journal = Journal()
    told_step = 0

    async def _join(self) -> None:
        await super()._join()
        joined = self.link.joined
        assert joined is not None
        self.journal.joined(
            GENERATION,
            Joined("", joined.incarnation, self.policy, (), joined.slot, joined.cursor, 0, False, True),
        )

    def _carry_out(self, boundary: le.Boundary) -> None:
        if self.machine.local_step > self.told_step:
            self.told_step = self.machine.local_step
            self.journal.step(GENERATION, self.told_step, self.machine.cursor, self.script.tokens_per_step)
        super()._carry_out(boundary)
        for apply in boundary.applies:
            values = self.base[apply.fragment]
            self.journal.applied(GENERATION, apply, values, self.machine.local_step, self.machine.token_count)

    async def _upload(self, upload: le.Upload, delta: np.ndarray[Any, Any]) -> None:
        self.journal.contribution(GENERATION, upload.round, upload.copy)
        delta = delta * np.float32(1e-4)  # training shall go on undisturbed
        if self.mode == "nan":
            delta[delta.size // 2] = np.nan
        elif self.mode == "huge":
            delta[:] = np.float32(1e38)
        if self.mode == "duplicate":
            await asyncio.gather(super()._upload(upload, delta), super()._upload(upload, delta))
        await super()._upload(upload, delta)
        fate = self.fates.get(upload.round)
        self.journal.fate(GENERATION, upload.round, upload.copy.fragment, fate if fate is not None else "unanswered")
        if fate is Fate.NONFINITE and self.mode == "duplicate":
            raise AssertionError("a small finite contribution was refused as not finite")


async def _run(options: argparse.Namespace, document: LearnerDocument, schema: Schema) -> Rogue:
    script = Script(step_seconds=STEP_SECONDS)
    rogue = Rogue(options.syncer, options.learner_id, document.to_policy(), script, schema=schema)
    rogue.mode, rogue.journal = options.mode, Journal(options.journal, options.learner_id)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    running = asyncio.create_task(rogue.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not running.done():
        rogue._handle(Ended("told to go"))
    with contextlib.suppress(PeerError, UnreachableError, grpc.RpcError):  # the syncer may be gone itself
        await running
    rogue.journal.close()
    return rogue


def main(arguments: list[str]) -> int:
    """Misbehaves until it is told to go; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chaos.rogue", description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--run-file", type=Path, required=True)
    parser.add_argument("--learner-id", required=True)
    parser.add_argument("--syncer", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    options = parser.parse_args(arguments)
    document = resolve_run(LearnerDocument, run_file=options.run_file).value
    workload = workload_of(document, Path("unused"), {})
    tree, _ = cut(workload.init(document.run.seed), workload.merge_rule, document.fragments.count)
    rogue = asyncio.run(_run(options, document, tree.schema))
    print(f"{options.mode}: {rogue.fates}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
