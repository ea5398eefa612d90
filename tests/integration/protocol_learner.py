"""A learner without a model: speaks the real protocol over gRPC, steps by a script, needs neither JAX nor data.

It takes part in a whole run with the core's learner machine; its "training" pulls every parameter towards a target of
its own, a little at each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import encoding_named, float32_elements
from decoupled_diloco.arrays.fragments import fragment_schema
from decoupled_diloco.arrays.outer import apply_delta
from decoupled_diloco.arrays.schema import Schema
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_effects as le
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.core.ids import Activity, Fate, Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.wire import codec, control, enums
from tests.integration.protocol_link import TINY_SCHEMA, Link


@dataclass
class Script:
    """How a protocol learner behaves."""

    step_seconds: float = 0.02
    tokens_per_step: int = 100
    seed: int = 0
    poison_round: int = 0
    """Its contribution to this round holds a NaN."""


@dataclass
class ProtocolLearner:
    """One incarnation of a learner that takes part in a run from the join to the goodbye."""

    address: str
    name: str
    base_policy: Policy
    script: Script = field(default_factory=Script)
    schema: Schema = TINY_SCHEMA
    fates: dict[int, Fate] = field(default_factory=dict)
    applied: list[tuple[int, Version, str]] = field(default_factory=list)
    """Fragment, version, digest of the values as they were applied."""
    encodings_seen: set[str] = field(default_factory=set)
    hold: le.Hold | None = None
    """Why it makes no step now."""
    finished: bool = False
    left: bool = False

    def __post_init__(self) -> None:
        self.link = Link(self.address, self.name, self.schema)
        self._wake = asyncio.Event()
        self._reports: asyncio.Queue = asyncio.Queue()
        self._work: set[asyncio.Task] = set()
        self._held: dict[int, tuple[Version, np.ndarray]] = {}
        """Newest downloaded values by fragment."""
        self._copies: dict[int, np.ndarray] = {}

    # --- from the join to the goodbye ---

    async def run(self) -> None:
        try:
            await self._join()
            async with self.link.attached() as stream:
                helpers = [
                    asyncio.create_task(self._read(stream)),
                    asyncio.create_task(self._write(stream)),
                    asyncio.create_task(self._heartbeat()),
                ]
                try:
                    await self._step_for_ever()
                finally:
                    for task in [*helpers, *self._work]:
                        task.cancel()
                    await asyncio.gather(*helpers, *self._work, return_exceptions=True)
                await self.link.leave()
                self.left = True
        finally:
            await self.link.close()

    async def _join(self) -> None:
        joined = await self.link.join()
        self.policy = codec.policy_from_wire(joined.policy, self.base_policy)
        self.heartbeat_seconds = codec.duration_from_wire(joined.deadlines.heartbeat_duration)
        self.machine = LearnerMachine(self.policy, cursor=joined.cursor)
        sizes = fragment_schema(self.schema, self.policy.fragment_count).sizes
        source = np.random.default_rng(7)
        self.theta = [source.normal(size=size).astype(np.float32) for size in sizes]
        self.base = [theta.copy() for theta in self.theta]
        own = np.random.default_rng(self.script.seed + 100)
        self.target = [own.normal(size=size).astype(np.float32) for size in sizes]
        for version in joined.fragments:
            self._handle(codec.fragment_version_from_wire(version))

    async def _step_for_ever(self) -> None:
        while not self.finished:
            boundary = self.machine.at_boundary()
            self._carry_out(boundary)
            self.hold = boundary.hold
            if boundary.hold is None:
                await asyncio.sleep(self.script.step_seconds)
                for theta, target in zip(self.theta, self.target, strict=True):
                    theta += np.float32(0.05) * (target - theta)
                self.machine.step_finished(self.script.tokens_per_step)
                continue
            if boundary.hold is le.Hold.DRAINING:
                self._perform(self.machine.drained())
            self._wake.clear()
            await self._wake.wait()

    def _carry_out(self, boundary: le.Boundary) -> None:
        for apply in boundary.applies:
            version, values = self._held[apply.fragment]
            assert version == apply.version
            self.theta[apply.fragment] = values.copy()
            self.base[apply.fragment] = values
            self.applied.append((apply.fragment, apply.version, vector_digest(values)))
            self._reports.put_nowait(
                ev.FragmentApplied(
                    self.name,
                    self.link.incarnation,
                    apply.fragment,
                    apply.version,
                    self.machine.local_step,
                    self.machine.token_count,
                    apply.kept_token_count,
                    0.001,
                )
            )
        for copy in boundary.copies:
            self._copies[copy.fragment] = self.theta[copy.fragment] - self.base[copy.fragment]
        self._perform(boundary.uploads)

    # --- effects ---

    def _handle(self, event: lev.LearnerEvent) -> None:
        self._perform(self.machine.handle(event))
        self.finished = self.finished or isinstance(event, lev.Ended)
        self._wake.set()

    def _perform(self, effects: Iterable[le.LearnerEffect]) -> None:
        for effect in effects:
            match effect:
                case le.Upload():
                    self._start(self._upload(effect, self._copies[effect.copy.fragment]))
                case le.Download():
                    self._start(self._download(effect))
                case le.UploadInitialParameters():
                    self._start(self._upload_initial())
                case le.DeclineRound(round=number, reason=reason):
                    self._reports.put_nowait(ev.ContributionDeclined(self.name, self.link.incarnation, number, reason))
                case le.Leave():
                    self.finished = True

    def _start(self, work) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _upload(self, upload: le.Upload, delta: np.ndarray) -> None:
        encoding = encoding_named(self.policy.upload_encoding)
        if upload.round == self.script.poison_round:
            delta = delta.copy()
            delta[0] = np.nan
        payload = encoding.encode(delta)
        header = upload.copy.header(self.name, self.link.incarnation, upload.round, len(payload))
        message = codec.contribution_header_to_wire(header, encoding.name, self.schema.digest, resume=False)
        try:
            fate = await self.link.upload(message, payload)
        except (PeerError, UnreachableError):
            return  # this learner does not send again; the round goes on without it
        self.fates[upload.round] = fate

    async def _upload_initial(self) -> None:
        for fragment, theta in enumerate(self.theta):
            await self.link.upload_initial(fragment, theta)

    async def _download(self, download: le.Download) -> None:
        try:
            header, payload = await self.link.download(download.fragment, download.version, download.held)
        except (PeerError, UnreachableError):
            self._handle(lev.DownloadFailed(download.fragment, download.version))
            return
        encoding = enums.encoding_from_wire(header.encoding)
        self.encodings_seen.add(encoding)
        if header.HasField("delta_base"):
            version, held = self._held[download.fragment]
            assert version == download.held
            values = apply_delta(held, payload, encoding)
        else:
            values = float32_elements(payload)
        self._held[download.fragment] = (download.version, values)
        event = lev.Downloaded(download.fragment, download.version, header.version.global_step)
        self._handle(event)

    # --- the control stream ---

    async def _read(self, stream) -> None:
        while (message := await stream.read()) is not grpc.aio.EOF:
            event = control.instruction_from_wire(message)
            if event is not None:
                self._handle(event)

    async def _write(self, stream) -> None:
        while True:
            await stream.write(control.report_to_wire(await self._reports.get()))

    async def _heartbeat(self) -> None:
        while True:
            pairs = zip(self.theta, self.target, strict=True)
            loss = float(np.mean([np.square(theta - target).mean() for theta, target in pairs]))
            activity = Activity.RECOVER if len(self.machine.applied_versions) < len(self.theta) else Activity.COMPUTE
            progress = ev.Progress(
                self.machine.local_step,
                self.machine.token_count,
                activity,
                self.script.step_seconds,
                spans=((activity, self.heartbeat_seconds),),
                loss=loss,
                schedule_step=self.machine.schedule_step,
            )
            self._reports.put_nowait(ev.ProgressReported(self.name, self.link.incarnation, progress))
            await asyncio.sleep(self.heartbeat_seconds)
