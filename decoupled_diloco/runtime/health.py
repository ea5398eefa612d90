"""Readiness and liveness for gRPC (grpc.health.v1) and HTTP probes, computed when somebody asks.

A probe is a function that returns a `Verdict`, so that whoever looks also sees why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

READINESS = "readiness"
"""Service name under which readiness is asked for; the empty name means the same."""
LIVENESS = "liveness"
"""Service name under which liveness is asked for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a probe."""

    is_well: bool
    reason: str = "ok"


Probe = Callable[[], Verdict]


class Health:
    """The probes of one process.

    Args:
        readiness: Whether calls can be served now.
        liveness: Whether the process works; if not, it should be restarted.
        services: Full names of gRPC services that are as ready as the process.
    """

    def __init__(self, readiness: Probe, liveness: Probe, services: tuple[str, ...] = ()) -> None:
        self._probes: Mapping[str, Probe] = {
            "": readiness,
            READINESS: readiness,
            LIVENESS: liveness,
            **dict.fromkeys(services, readiness),
        }
        self._servicer = _AskingServicer(self)

    def verdict(self, service: str = "") -> Verdict | None:
        """The present verdict on a service, None for an unknown one. A probe that raises is not well."""
        probe = self._probes.get(service)
        if probe is None:
            return None
        try:
            return probe()
        except Exception as error:  # a broken probe must not look like health
            return Verdict(False, f"the probe failed: {type(error).__name__}: {error}")

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Adds grpc.health.v1.Health to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def publish(self) -> None:
        """Tells those who watch (Health.Watch) the present verdicts."""
        for service in self._probes:
            await self._servicer.set(service, self._serving(service))

    async def publish_for_ever(self, interval_seconds: float = 1.0) -> None:
        """Runs `publish` at an interval, until it is cancelled."""
        while True:
            await self.publish()
            await asyncio.sleep(interval_seconds)

    def _serving(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        verdict = self.verdict(service)
        if verdict is None:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if verdict.is_well:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING


_Context: TypeAlias = "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"


class _AskingServicer(health.aio.HealthServicer):  # type: ignore[misc, name-defined]  # not in the stubs
    """The stock servicer, with Check answered by the probe instead of by the last published state."""

    def __init__(self, owner: Health) -> None:
        super().__init__()
        self._owner = owner

    async def Check(  # noqa: N802  # the name of the RPC
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        """Answers with the present verdict."""
        status = self._owner._serving(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f'there is no service "{request.service}"')
        return health_pb2.HealthCheckResponse(status=status)
