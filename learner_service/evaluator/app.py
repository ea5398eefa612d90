"""The composition root of the evaluator: follows the run, evaluates, reports, leaves after the end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp

from decoupled_diloco.arrays.fragments import assemble
from decoupled_diloco.arrays.tree import Params
from decoupled_diloco.command_line import software_version
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.core.ids import Role
from decoupled_diloco.runtime.channel import Backoff
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.runtime.rate_limit import RateLimit, TransferLimits
from decoupled_diloco.runtime.telemetry import Telemetry
from learner_service.app import OPERATOR_REASONS, cut, join_request_of, opener_of, workload_of
from learner_service.config import EvaluatorDocument
from learner_service.connection import Connection
from learner_service.evaluator.follower import Follower, Published
from learner_service.jax_setup import set_up_jax
from learner_service.metrics import served
from learner_service.step import InnerStep
from learner_service.workload import Workload

log = get_logger(__name__)

FAREWELL_SECONDS = 5.0
"""How long the last report and the goodbye may take."""
NICENESS = 10
"""Once it is started, the evaluator waits for learners that share its processors, never the other way round."""


class Evaluation:
    """Turns versions into figures.

    Args:
        workload: whose `evaluate` is called.
        seed: of the run; only shapes and untrained leaves follow from it.
        fragment_count: P.

    Raises:
        ConfigError: the model cannot be cut into so many fragments.
    """

    def __init__(self, workload: Workload, seed: int, fragment_count: int) -> None:
        self._workload = workload
        self._step = InnerStep(workload)
        self._template: Params = workload.init(seed)
        self.tree, self.fragmentation = cut(self._template, workload.merge_rule, fragment_count)

    def figures(self, published: Published) -> dict[str, float]:
        """Figures of the run's parameters Theta themselves. Takes as long as the workload does."""
        tensors = assemble(self.fragmentation, published.values)
        specs = self.tree.schema.by_name
        leaves = {name: jnp.asarray(tensor, specs[name].dtype) for name, tensor in tensors.items()}
        return self._workload.evaluate(self._step.place(self.tree.replace(self._template, leaves)))


class EvaluatorMetrics:
    """What the evaluator counts."""

    def __init__(self, version: str) -> None:
        self.telemetry = telemetry = Telemetry("decoupled_diloco_evaluator", version)
        self.evaluations = telemetry.counter("evaluations", "Evaluations made.")
        self.global_step = telemetry.gauge("global_step", "Global step of the newest evaluation.")
        self.seconds = telemetry.gauge("evaluation_seconds", "Duration of the newest evaluation.")
        self.figures = telemetry.labelled_gauge("figure", "Figures of the newest evaluation by name.", "name")
        self.downloaded_bytes = telemetry.gauge("downloaded_bytes", "Bytes of fragments received.")


class Evaluator:
    """Evaluates at intervals of global steps, and once more at the end.

    Args:
        follower: where versions come from.
        evaluation: what is done with them.
        interval_steps: global steps between two evaluations, at least.
        output_file: gets one JSON object a line; None: nothing is written.
        metrics: the evaluator's.
    """

    def __init__(
        self,
        follower: Follower,
        evaluation: Evaluation,
        interval_steps: int,
        output_file: Path | None,
        metrics: EvaluatorMetrics,
    ) -> None:
        self._follower = follower
        self._evaluation = evaluation
        self._interval_steps = interval_steps
        self._output_file = output_file
        self._metrics = metrics
        self._evaluated: Published | None = None
        # Beside the event loop, so that heartbeats go on.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="evaluate")

    async def run(self) -> None:
        """Until the final parameters of the run have been evaluated."""
        while True:
            await self._follower.wait_until(self._is_due)
            published = self._follower.published()
            is_news = self._evaluated is None or published.versions != self._evaluated.versions
            if self._follower.is_empty or not is_news:
                return
            await self._evaluate(published)

    def _is_due(self, follower: Follower) -> bool:
        """With the end of the run every last version is waited for; before it, what is here will do."""
        if follower.end is not None:
            return follower.is_empty or follower.is_up_to_date
        if not follower.is_complete:
            return False
        return self._evaluated is None or follower.global_step >= self._evaluated.global_step + self._interval_steps

    async def _evaluate(self, published: Published) -> None:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        figures = await loop.run_in_executor(self._executor, self._evaluation.figures, published)
        seconds = time.monotonic() - began
        self._evaluated = published
        self._metrics.evaluations.inc()
        self._metrics.global_step.set(published.global_step)
        self._metrics.seconds.set(seconds)
        self._metrics.downloaded_bytes.set(self._follower.downloaded_bytes)
        for name, value in figures.items():
            self._metrics.figures.labels(name=name).set(value)
        log.info("evaluated", global_step=published.global_step, seconds=round(seconds, 3), **figures)
        if self._output_file is not None:
            line = {"global_step": published.global_step, **figures, "seconds": seconds}
            try:
                await loop.run_in_executor(None, _append, self._output_file, json.dumps(line))
            except OSError as error:
                raise _cannot_write("output_file", self._output_file, error) from None
        self._follower.send(published.global_step, figures)


def _append(path: Path, line: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _cannot_write(setting: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f'evaluator.{setting} = "{path}": cannot be written ({error.strerror or error}); give a path that this process '
        "may write to, on a file system with room"
    )


async def serve(document: EvaluatorDocument, stop: StopRequest) -> int:
    """Follows the run until it has ended, or until the process is asked to stop.

    Raises:
        ConfigError, WorkloadError, PeerError: what the operator has to change.
    """
    settings = document.evaluator
    set_up_jax(settings.cache_path, settings.platform, "evaluator")
    workload = workload_of(document, settings.cache_path, settings.workload_options)
    if settings.assets_dir is not None:
        try:
            settings.assets_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write("assets_dir", settings.assets_dir, error) from None
        workload.export_assets(settings.assets_dir)
    evaluation = Evaluation(workload, document.run.seed, document.fragments.count)
    join = join_request_of(document, settings.evaluator_id, Role.OBSERVER, evaluation.tree, workload.fingerprint())
    metrics = EvaluatorMetrics(software_version())
    transfer = ThreadPoolExecutor(1, thread_name_prefix="transfer")
    limits = TransferLimits(download=RateLimit(settings.download_bytes_per_second_max))
    follower = Follower(join, evaluation.fragmentation, lambda: connection.channels, transfer, limits)
    connection = Connection(
        [parse_address(text) for text in settings.syncer],
        opener_of(settings, "evaluator"),
        follower,
        Backoff(random.Random()),
        log,
    )
    evaluator = Evaluator(follower, evaluation, settings.interval_steps, settings.output_file, metrics)
    os.nice(NICENESS)
    with served(metrics.telemetry, settings.http_listen, "evaluator.http_listen"):
        return await _until_end(connection, follower, evaluator, stop)


async def _until_end(connection: Connection, follower: Follower, evaluator: Evaluator, stop: StopRequest) -> int:
    connecting = asyncio.create_task(connection.run())
    evaluating = asyncio.create_task(evaluator.run())
    stopping = asyncio.create_task(stop.wait_async())
    reason = "the evaluator stops"
    try:
        await asyncio.wait((connecting, evaluating, stopping), return_when=asyncio.FIRST_COMPLETED)
        for task in (evaluating, connecting):
            if task.done():
                task.result()
        reason = stop.reason or "the run has finished"
        if evaluating.done():
            async with asyncio.timeout(FAREWELL_SECONDS):
                await follower.flushed()
    except PeerError as error:
        return _refused(error)
    except TimeoutError:
        log.warning("last_evaluation_not_sent", reason="the syncer is not there any more")
    except Exception as error:
        reason = f"the evaluator stops after a {type(error).__name__}"
        raise
    finally:
        follower.close()
        for task in (connecting, evaluating, stopping):
            task.cancel()
        await asyncio.gather(connecting, evaluating, stopping, return_exceptions=True)
        await _leave(connection, follower, reason)
        await connection.close()
    log.info("stopped", reason=reason)
    return ExitCode.OK


async def _leave(connection: Connection, follower: Follower, reason: str) -> None:
    if follower.joined is None:
        return
    try:
        async with asyncio.timeout(FAREWELL_SECONDS):
            deadlines = follower.joined.policy.deadlines
            await connection.client().leave(follower.joined.incarnation, reason, deadlines)
    except (PeerError, UnreachableError, TimeoutError) as error:
        log.info("left_without_an_answer", reason=str(error) or "no answer in time")


def _refused(error: PeerError) -> int:
    if error.reason is Reason.RUN_FINISHED:
        log.info("stopped", reason=error.text)
        return ExitCode.OK
    if error.reason in OPERATOR_REASONS:
        raise ConfigError(error.explanation()) from error
    raise error
