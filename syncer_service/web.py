"""The HTTP port: metrics, probes, and a plain status page. Read only, no login."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from typing import Final

from aiohttp import web

from decoupled_diloco.runtime.health import LIVENESS, READINESS, Health
from decoupled_diloco.runtime.ports import Address, listen_error
from decoupled_diloco.runtime.telemetry import Telemetry
from decoupled_diloco.wire.admin import Plain

PAGE_FILE: Final = "status_page.html"

REQUEST_BYTES_MAX: Final = 1 << 14
"""Nobody has anything to send here."""

SECURITY_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class WebServer:
    """The HTTP server of one process.

    Args:
        address: Where to listen.
        read_page: What the status page shows.
        telemetry: The metrics.
        health: The probes.
    """

    def __init__(self, address: Address, read_page: Callable[[], Plain], telemetry: Telemetry, health: Health) -> None:
        self._address = address
        self._read_page = read_page
        self._telemetry = telemetry
        self._health = health
        self._page = resources.files("syncer_service").joinpath(PAGE_FILE).read_text(encoding="utf-8")
        application = web.Application(client_max_size=REQUEST_BYTES_MAX)
        application.add_routes(
            [
                web.get("/", self._status_page),
                web.get("/status.json", self._status),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._liveness),
                web.get("/readyz", self._readiness),
            ]
        )
        application.on_response_prepare.append(_secure)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)

    async def start(self) -> Address:
        """Listens; returns the address with the port that was bound.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._address.host, self._address.port, reuse_port=False)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise listen_error(self._address, "syncer.http_listen", error) from error
        port = self._runner.addresses[0][1]
        return Address(self._address.host, port)

    async def stop(self) -> None:
        """Ends it."""
        await self._runner.cleanup()

    async def _status_page(self, request: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")

    async def _status(self, request: web.Request) -> web.Response:
        text = json.dumps(self._read_page(), allow_nan=False, default=str)
        return web.Response(text=text, content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        content_type, body = self._telemetry.exposition()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _liveness(self, request: web.Request) -> web.Response:
        return self._probe(LIVENESS)

    async def _readiness(self, request: web.Request) -> web.Response:
        return self._probe(READINESS)

    def _probe(self, service: str) -> web.Response:
        verdict = self._health.verdict(service)
        assert verdict is not None
        return web.Response(text=verdict.reason + "\n", status=200 if verdict.is_well else 503)


async def _secure(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
