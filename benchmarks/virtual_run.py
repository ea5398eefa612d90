"""A whole run of Decoupled DiLoCo in one process and in virtual time: no sockets, no threads, no clock.

Learners are equally fast, every one is in every round, and a merged fragment arrives `overlap_steps` steps after it was
copied. All that counts is the project's own: the learners' machine, copies and writing back on the device, the
encoded deltas, the merge, the outer step, the deltas that come down. The same settings give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.encoding import Encoded, FloatVector
from decoupled_diloco.arrays.fragments import Fragmentation, assemble, fragment_schema
from decoupled_diloco.arrays.outer import FragmentState, apply_delta
from decoupled_diloco.arrays.staging import StagedFragment
from decoupled_diloco.arrays.tree import ParameterTree
from decoupled_diloco.core import learner_effects as le
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.schedule import fragment_of, global_step_of, last_round_of
from decoupled_diloco.core.weights import contribution_weight
from learner_service.copies import CopySlot
from learner_service.error_feedback import ErrorFeedback
from learner_service.handed_over import UploadJob
from learner_service.step import InnerStep
from learner_service.uploader import compensated_delta
from learner_service.workload import Params, Workload
from syncer_service.merger import MergeInput, merge_round


@dataclass(frozen=True)
class Model:
    """What is trained, compiled once for all runs of a benchmark.

    Attributes:
        workload: whose loss, optimizer and schedule are used, which are the same for every seed.
        step: its inner step.
        tree: where the tensors sit.
        fragmentation: how they are cut.
    """

    workload: Workload
    step: InnerStep
    tree: ParameterTree
    fragmentation: Fragmentation

    @classmethod
    def of(cls, workload: Workload, fragment_count: int) -> Model:
        """Compiles the step for the workload's batches."""
        params, step = workload.init(0), InnerStep(workload)
        step.compile(params, step.fresh_state(params), next(workload.data(0, 0)))
        tree = ParameterTree(params, workload.merge_rule)
        return cls(workload, step, tree, fragment_schema(tree.schema, fragment_count))


@dataclass(frozen=True)
class Published:
    """A version on its way to the learners: `payload` is a delta to the version before, None where Theta is served."""

    version: Version
    global_step: int
    theta: FloatVector
    payload: memoryview | None


@dataclass(frozen=True)
class Contribution:
    """What a learner sends to a round; `error` is the share of its norm that the encoding lost."""

    upload: Encoded
    weight: float
    error: float


@dataclass
class VirtualLearner:
    """One learner.

    Args:
        name: its id; contributions are merged in the order of ids.
        slot: its data.
        policy: the run's.
        model: what is trained.
        workload: where parameters and data of this seed come from.
        seed: of the parameters.
        error_feedback: whether what the encoding drops is sent later.
    """

    name: str
    slot: int
    policy: Policy
    model: Model
    workload: Workload
    seed: int
    error_feedback: bool
    held: dict[int, FloatVector] = field(default_factory=dict)
    _slots: dict[int, CopySlot] = field(default_factory=dict)
    _arrived: dict[int, StagedFragment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._params = self.workload.init(self.seed)
        self._state = self.model.step.fresh_state(self._params)
        self._data: Iterator[Any] = iter(self.workload.data(self.slot, 0))
        self._device = DeviceFragments(self.model.tree, self.model.fragmentation, self._params)
        self._feedback = ErrorFeedback() if self.error_feedback else None
        self.machine = LearnerMachine(self.policy)

    def initial(self) -> list[FloatVector]:
        """The learner's own values of every fragment."""
        count = self.policy.fragment_count
        return [copy.to_host() for _, copy in sorted(self._device.copy(self._params, range(count)).items())]

    def step(self) -> None:
        """One inner step."""
        rate = self.model.workload.learning_rate(self.machine.schedule_step)
        batch = next(self._data)
        self._params, self._state, _ = self.model.step(self._params, self._state, batch, rate)
        self.machine.step_finished(self.model.workload.batch_tokens(batch))

    def receive(self, fragment: int, published: Published) -> None:
        """A version arrives; the next boundary applies it.

        Raises:
            AssertionError: what is held now is not what the syncer holds.
        """
        held = self.held.get(fragment)
        if published.payload is None or held is None:
            held = published.theta
        else:
            held = apply_delta(held, published.payload, self.policy.download_encoding)
        assert vector_digest(held) == published.version.digest, (self.name, fragment, published.version)
        self.held[fragment] = held
        self._arrived[fragment] = self._device.stage(fragment, held)
        self.machine.handle(lev.Published(fragment, published.version, published.global_step))
        self.machine.handle(lev.Downloaded(fragment, published.version, published.global_step))

    def closed(self, round_number: int, fragment: int, members: tuple[str, ...]) -> None:
        """A round was committed."""
        global_step = global_step_of(round_number, self.policy)
        self.machine.handle(lev.RoundEnded(round_number, fragment, True, members, global_step))
        if self._feedback is not None:
            self._feedback.settle(round_number, fragment, self.name in members)

    def boundary(self) -> list[le.Upload]:
        """Applies and copies what the machine wants; returns what is to be sent."""
        plan = self.machine.at_boundary()
        for apply in plan.applies:
            assert apply.rule == "overwrite"
            self._params = self._device.overwrite(self._params, self._arrived.pop(apply.fragment))
        for copy in plan.copies:
            slot = self._slots[copy.fragment] = CopySlot(copy)
            slot.fill(self._device.copy(self._params, (copy.fragment,))[copy.fragment])
        return list(plan.uploads)

    def contribution(self, upload: le.Upload) -> Contribution:
        """What goes over the wire for a round."""
        copy, encoding = upload.copy, self.policy.upload_encoding
        job = UploadJob(upload.round, self._slots[copy.fragment], self.held[copy.fragment], generation=1)
        carried = self._feedback.carried(upload.round, copy.fragment) if self._feedback is not None else None
        payload, dropped = compensated_delta(job, encoding, carried)
        if self._feedback is not None:
            self._feedback.sent(upload.round, copy.fragment, dropped)
        encoded = Encoded(payload, encoding, job.base.size)
        error = float(np.linalg.norm(dropped) / np.linalg.norm(encoded.decode()))
        return Contribution(encoded, contribution_weight(copy.token_count, copy.step_count), error)


class VirtualRun:
    """A run from its initial parameters to its end.

    Args:
        model: what is trained.
        workload: where parameters and data of this seed come from.
        seed: of the parameters.
        policy: the run's; with `overwrite`, without a last call, and with the model's number of fragments.
        learner_count: M; each has a data slot of its own.
        error_feedback: whether learners send later what the encoding drops.

    Attributes:
        errors: what the encoding lost of each contribution: the norm of the error over the norm of what was sent.
        upload_bytes: payload bytes of all contributions.
    """

    def __init__(
        self,
        model: Model,
        workload: Workload,
        seed: int,
        policy: Policy,
        learner_count: int,
        error_feedback: bool = False,
    ) -> None:
        if policy.last_call or policy.barrier or policy.apply_rule != "overwrite" or policy.overlap_steps < 1:
            raise ValueError(
                "a virtual run has no last call and no barrier, overwrites what it applies, and overlaps a step or more"
            )
        self.model = model
        self.policy = policy
        self._workload = workload
        self.errors: list[float] = []
        self.upload_bytes = 0
        self.learners = [
            VirtualLearner(f"learner-{slot:02d}", slot, policy, model, workload, seed, error_feedback)
            for slot in range(learner_count)
        ]
        self._states = [FragmentState.initial(values) for values in self.learners[0].initial()]
        self._versions = [Version(1, 1, vector_digest(state.theta)) for state in self._states]
        self._on_the_way: list[tuple[int, int, Published]] = []

    def run(self) -> VirtualRun:
        """Trains to the last global step, and merges the steps that no round has asked for yet."""
        for fragment, (state, version) in enumerate(zip(self._states, self._versions, strict=True)):
            for learner in self.learners:
                learner.receive(fragment, Published(version, 0, state.theta, None))
        for learner in self.learners:
            learner.boundary()
        round_number, last = 1, last_round_of(self.policy.total_steps, self.policy)
        for step in range(self.policy.total_steps):
            for learner in self.learners:
                learner.step()
            self._deliver(step)
            is_due = round_number <= last and global_step_of(round_number, self.policy) == step
            if is_due:
                self._ask(round_number)
            uploads = [learner.boundary() for learner in self.learners]
            if is_due:
                self._merge(round_number, [upload for (upload,) in uploads])
                round_number += 1
        self._finish(round_number)
        return self

    def evaluate(self) -> dict[str, float]:
        """Figures of Theta on the held-out data."""
        return self._workload.evaluate(self.theta())

    def theta(self) -> Params:
        """Theta as parameters."""
        tensors = assemble(self.model.fragmentation, {p: state.theta for p, state in enumerate(self._states)})
        leaves = {name: jnp.array(values) for name, values in tensors.items()}
        return self.model.tree.replace(self.model.workload.init(0), leaves)

    def _ask(self, round_number: int) -> list[list[le.LearnerEffect]]:
        """Asks everybody, to be answered at this very boundary."""
        fragment, global_step = fragment_of(round_number, self.policy), global_step_of(round_number, self.policy)
        ask = lev.Asked(round_number, fragment, self._versions[fragment], global_step, due_local_step=0)
        return [learner.machine.handle(ask) for learner in self.learners]

    def _merge(self, round_number: int, uploads: Sequence[le.Upload]) -> None:
        """Merges a round and sends the new version on its way."""
        fragment = fragment_of(round_number, self.policy)
        sent = [learner.contribution(upload) for learner, upload in zip(self.learners, uploads, strict=True)]
        self.errors += [contribution.error for contribution in sent]
        self.upload_bytes += sum(len(contribution.upload.payload) for contribution in sent)
        result = merge_round(
            self._states[fragment],
            [MergeInput(contribution.upload, contribution.weight) for contribution in sent],
            self.model.fragmentation.fragments[fragment].segments,
            learning_rate=self.policy.outer_learning_rate,
            momentum=self.policy.outer_momentum,
            download_encoding=self.policy.download_encoding,
        )
        self._states[fragment] = result.state
        version = Version(1, self._versions[fragment].number + 1, result.digest)
        self._versions[fragment] = version
        global_step = global_step_of(round_number, self.policy)
        published = Published(version, global_step + 1, result.state.theta, result.delta_payload)
        self._on_the_way.append((global_step + self.policy.overlap_steps, round_number, published))
        for learner in self.learners:
            learner.closed(round_number, fragment, tuple(each.name for each in self.learners))

    def _deliver(self, step: int) -> None:
        """Hands over what has arrived by the boundary after this global step."""
        arrived = [entry for entry in self._on_the_way if entry[0] <= step]
        self._on_the_way = [entry for entry in self._on_the_way if entry[0] > step]
        for _, round_number, published in arrived:
            for learner in self.learners:
                learner.receive(fragment_of(round_number, self.policy), published)

    def _finish(self, round_number: int) -> None:
        """The end of a run: no more steps, and one last round of every fragment that has steps to merge."""
        self._deliver(self.policy.total_steps + self.policy.overlap_steps)
        for learner in self.learners:
            learner.boundary()
            learner.machine.handle(lev.DrainAsked("the run finishes", leaves=False))
            learner.boundary()
        for number in range(round_number, round_number + self.policy.fragment_count):
            effects = self._ask(number)
            uploads = [effect for told in effects for effect in told if isinstance(effect, le.Upload)]
            if uploads:
                self._merge(number, uploads)
