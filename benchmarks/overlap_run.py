"""One learner against a syncer process, beside a loop that synchronises nothing: the child program of `overlap`.

    python -m benchmarks.overlap_run JOB.json RESULT.json

Everything that a learner process has is real: `InnerLoop`, `Session`, `Handover`, `DeviceFragments`, the network thread
and the syncer. Only two things are put in between: a stopwatch around the calls of a boundary, and an end after so many
steps. Any JAX backend will do.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from decoupled_diloco.arrays.device import DeviceFragments, OpenParams
from decoupled_diloco.run_file import resolve_run
from decoupled_diloco.runtime.clock import MonotonicClock
from decoupled_diloco.runtime.config_layers import Layer, Setting
from decoupled_diloco.runtime.logs import default_logs
from decoupled_diloco.runtime.malloc import tune_malloc
from learner_service.__main__ import SWITCH_SECONDS
from learner_service.app import build_session, workload_of
from learner_service.config import LearnerDocument
from learner_service.inner_loop import InnerLoop, WarmUp
from learner_service.jax_setup import set_up_jax
from learner_service.losses import LossMeter
from learner_service.metrics import LearnerMetrics
from learner_service.session import Session
from learner_service.step import InnerStep
from learner_service.workload import Workload

LEARNER = "measured"
DEVICE_REPETITIONS = 20
"""Copies and applies that are timed to their end on the devices."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to measure.

    Attributes:
        run_file: of the run that the syncer serves.
        syncer: its address.
        cache: compiled programs and tokenised text.
        step_seconds: every step is padded to so long; 0: none is.
        warm_steps: steps of a block that are not measured.
        steps: steps of a block that are.
        repetitions: pairs of blocks, one with and one without a session.
    """

    run_file: str
    syncer: str
    cache: str
    step_seconds: float
    warm_steps: int
    steps: int
    repetitions: int


@dataclass(slots=True)
class Block:
    """Some steps of one kind; seconds are means over its measured steps.

    Attributes:
        period: from the end of a boundary to the end of the next.
        compute: from the begin of a step until its result is there.
        late: by how much the step came out of the padding too late.
        boundary: from there to the begin of the next step.
        items: what the boundary consists of, by name; `counts` says how many calls a step.
        upload: from a copy until the syncer's answer.
        network_wait: that the device thread waited for the network, in all.
        device_bytes: on the devices beside the parameters and the optimizer's state, at the end.
        parameter_bytes: of the parameters.
    """

    period: float
    compute: float
    late: float
    boundary: float
    items: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    upload: float = 0.0
    network_wait: float = 0.0
    device_bytes: int = 0
    parameter_bytes: int = 0


class Stopwatch:
    """Sums the seconds of calls by name, while it runs."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.is_on = False

    def watch(self, owner: object, method: str, name: str) -> None:
        """Puts itself around a method of one object."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = original(*arguments, **named)
            if self.is_on:
                self.seconds[name] += time.perf_counter() - began
                self.counts[name] += 1
            return result

        setattr(owner, method, timed)


class Observed:
    """A session that stops after so many steps and notes when they began and ended; without one: no synchronisation."""

    def __init__(self, session: Session | None, job: Job, watch: Stopwatch) -> None:
        self._session = session
        self._job = job
        self._watch = watch
        self._losses = LossMeter(lambda loss: None)
        self._cursor = 0
        self._made = 0
        self._began = self._computed = self._padded = 0.0
        self.spans: list[tuple[float, float, float, float]] = []
        """Of each measured step: begin, result, end of the padding, end of the boundary."""
        self.device_bytes = 0
        if session is not None:
            settle = session._losses.settle
            setattr(session._losses, "settle", lambda *given: settle(self._await(given[0]), *given[1:]))  # noqa: B010
        self.restart_optimizer = False

    @property
    def finished(self) -> bool:
        """Whether all steps were made."""
        return self._made >= self._job.warm_steps + self._job.steps or (
            self._session is not None and self._session.finished
        )

    @property
    def schedule_step(self) -> int:
        """As the session's."""
        return self._session.schedule_step if self._session is not None else self._made

    @property
    def slot(self) -> int:
        """As the session's."""
        return self._session.slot if self._session is not None else 0

    @property
    def cursor(self) -> int:
        """As the session's."""
        return self._session.cursor if self._session is not None else self._cursor

    @property
    def optimizer_recovered(self) -> bool:
        """As the session's."""
        return self._session.optimizer_recovered if self._session is not None else False

    @contextmanager
    def activity(self, activity: Any) -> Iterator[None]:
        """As the session's."""
        if self._session is None:
            yield
            return
        with self._session.activity(activity):
            yield

    def start(self, params: Any, *, optimizer_state: Any) -> Any:
        """As the session's."""
        if self._session is None:
            return params, optimizer_state
        return self._session.start(params, optimizer_state=optimizer_state)

    def step_under_way(self) -> None:
        """As the session's."""
        if self._session is not None:
            self._session.step_under_way()

    def _await(self, loss: jax.Array) -> jax.Array:
        """Waits for the step's result where the session does, and then until a step is as long as it shall be."""
        jax.block_until_ready(loss)
        self._computed = time.perf_counter()
        if (left := self._began + self._job.step_seconds - self._computed) > 0.0:
            time.sleep(left)
        self._padded = time.perf_counter()
        return loss

    def step_boundary(self, params: Any, *, tokens: int, loss: Any, optimizer_state: Any) -> Any:
        """As the session's, with the time taken."""
        if self._session is not None:
            params, optimizer_state = self._session.step_boundary(
                params, tokens=tokens, loss=loss, optimizer_state=optimizer_state
            )
            self.restart_optimizer = self._session.restart_optimizer
        else:
            self._losses.settle(self._await(loss))
            self._cursor += 1
        left = time.perf_counter()
        self._made += 1
        if self._watch.is_on:
            self.spans.append((self._began, self._computed, self._padded, left))
        if self._session is not None and self.finished:
            own = jax.tree.leaves((params, optimizer_state))
            self.device_bytes = _live_bytes() - sum(leaf.nbytes for leaf in own)
        self._watch.is_on = self._made >= self._job.warm_steps
        self._began = time.perf_counter()
        return params, optimizer_state


class Bench:
    """The workload of a job, and blocks of its steps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        settings = (
            Setting(("learner", "syncer"), job.syncer, "the benchmark", is_text=True),
            Setting(("learner", "learner_id"), LEARNER, "the benchmark", is_text=True),
            Setting(("learner", "cache_dir"), job.cache, "the benchmark", is_text=True),
        )
        run_file = Path(job.run_file)
        self.document = resolve_run(LearnerDocument, run_file=run_file, flags=Layer(settings)).value
        set_up_jax(self.document.learner.cache_path, "auto", "learner")
        self.workload: Workload = workload_of(self.document, self.document.learner.cache_path, {})
        self.step = InnerStep(self.workload)

    def params(self) -> Any:
        """Initial parameters, placed."""
        return self.step.place(self.workload.init(self.document.run.seed))

    def _loop(self, observed: Observed) -> InnerLoop:
        session: Any = observed
        return InnerLoop(self.workload, self.step, session, WarmUp(0), 0.0, MonotonicClock())

    def baseline(self) -> Block:
        """A block of steps without synchronisation."""
        watch = Stopwatch()
        observed = Observed(None, self.job, watch)
        params = self.params()
        state = self.step.fresh_state(params)
        self._loop(observed).run(params, state)
        return _block(observed, watch)

    def session(self) -> Block:
        """A block of steps of a learner in the run."""
        gc.unfreeze()  # what the session before it froze would stay for good
        gc.collect()
        before = _live_bytes()
        params = self.params()
        session, device = self.parts(params)
        watch = Stopwatch()
        observed = Observed(session, self.job, watch)
        _watch(watch, session, device)
        with session, _watched_boundaries(watch):
            loop = self._loop(observed)
            params = loop.run(*loop.prepare(params, device))
            block = _block(observed, watch)
            block.device_bytes = observed.device_bytes - before
            block.parameter_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            block.network_wait = session._handover.snapshot().progress.network_wait_seconds
        return block

    def parts(self, params: Any) -> tuple[Session, DeviceFragments]:
        """A session that is not entered yet."""
        clock = MonotonicClock()
        return build_session(
            self.document,
            params,
            self.workload.merge_rule,
            fingerprint=self.workload.fingerprint(),
            metrics=LearnerMetrics("benchmark"),
            clock=clock,
            started_at=clock.now(),
        )


def _live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@contextmanager
def _watched_boundaries(watch: Stopwatch) -> Iterator[None]:
    """Times what is done to the parameters of every boundary meanwhile, in whatever session."""
    names = {"copy": "copy", "copy_ahead": "copy_ahead", "overwrite": "apply", "_copy": "copied fragments"}
    kept = {method: getattr(OpenParams, method) for method in names}
    for method, name in names.items():
        watch.watch(OpenParams, method, name)
    try:
        yield
    finally:
        for method, original in kept.items():
            setattr(OpenParams, method, original)


def _watch(watch: Stopwatch, session: Session, device: DeviceFragments) -> None:
    """The calls that a boundary consists of."""
    handover = session._parts.handover
    for method in ("plan", "publish", "finish_step", "begin_step", "step_under_way"):
        watch.watch(handover, method, method)
    watch.watch(session._losses, "settle", "result")
    watch.watch(session, "_look_for_optimizer", "optimizer")
    watch.watch(device, "open", "check")
    observe = session._parts.metrics.observe_upload

    def uploaded(fate: Any, size: int, seconds: float) -> None:
        observe(fate, size, seconds)
        if watch.is_on:
            watch.counts["uploads"] += 1
            watch.seconds["upload"] += seconds

    setattr(session._parts.metrics, "observe_upload", uploaded)  # noqa: B010


def _block(observed: Observed, watch: Stopwatch) -> Block:
    spans = np.array(observed.spans)
    count = len(spans)
    began, computed, entered, left = spans.T
    pad = observed._job.step_seconds
    upload = watch.seconds.pop("upload", 0.0) / max(1.0, watch.counts["uploads"])
    late = np.maximum(0.0, entered - np.maximum(computed, began + pad)) if pad else np.zeros(count)
    return Block(
        period=float(left[-1] - began[0]) / count,
        compute=float(np.mean(computed - began)),
        late=float(np.mean(late)),
        boundary=float(np.mean(left - entered)),
        items={name: seconds / count for name, seconds in sorted(watch.seconds.items())},
        counts={name: number / count for name, number in sorted(watch.counts.items())},
        upload=upload,
    )


def on_the_devices(bench: Bench) -> dict[str, float]:
    """What copies and applies take until the devices have done them, beyond the calls, and how fast copies come out.

    Returns:
        Seconds by name, medians over fragments and repetitions; "host_bytes_per_second" likewise.
    """
    params = bench.params()
    _, device = bench.parts(params)
    count = bench.document.fragments.count
    params = device.warm(params)
    took: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(DEVICE_REPETITIONS):
        index = number % count
        jax.block_until_ready(params)
        began = time.perf_counter()
        copy = device.copy(params, (index,))[index]
        called = time.perf_counter()
        copy.wait()
        done = time.perf_counter()
        flat = copy.to_host()
        there = time.perf_counter()
        staged = device.stage(index, flat)
        jax.block_until_ready(params)
        applying = time.perf_counter()
        params = device.overwrite(params, staged)
        applied = time.perf_counter()
        jax.block_until_ready(params)
        finished = time.perf_counter()
        took["copy_call"].append(called - began)
        took["copy_device"].append(done - called)
        took["apply_call"].append(applied - applying)
        took["apply_device"].append(finished - applied)
        took["host_bytes_per_second"].append(flat.nbytes / (there - began))
    return {name: statistics.median(values) for name, values in took.items()}


def main(arguments: list[str]) -> int:
    """Measures one job."""
    job = Job(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    default_logs("warning")
    tune_malloc()
    sys.setswitchinterval(SWITCH_SECONDS)
    bench = Bench(job)
    blocks: dict[str, list[dict[str, Any]]] = {"baseline": [], "session": []}
    devices = on_the_devices(bench)
    bench.session()  # what happens in a process once, happens here
    for _ in range(job.repetitions):
        blocks["baseline"].append(asdict(bench.baseline()))
        blocks["session"].append(asdict(bench.session()))
    result = {"device": jax.devices()[0].device_kind, "devices": devices, "blocks": blocks}
    Path(arguments[1]).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
