"""The run file: what all processes of a run must agree on.

One TOML file holds it (`run_file` reads it). Its digest is compared
at the join; a difference is shown field by field. Process settings (addresses, files, logs) are not part of
it: each service keeps its own in a section of its own name, which may stand in the same file and which the
others pass over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field

from decoupled_diloco.core.ids import LEARNER_ID_PATTERN
from decoupled_diloco.core.policy import Deadlines, Policy
from decoupled_diloco.name_maps import shipped_name_maps
from decoupled_diloco.runtime.config import Finding, Section, flat_values
from decoupled_diloco.runtime.config_fields import Expect, dotted

PROCESS_SECTIONS = frozenset({"syncer", "learner", "evaluator"})
"""Sections of process settings. Each process reads its own."""

PRESET_FIELD = ("run", "preset")
"""The setting that chooses a preset."""

_NOT_AGREED = frozenset({PRESET_FIELD, ("run", "start_from"), ("run", "name_map")})
"""Settings of the run file that no two processes have to agree on: a preset is only a way to write values, and what a
run starts from is read by the syncer alone, once."""

# The defaults are those of the core; the file below only adds names, sentences and ranges.
_POLICY = Policy()
_DEADLINES = Deadlines()

Name = Annotated[
    str,
    Field(pattern=f"^{LEARNER_ID_PATTERN}$"),
    Expect("1 to 63 of a-z, 0-9 and -, the first and the last one not -"),
]
"""An id that is safe in file names, labels and host names."""


class RunSection(Section):
    """The run as a whole."""

    id: Name = Field(default="local", description="Name of the run; a learner of another run is refused.")
    preset: Literal["small", "paper"] = Field(
        default="small",
        description="Set of values below this file; not itself part of what processes agree on.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the initial parameters and of the data order.")
    total_steps: int = Field(
        default=1000,
        ge=0,
        description="The run finishes after this global step; 0: it runs until it is told to finish.",
    )
    learners_expected: int = Field(
        default=3,
        ge=1,
        description="Learners that the operator means to start; decides how the data is divided.",
    )
    learners_max: int = Field(
        default=_POLICY.learners_max,
        ge=1,
        le=1024,
        description="One more learner than this is refused at the join.",
    )
    start_from: str = Field(
        default="",
        description="Path or URL of what the first parameters are taken from: a model in safetensors (a file, or a "
        "folder with shards and their index), or a checkpoint of a run; empty: those of the first learner. Only the "
        "syncer reads it, and only for a new run.",
    )
    name_map: str = Field(
        default="",
        description="Which tensors of start_from are which of the run: gemma, gemma1, llama, or the path of a .toml "
        "file; empty: they have the run's own names.",
    )


class FragmentsSection(Section):
    """How the parameters are cut, and how often a fragment is synchronised."""

    count: int = Field(default=_POLICY.fragment_count, ge=1, description="Fragments of the parameters (P), at most H.")
    interval_steps: int = Field(
        default=_POLICY.interval_steps,
        ge=1,
        description="Global steps between two syncs of one fragment (H).",
    )
    overlap_steps: int = Field(
        default=_POLICY.overlap_steps,
        ge=0,
        description="Inner steps over which one sync is overlapped (tau), below H.",
    )


class QuorumSection(Section):
    """When a round may be merged, and what may take part."""

    minimum: int = Field(default=_POLICY.quorum_minimum, ge=1, description="Contributions that must have started (K).")
    grace_share: float = Field(
        default=_POLICY.grace_share,
        ge=0,
        lt=1,
        description="Share of the slack that the grace window may use (gamma).",
    )
    grace_cap_steps: float = Field(
        default=_POLICY.grace_cap_steps,
        ge=0,
        description="The grace window is never longer than this many steps of the fastest learner.",
    )
    last_call: Literal["on", "off"] = Field(
        default="on" if _POLICY.last_call else "off",
        description="on: learners in the middle of a step answer with the copy of their latest boundary; "
        "off: strict window, as an ablation.",
    )
    below_quorum: Literal["wait", "degrade"] = Field(
        default=_POLICY.below_quorum,
        description="With fewer than K live learners: wait for more, or let K fall to what is live.",
    )
    norm_outlier_factor: float = Field(
        default=_POLICY.norm_outlier_factor,
        ge=0,
        description="Refuse a contribution with a norm above this many times the fragment's average; 0: off.",
    )


class OuterSection(Section):
    """The outer optimizer: SGD with Nesterov momentum."""

    learning_rate: float = Field(default=_POLICY.outer_learning_rate, gt=0, description="Outer learning rate.")
    momentum: float = Field(default=_POLICY.outer_momentum, ge=0, lt=1, description="Outer momentum (mu).")


class EncodingSection(Section):
    """How fragments travel."""

    upload: Literal["float32", "bf16", "int8", "int4"] = Field(
        default="bf16",
        description="Encoding of contributions (deltas); int8 and int4 have a scale for every 128 values.",
    )
    download: Literal["float32", "bf16"] = Field(
        default="bf16",
        description="bf16: a delta for holders of the previous version, else float32 as for all others.",
    )
    error_feedback: bool = Field(
        default=False,
        description="Learners add what the encoding dropped of a merged contribution to their next one of that "
        "fragment; it takes a float32 vector of each fragment on every learner's host. Without effect for float32.",
    )


class InnerSection(Section):
    """What a learner does besides stepping."""

    apply: Literal["overwrite", "carry", "blend"] = Field(
        default=_POLICY.apply_rule,
        description="What becomes of the steps between a learner's copy and the arrival of the merged "
        "fragment: lost, added on top, or kept by the share of blend_alpha.",
    )
    blend_alpha: float = Field(
        default=_POLICY.blend_alpha,
        gt=0,
        lt=1,
        description="Share of the learner's own value that blend keeps.",
    )
    barrier: bool = Field(
        default=_POLICY.barrier,
        description="A learner that has answered waits until the round is closed; makes the run "
        "synchronous, for comparisons.",
    )
    recovery_warmup_steps: int = Field(
        default=50,
        ge=0,
        description="Steps of learning-rate warm-up of a learner with fresh optimizer state.",
    )
    max_detached_seconds: float = Field(
        default=3600.0, ge=0, description="A learner pauses after this long without the syncer; 0: never."
    )


def _deadline(name: str, description: str) -> float:
    default: float = Field(default=getattr(_DEADLINES, name), gt=0, description=description)
    return default


class DeadlinesSection(Section):
    """The one table of deadlines; the syncer hands it out at the join."""

    heartbeat_seconds: float = _deadline("heartbeat_seconds", "A learner reports at least this often.")
    lease_seconds: float = _deadline("lease_seconds", "A learner that was not heard from for this long is lost.")
    stall_seconds: float = _deadline(
        "stall_seconds", "Nobody waits for a live learner that was silent or inside one step for longer."
    )
    stall_step_factor: float = Field(
        default=_POLICY.stall_step_factor,
        ge=1,
        description="A learner is not stalled before this many of its own step times.",
    )
    last_call_seconds_max: float = _deadline("last_call_seconds_max", "Longest wait for answers to a last call.")
    last_call_seconds_min: float = _deadline("last_call_seconds_min", "Shortest wait for answers to a last call.")
    upload_idle_seconds: float = _deadline(
        "upload_idle_seconds", "A started upload that moves no bytes for this long has failed."
    )
    upload_seconds_min: float = _deadline("upload_seconds_min", "A started upload may take at least this long.")
    initial_parameters_seconds: float = _deadline(
        "initial_parameters_seconds", "Time for the initial parameters, before another learner is asked."
    )
    drain_seconds_max: float = _deadline("drain_seconds_max", "A draining learner leaves after this long.")
    rpc_seconds: float = _deadline("rpc_seconds", "Deadline of a unary call.")
    attach_idle_seconds: float = _deadline(
        "attach_idle_seconds", "A learner that hears nothing from the syncer for this long reconnects."
    )

    def findings(self) -> Iterable[Finding]:
        """Deadlines that undo each other."""
        if self.lease_seconds < 3 * self.heartbeat_seconds - 1e-9:  # 3 * 0.1 is a hair above 0.3
            yield Finding(
                ("lease_seconds", "heartbeat_seconds"),
                "a lease must last at least 3 heartbeats, or one lost report ends it; make the lease "
                f"{3 * self.heartbeat_seconds:g} or more",
            )
        for name in ("stall_seconds", "attach_idle_seconds"):
            if getattr(self, name) < 2 * self.heartbeat_seconds:
                yield Finding((name, "heartbeat_seconds"), f"{name} must last at least 2 heartbeats")
        if self.last_call_seconds_min > self.last_call_seconds_max:
            yield Finding(("last_call_seconds_min", "last_call_seconds_max"), "the minimum is above the maximum")
        if self.stall_seconds > self.lease_seconds:
            yield Finding(
                ("stall_seconds", "lease_seconds"),
                "a silent learner is lost before it counts as stalled, so rounds wait for its whole lease",
                "warning",
            )


class DataSection(Section):
    """How the training data is dealt out."""

    slot_count: int = Field(
        default=0,
        ge=0,
        description="Streams that the training data is divided into; a learner trains on one. 0: as many as "
        "learners_expected. Learners beyond them share data, in an order of their own.",
    )


class WorkloadSection(Section):
    """What is trained."""

    factory: Annotated[str, Expect("package.module:function, or nothing where the loop is your own")] = Field(
        default="learner_service.workloads.language_model:factory",
        pattern=r"^$|^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="Makes the model, its data and its optimizer.",
    )
    options: dict[str, object] = Field(
        default_factory=dict, description="Free settings that the factory reads, one per key."
    )


class RunConfig(Section):
    """The run file."""

    run: RunSection = RunSection()
    fragments: FragmentsSection = FragmentsSection()
    quorum: QuorumSection = QuorumSection()
    outer: OuterSection = OuterSection()
    encoding: EncodingSection = EncodingSection()
    inner: InnerSection = InnerSection()
    deadlines: DeadlinesSection = DeadlinesSection()
    data: DataSection = DataSection()
    workload: WorkloadSection = WorkloadSection()

    def findings(self) -> Iterable[Finding]:
        """Contradictions between sections."""
        yield from _fragment_findings(self)
        yield from _learner_findings(self)
        yield from _start_findings(self.run)

    @property
    def slot_count(self) -> int:
        """Streams that the training data is divided into, >= 1."""
        return self.data.slot_count or self.run.learners_expected

    def agreed_values(self) -> dict[str, str]:
        """What all processes must agree on: JSON text by dotted name, without process settings."""
        flat = flat_values(self, RunConfig)
        return {dotted(path): _canonical(value) for path, value in sorted(flat.items()) if path not in _NOT_AGREED}

    def digest(self) -> str:
        """SHA-256 over the canonical JSON of the agreed values, 64 lower-case hexadecimal digits."""
        return hashlib.sha256(_canonical(self.agreed_values()).encode()).hexdigest()

    def to_policy(self) -> Policy:
        """What the core decides by."""
        return Policy(
            fragment_count=self.fragments.count,
            interval_steps=self.fragments.interval_steps,
            overlap_steps=self.fragments.overlap_steps,
            total_steps=self.run.total_steps,
            quorum_minimum=self.quorum.minimum,
            grace_share=self.quorum.grace_share,
            grace_cap_steps=self.quorum.grace_cap_steps,
            last_call=self.quorum.last_call == "on",
            below_quorum=self.quorum.below_quorum,
            norm_outlier_factor=self.quorum.norm_outlier_factor,
            learners_max=self.run.learners_max,
            outer_learning_rate=self.outer.learning_rate,
            outer_momentum=self.outer.momentum,
            upload_encoding=self.encoding.upload,
            download_encoding=self.encoding.download,
            apply_rule=self.inner.apply,
            blend_alpha=self.inner.blend_alpha,
            barrier=self.inner.barrier,
            stall_step_factor=self.deadlines.stall_step_factor,
            deadlines=Deadlines(**{field.name: getattr(self.deadlines, field.name) for field in fields(Deadlines)}),
        )


def _fragment_findings(config: RunConfig) -> Iterable[Finding]:
    count, interval = config.fragments.count, config.fragments.interval_steps
    if count > interval:
        yield Finding(
            ("fragments.count", "fragments.interval_steps"),
            f"every fragment needs a step of its own in the interval; make count {interval} or less, or "
            f"interval_steps {count} or more",
        )
    if config.fragments.overlap_steps >= interval:
        yield Finding(
            ("fragments.overlap_steps", "fragments.interval_steps"),
            f"a sync must be over before the next one of the same fragment; make overlap_steps {interval - 1} or less",
        )
    if 0 < config.run.total_steps < interval:
        yield Finding(
            ("run.total_steps", "fragments.interval_steps"),
            "the run ends before every fragment was synchronised once",
            "warning",
        )


def _learner_findings(config: RunConfig) -> Iterable[Finding]:
    run, minimum = config.run, config.quorum.minimum
    if minimum > run.learners_max:
        yield Finding(
            ("quorum.minimum", "run.learners_max"),
            f"a quorum that can never be met; make minimum {run.learners_max} or less",
        )
    elif minimum > run.learners_expected:
        yield Finding(
            ("quorum.minimum", "run.learners_expected"),
            "no round can be merged until more learners than expected have joined",
            "warning",
        )
    if run.learners_expected > run.learners_max:
        yield Finding(
            ("run.learners_expected", "run.learners_max"),
            f"more learners are expected than are let in; make learners_max {run.learners_expected} or more",
        )
    if run.learners_expected > config.slot_count:
        yield Finding(
            ("run.learners_expected", "data.slot_count"),
            "there are fewer streams of data than learners, so some train on the same data",
            "warning",
        )


def _start_findings(run: RunSection) -> Iterable[Finding]:
    known = shipped_name_maps()
    if run.name_map and not run.name_map.endswith(".toml") and run.name_map not in known:
        yield Finding(("run.name_map",), f"there is no such map; give one of {', '.join(known)}, or a .toml file")
    if run.name_map and not run.start_from:
        yield Finding(
            ("run.name_map", "run.start_from"), "a name map does nothing where start_from is empty", "warning"
        )


def _canonical(value: object) -> str:
    """JSON that is the same for equal values: sorted keys, no spaces; dates as text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def describe_differences(
    ours: Mapping[str, str], theirs: Mapping[str, str], our_name: str, their_name: str
) -> tuple[str, ...]:
    """What two processes do not agree on, one line per setting with both sides.

    Args:
        ours: `RunConfig.agreed_values` of one side.
        theirs: The same of the other.
        our_name: How to call the first side, for example "syncer".
        their_name: How to call the second, for example "learner eu-1".
    """
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return tuple(
        f"{name}: {our_name} {ours.get(name, 'has none')}, {their_name} {theirs.get(name, 'has none')}"
        for name in names
    )
