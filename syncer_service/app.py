"""The composition root of the syncer: builds everything from the settings, runs it, takes it down.

    async with running_syncer(config, settings, stop) as syncer:
        await stop.wait_async()

Ports 0 are replaced by what the system gave: see `syncer.addresses`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import grpc
import grpc.aio
from grpc_reflection.v1alpha import reflection

from decoupled_diloco.command_line import software_version
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.syncer import SyncerMachine
from decoupled_diloco.runtime.channel import SERVER_OPTIONS
from decoupled_diloco.runtime.clock import Clock, MonotonicClock
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.health import Health, Verdict
from decoupled_diloco.runtime.lifecycle import ExitCode, StopRequest, TaskSupervisor
from decoupled_diloco.runtime.logs import get_logger
from decoupled_diloco.runtime.ports import Address, listen_error, parse_address
from decoupled_diloco.runtime.telemetry import Telemetry
from decoupled_diloco.runtime.tls import server_credentials
from decoupled_diloco.wire.methods import ADMIN_SERVICE, SYNCER_SERVICE, add_admin_service, add_syncer_service
from syncer_service.admin import AdminServicer
from syncer_service.agreement import Agreement
from syncer_service.buffers import BufferPool
from syncer_service.checkpoint_restore import find_restore_point, restore_into
from syncer_service.config import SyncerSettings
from syncer_service.driver import Driver, Tape
from syncer_service.ending import Ending
from syncer_service.export import check_output_dir
from syncer_service.exporting import Exports
from syncer_service.first_parameters import FirstParameters, check_first_parameters
from syncer_service.merge_threads import load_loops, loop_threads, merge_executor
from syncer_service.metrics import PREFIX, SyncerMetrics
from syncer_service.overview import Overview
from syncer_service.persistence import Persistence
from syncer_service.publications import Publications
from syncer_service.restart import check_same_run, take_up
from syncer_service.safekeeping import Safekeeping
from syncer_service.servicer import SyncerServicer
from syncer_service.serving import Executors, Serving
from syncer_service.sessions import Sessions
from syncer_service.shell import Shell
from syncer_service.store.durable import DurableStore
from syncer_service.store.interface import Restored, Store
from syncer_service.tape import EventTape, open_tape
from syncer_service.tape_file import Beginning
from syncer_service.uploads import Uploads
from syncer_service.warm_start import WarmStartError
from syncer_service.web import WebServer

BULK_THREADS: Final = 2
"""Threads that verify and copy chunks and encode payloads."""

CALLS_MAX: Final = 4096
"""Calls and streams at once on each gRPC port; gRPC refuses more with RESOURCE_EXHAUSTED."""

LIVENESS_SECONDS: Final = 10.0
"""A driver that has not come round for this long hangs."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the syncer listens, with the ports that were bound."""

    data: Address
    admin: Address
    http: Address

    @property
    def page(self) -> str:
        """URL of the status page."""
        host = Address("localhost", self.http.port) if self.http.host in ("0.0.0.0", "::") else self.http
        return f"http://{host}/"


@dataclass(frozen=True, slots=True)
class RunningSyncer:
    """A syncer that serves.

    Attributes:
        addresses: Where.
        serving: Its parts, for tests and for programs that embed it.
        overview: What can be seen of the run.
        telemetry: Its metrics.
        ending: What becomes of a finished run.
        safekeeping: Its checkpoints and its mirror.
    """

    addresses: Addresses
    serving: Serving
    overview: Overview
    telemetry: Telemetry
    ending: Ending
    safekeeping: Safekeeping


@asynccontextmanager
async def running_syncer(
    config: RunConfig,
    settings: SyncerSettings,
    stop: StopRequest,
    *,
    clock: Clock | None = None,
    tape: Tape | None = None,
    store: Store | None = None,
) -> AsyncIterator[RunningSyncer]:
    """Runs a syncer as long as the context lasts. A part that dies requests the stop with exit code 1.

    Args:
        config: The run file.
        settings: The process's own settings.
        stop: Requested when a finished run has ended, or when a part dies.
        clock: Where instants come from.
        tape: Where (instant, event) goes.
        store: Where the run's state is kept; default: in files in the state directory.

    Raises:
        ConfigError: An address cannot be listened on, or the TLS files, the output directory or the state directory
            cannot be used.
    """
    check_output_dir(settings.output_dir)
    clock = clock or MonotonicClock()
    async with AsyncExitStack() as stack:
        opened = store if store is not None else await asyncio.to_thread(_open_store, config, settings)
        parts = await _build(config, settings, stop, clock, tape, opened, stack)
        addresses = await _listen(settings, parts, stop, stack)
        log.info(
            "syncer_ready",
            run=config.run.id,
            page=addresses.page,
            learners=str(addresses.data),
            admin=str(addresses.admin),
            waits_for="learners",
        )
        try:
            yield RunningSyncer(
                addresses, parts.serving, parts.overview, parts.telemetry, parts.ending, parts.safekeeping
            )
        finally:
            parts.shut_down()


@dataclass(frozen=True, slots=True)
class _Parts:
    serving: Serving
    persistence: Persistence
    overview: Overview
    telemetry: Telemetry
    tasks: TaskSupervisor
    ending: Ending
    stop: StopRequest
    safekeeping: Safekeeping
    exports: Exports

    def shut_down(self) -> None:
        """Tells everybody who is connected."""
        error = PeerError(Reason.SHUTTING_DOWN, "the syncer is shutting down; train on and reconnect")
        self.stop.request("the syncer was closed")
        self.serving.sessions.close_all(error)
        for slot in self.serving.uploads:
            slot.stream.stop(error.text)
        self.serving.publications.following.close()


def _open_store(config: RunConfig, settings: SyncerSettings) -> Store:
    """Takes the state directory; what is damaged in it is dealt with now."""
    return DurableStore(settings.state_dir, config.to_policy(), settings.base_interval_commits)


async def _build(
    config: RunConfig,
    settings: SyncerSettings,
    stop: StopRequest,
    clock: Clock,
    tape: Tape | None,
    store: Store,
    stack: AsyncExitStack,
) -> _Parts:
    """Everything but the ports; what it starts is ended by the stack, last first."""
    policy = config.to_policy()
    telemetry = Telemetry(PREFIX, software_version())
    metrics = SyncerMetrics(telemetry)
    executors = Executors(
        bulk=stack.enter_context(ThreadPoolExecutor(BULK_THREADS, thread_name_prefix="bulk")),
        merge_loops=loop_threads(stack, settings.merge_threads),
        merge=merge_executor(stack),
        store=stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="store")),
    )
    stack.callback(store.close)
    after_tasks = stack.enter_context(ExitStack())
    tasks = TaskSupervisor(stop, log)
    stack.push_async_callback(tasks.close)
    tasks.start(load_loops(stack), "loading the loops of merges", may_finish=True)
    restored = await _open_run(config, settings, store, executors)
    machine = SyncerMachine(policy, initial_from_file=bool(config.run.start_from))
    driver = Driver(machine, clock, settings.queue_events_max, tape)
    agreement = Agreement(config.run.id, config.digest(), config.agreed_values(), policy.fragment_count)
    pool = BufferPool(settings.upload_buffer_bytes_max)
    uploads, sessions = Uploads(pool), Sessions()
    publications = Publications(store, executors.bulk, policy.download_encoding)
    serving = Serving(
        machine, driver, clock, agreement, store, executors, uploads, publications, sessions, metrics, store.epoch
    )
    persistence = Persistence(serving, tasks, stop)
    shell = Shell(serving, tasks, persistence)
    shell.first_parameters = FirstParameters(config.run.start_from, config.run.name_map, serving, stop)
    overview = Overview(serving, settings.queue_events_max)
    overview.safekeeping = safekeeping = Safekeeping(settings, serving, shell, after_tasks)
    exports = Exports(config, settings.output_dir, serving, shell, safekeeping.checkpoints)
    ending = Ending(settings, serving, shell, overview, stop, safekeeping, exports)
    driver.connect(shell.execute)
    began_at = clock.now()
    if restored is not None:
        await take_up(restored, serving, shell, began_at)
    if tape is None and (kept := _tape(settings, serving, restored, began_at)) is not None:
        driver.record(kept)
        overview.tape = kept
        after_tasks.callback(kept.close)
    metrics.connect(overview.figures)
    tasks.start(driver.run(), "driver")
    tasks.start(telemetry.watch_loop_lag(clock), "event-loop lag")
    tasks.start(ending.run(), "ending", may_finish=True)
    tasks.start(overview.tell_waits(), "telling what the run waits for")
    tasks.start(overview.tell_progress(), "telling how far the run is")
    safekeeping.start(tasks)
    stack.push_async_callback(safekeeping.catch_up, settings.drain_seconds)
    return _Parts(serving, persistence, overview, telemetry, tasks, ending, stop, safekeeping, exports)


async def _open_run(config: RunConfig, settings: SyncerSettings, store: Store, executors: Executors) -> Restored | None:
    """What the store holds of the run, after a restore point was put into it, if that is wanted; None: a new run."""
    loop, policy = asyncio.get_running_loop(), config.to_policy()
    restored = await loop.run_in_executor(executors.store, store.restored)
    point = await loop.run_in_executor(
        executors.bulk, find_restore_point, settings.restore_from, settings.state_dir, restored
    )
    if point is not None:
        check_same_run(point.held, config, f'syncer.restore_from = "{point.url}"')
    elif restored is not None:
        check_same_run(restored, config, f'syncer.state_dir = "{settings.state_dir}"')
    if config.run.start_from and point is None and (restored is None or not restored.fragments):
        try:
            await loop.run_in_executor(
                executors.bulk, check_first_parameters, config.run.start_from, config.run.name_map
            )
        except WarmStartError as error:
            raise ConfigError(str(error)) from error
    await loop.run_in_executor(
        executors.store, store.begin, config.run.id, config.agreed_values(), policy.fragment_count
    )
    if point is None:
        return restored
    return await loop.run_in_executor(executors.store, restore_into, store, settings.state_dir, point, policy)


def _tape(settings: SyncerSettings, serving: Serving, restored: Restored | None, began_at: float) -> EventTape | None:
    """The event tape of this start; None if none is wanted."""
    from_file = serving.machine.initial.from_file
    if restored is None:
        beginning = Beginning("new", began_at, initial_from_file=from_file)
    else:
        beginning = Beginning(
            "restored", began_at, initial_from_file=from_file, state=restored.state, newer=tuple(restored.newer)
        )
    return open_tape(
        settings.state_dir,
        serving.machine,
        beginning,
        epoch=serving.epoch,
        software_version=software_version(),
        clock=serving.clock,
        bytes_max=settings.tape_bytes_max,
    )


async def _listen(settings: SyncerSettings, parts: _Parts, stop: StopRequest, stack: AsyncExitStack) -> Addresses:
    """Opens the three ports."""
    health = _health(parts.serving, stop, (SYNCER_SERVICE, ADMIN_SERVICE))
    data, admin = (grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX) for _ in range(2))
    add_syncer_service(SyncerServicer(parts.serving, parts.persistence), data)
    add_admin_service(
        AdminServicer(
            parts.overview, parts.serving.driver, parts.persistence, parts.safekeeping.checkpoints, parts.exports
        ),
        admin,
    )
    bound = []
    for server, service, setting, text in (
        (data, SYNCER_SERVICE, "listen", settings.listen),
        (admin, ADMIN_SERVICE, "admin_listen", settings.admin_listen),
    ):
        health.add_to_server(server)
        reflection.enable_server_reflection((service, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
        bound.append(_bind(server, parse_address(text), setting, settings))
    web = WebServer(parse_address(settings.http_listen), parts.overview.page, parts.telemetry, health)
    http = await web.start()
    stack.push_async_callback(web.stop)
    for server in (data, admin):
        await server.start()
        stack.push_async_callback(server.stop, settings.drain_seconds)
    parts.tasks.start(health.publish_for_ever(), "health")
    return Addresses(bound[0], bound[1], http)


def _bind(server: grpc.aio.Server, address: Address, setting: str, settings: SyncerSettings) -> Address:
    _try_port(address, setting)
    try:
        if settings.tls_files is None:
            port = server.add_insecure_port(str(address))
        else:
            # Credentials serve one port: gRPC takes the first certificate from them only once.
            port = server.add_secure_port(str(address), server_credentials(settings.tls_files))
    except RuntimeError as error:
        raise listen_error(address, f"syncer.{setting}", error) from error
    return Address(address.host, port)


def _try_port(address: Address, setting: str) -> None:
    """Listens for a moment, because the system says why that fails and gRPC does not."""
    if address.port == 0:
        return
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise listen_error(address, f"syncer.{setting}", error) from error


def _health(serving: Serving, stop: StopRequest, services: tuple[str, ...]) -> Health:
    def readiness() -> Verdict:
        return Verdict(False, "shutting down") if stop.is_requested else Verdict(True)

    def liveness() -> Verdict:
        silent = serving.clock.now() - serving.driver.turned_at
        if silent > LIVENESS_SECONDS:
            return Verdict(False, f"the driver has not come round for {silent:.0f} s")
        return Verdict(True)

    return Health(readiness, liveness, services)


async def serve(config: RunConfig, settings: SyncerSettings, stop: StopRequest) -> int:
    """Runs a syncer until a stop is requested; returns the exit code."""
    async with running_syncer(config, settings, stop) as syncer:
        await stop.wait_async()
        log.info("syncer_stops", reason=stop.reason)
    if stop.exit_code == ExitCode.OK and syncer.ending.model_is_missing:
        return ExitCode.FAILED
    return stop.exit_code
