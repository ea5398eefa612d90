"""The composition root of the learner: builds everything from the settings, trains, takes it down."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import grpc

from decoupled_diloco.arrays.device import DeviceFragments
from decoupled_diloco.arrays.fragments import Fragmentation, fragment_schema
from decoupled_diloco.arrays.schema import SchemaError
from decoupled_diloco.arrays.tree import ParameterTree, Params, TensorRule
from decoupled_diloco.command_line import software_version
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.core.ids import Activity, Role
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.run_file import resolve_run
from decoupled_diloco.runtime.channel import Channels, open_channels
from decoupled_diloco.runtime.clock import Clock, MonotonicClock
from decoupled_diloco.runtime.config import ConfigError, flat_values
from decoupled_diloco.runtime.config_layers import Layer, Setting, table_layer
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest
from decoupled_diloco.runtime.logs import default_logs, get_logger
from decoupled_diloco.runtime.ports import Address, parse_address
from decoupled_diloco.runtime.rate_limit import read_ahead_bytes
from decoupled_diloco.runtime.tls import channel_credentials
from learner_service.activity import ActivityAccount
from learner_service.checked_workload import CheckedWorkload
from learner_service.config import LearnerDocument, ParticipantSettings
from learner_service.handover import Handover
from learner_service.inner_loop import InnerLoop, WarmUp
from learner_service.jax_setup import set_up_jax
from learner_service.journal import Journal
from learner_service.metrics import LearnerMetrics, served
from learner_service.network_plan import NetworkPlan, limits_of, peer_plan_of
from learner_service.session import LearnerStoppedError, Session, SessionParts
from learner_service.step import InnerStep
from learner_service.syncer_client import JoinRequest
from learner_service.transfer_rates import upload_doubt
from learner_service.workload import Workload, WorkloadContext, default_merge_rule, load_workload

log = get_logger(__name__)

OPERATOR_REASONS = (
    Reason.PROTOCOL_MISMATCH,
    Reason.RUN_MISMATCH,
    Reason.CONFIG_MISMATCH,
    Reason.SCHEMA_MISMATCH,
    Reason.INVALID_FIELD,
)
"""Refusals that end when the operator changes a setting."""

MEASURED_STEPS = 30
"""Steps that `warm` times."""

MergeRuleOf = Callable[[str, tuple[int, ...]], TensorRule]


def workload_of(document: RunConfig, cache_path: Path, options: Mapping[str, object]) -> Workload:
    """The run's workload on this machine; `options` stand above those of the run file.

    Raises:
        WorkloadError: it cannot be had; the message says why.
    """
    context = WorkloadContext(
        seed=document.run.seed,
        slot_count=document.slot_count,
        total_steps=max(document.run.total_steps, 1),
        cache_dir=cache_path,
        options={**document.workload.options, **options},
    )
    return CheckedWorkload(load_workload(document.workload.factory, context), document.workload.factory)


def opener_of(settings: ParticipantSettings, section: str) -> Callable[[Address], Channels]:
    """How a participant opens its connections."""
    files = settings.tls_files(section)
    read_ahead = read_ahead_bytes(settings.download_bytes_per_second_max)

    def opened(address: Address) -> Channels:
        credentials: grpc.ChannelCredentials | None = channel_credentials(files) if files is not None else None
        return open_channels(address, credentials, settings.tls_server_name, settings.bulk_connections, read_ahead)

    if files is not None:
        files.check()
    return opened


def join_request_of(
    document: RunConfig, participant: str, role: Role, tree: ParameterTree, fingerprint: Mapping[str, str]
) -> JoinRequest:
    """What a participant joins with."""
    values = document.agreed_values() | {f"fingerprint.{name}": text for name, text in fingerprint.items()}
    return JoinRequest(
        run_id=document.run.id,
        participant_id=participant,
        role=role,
        schema=tree.schema,
        config_digest=document.digest(),
        config_values=values,
        policy=document.to_policy(),
        software_version=software_version(),
    )


def cut(params: Params, merge_rule: MergeRuleOf, fragment_count: int) -> tuple[ParameterTree, Fragmentation]:
    """The exchanged tensors of `params`, and how they are cut into fragments.

    Raises:
        ConfigError: the parameters cannot be exchanged, or not be cut into so many.
    """
    try:
        tree = ParameterTree(params, merge_rule)
        return tree, fragment_schema(tree.schema, fragment_count)
    except SchemaError as error:
        raise ConfigError(str(error)) from None


def build_session(
    document: LearnerDocument,
    params: Params,
    merge_rule: MergeRuleOf,
    *,
    fingerprint: Mapping[str, str],
    metrics: LearnerMetrics,
    clock: Clock,
    started_at: float,
) -> tuple[Session, DeviceFragments]:
    """Puts a session together; nothing is sent before it is entered.

    Args:
        document: all settings.
        params: initial parameters, placed where they shall live.
        merge_rule: rule by name and shape of a tensor.
        fingerprint: what all learners must have in common beyond the run file, by name.
        metrics: the learner's.
        clock: instants.
        started_at: when this process, or this session, began.

    Raises:
        ConfigError: a setting cannot be used, or the parameters cannot be exchanged as it asks.
    """
    settings = document.learner
    tree, fragmentation = cut(params, merge_rule, document.fragments.count)
    device = DeviceFragments(tree, fragmentation, params)
    join = join_request_of(document, settings.learner_id, Role.LEARNER, tree, fingerprint)
    if doubt := upload_doubt(settings, join.policy, fragmentation.sizes):
        log.warning("settings_doubtful", reason=doubt)
    limits = limits_of(settings)
    network = NetworkPlan(
        addresses=tuple(parse_address(text) for text in settings.syncer),
        open_channels=opener_of(settings, "learner"),
        join=join,
        fragmentation=fragmentation,
        device=device,
        max_detached_seconds=document.inner.max_detached_seconds,
        error_feedback=document.encoding.error_feedback,
        drain_seconds=settings.drain_seconds,
        limits=limits,
        peers=peer_plan_of(settings, limits),
    )
    journal = Journal(settings.journal, settings.learner_id, clock)
    account = ActivityAccount(Activity.STARTUP, started_at)
    handover = Handover(LearnerMachine(join.policy), account, clock, journal)
    parts = SessionParts(
        network=network,
        device=device,
        fragmentation=fragmentation,
        policy=join.policy,
        handover=handover,
        metrics=metrics,
        clock=clock,
        verifies_applied=settings.verify_applied,
    )
    return Session(params, parts), device


def library_session(
    config: str | Path | RunConfig | Mapping[str, object],
    params: Params,
    *,
    merge_rule: MergeRuleOf | None = None,
    fingerprint: Mapping[str, str] | None = None,
    **settings: object,
) -> Session:
    """See `decoupled_diloco.learner`."""
    run_file, given = None, Layer()
    if isinstance(config, RunConfig):
        values = flat_values(config).items()
        given = Layer(tuple(Setting(path, value, "the program") for path, value in values))
    elif isinstance(config, Mapping):
        given = table_layer(LearnerDocument, config, "the program")
    else:
        run_file = Path(config)
    own = (
        Setting(("learner", name), value, "the program", is_text=isinstance(value, str))
        for name, value in settings.items()
    )
    flags = Layer((*given.settings, *own), given.problems)
    document = resolve_run(LearnerDocument, run_file=run_file, flags=flags).value
    default_logs(document.learner.log_level)
    clock = MonotonicClock()
    session, _ = build_session(
        document,
        params,
        merge_rule or default_merge_rule,
        fingerprint=fingerprint or {},
        metrics=LearnerMetrics(software_version()),
        clock=clock,
        started_at=clock.now(),
    )
    return session


def serve(document: LearnerDocument, started_at: float, stop: StopRequest) -> int:
    """Trains until the run has finished, the process is asked to stop, or the syncer refuses it.

    Raises:
        ConfigError, WorkloadError, PeerError: what the operator has to change.
    """
    settings = document.learner
    set_up_jax(settings.cache_path, settings.platform, "learner")
    workload = workload_of(document, settings.cache_path, settings.workload_options)
    gc.freeze()  # modules stay: the one collection of the start-up, in `prepare`, need not go through them
    step = InnerStep(workload)
    params = step.place(workload.init(document.run.seed))
    clock, metrics = MonotonicClock(), LearnerMetrics(software_version())
    session, device = build_session(
        document,
        params,
        workload.merge_rule,
        fingerprint=workload.fingerprint(),
        metrics=metrics,
        clock=clock,
        started_at=started_at,
    )
    with served(metrics.telemetry, settings.http_listen, "learner.http_listen"):
        try:
            with session:
                stop.on_request(lambda: session.drain(stop.reason))
                warm_up = WarmUp(document.inner.recovery_warmup_steps)
                loop = InnerLoop(workload, step, session, warm_up, settings.step_seconds_min, clock)
                loop.run(*loop.prepare(params, device))
        except LearnerStoppedError as error:
            return _stopped(error.cause, settings.learner_id)
    log.info("stopped", reason=session.end_reason)
    return ExitCode.OK


def _stopped(cause: BaseException, learner_id: str) -> int:
    """What becomes of the process when the network thread gave up."""
    if isinstance(cause, PeerError) and cause.reason in OPERATOR_REASONS:
        raise ConfigError(cause.explanation()) from cause
    if isinstance(cause, PeerError) and cause.reason is Reason.STALE_INCARNATION:
        raise PeerError(
            cause.reason,
            f"a newer process has joined the run as learner {learner_id!r} and took over from this one, which stops. "
            "If both are meant to train, give each a learner_id of its own",
            cause.metadata,
        ) from cause
    if isinstance(cause, PeerError | UnreachableError | ConfigError):
        raise cause
    log.error("network_thread_died", error=f"{type(cause).__name__}: {cause}", exc_info=cause)
    return ExitCode.FAILED


def warm(document: LearnerDocument, out: TextIO) -> int:
    """Prepares data, compiles all programs into the cache, times some steps, and prints the result as one JSON line.

    Raises:
        ConfigError, WorkloadError: what the operator has to change.
    """
    settings, clock = document.learner, MonotonicClock()
    began = clock.now()
    set_up_jax(settings.cache_path, settings.platform, "learner")
    workload = workload_of(document, settings.cache_path, settings.workload_options)
    step = InnerStep(workload)
    params = step.place(workload.init(document.run.seed))
    tree, fragmentation = cut(params, workload.merge_rule, document.fragments.count)
    device = DeviceFragments(tree, fragmentation, params)
    state = step.fresh_state(params)
    batches = iter(workload.data(0, 0))
    step.compile(params, state, next(batches))
    params = device.warm(params)
    workload.evaluate(params)
    prepared = clock.now()
    seconds = []
    for _ in range(MEASURED_STEPS):
        batch, before = next(batches), clock.now()
        params, state, loss = step(params, state, batch, workload.learning_rate(0))
        loss.block_until_ready()
        seconds.append(max(clock.now() - before, settings.step_seconds_min))
    figures = {
        "step_seconds": sorted(seconds)[len(seconds) // 2],
        "prepare_seconds": prepared - began,
        "parameter_count": tree.schema.size,
        "cache_dir": str(settings.cache_path),
    }
    print(json.dumps(figures), file=out)
    return ExitCode.OK
