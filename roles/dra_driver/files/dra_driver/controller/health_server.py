# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Serve the controller's liveness, readiness, and metrics over HTTP."""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Callable

from aiohttp import web

from ..logs import StateLog
from . import connection_limit
from .connection_limit import ConnectionLimit, listen

LOG = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
#: Seconds that running requests have to finish when the server ends.
FINISH_SECONDS = 5.0
#: The connections of the server of an application.
CONNECTIONS = web.AppKey("connections", ConnectionLimit)


async def keep_serving(
    application: Callable[[], web.Application], address: str, what: str, context: ssl.SSLContext | None = None
) -> None:
    """Serve at host:port until canceled. While another program uses the port, the controller runs without this server.

    The connections are limited, and idle ones are closed (connection_limit.py).
    """
    host, _colon, port = address.rpartition(":")
    state = StateLog(LOG)
    while True:
        limit, served = ConnectionLimit(), application()
        served[CONNECTIONS] = limit
        runner = web.AppRunner(
            served, access_log=None, shutdown_timeout=FINISH_SECONDS, keepalive_timeout=connection_limit.IDLE_SECONDS
        )
        await runner.setup()
        try:
            for listener in await listen(host.strip("[]"), int(port), limit):
                await web.SockSite(runner, listener, ssl_context=context).start()
            state.report(f"{what} is served at {address}")
            await limit.close_idle()
        except OSError as error:
            text = f"{what} is not served at {address}: {error.strerror or error}; retrying until it is free"
            state.report(text, level=logging.WARNING)
        finally:
            await runner.cleanup()
        await asyncio.sleep(RETRY_SECONDS)


def status_application(metrics: Callable[[], bytes] | None, problems: Callable[[], tuple[str, ...]]) -> web.Application:
    """Serve /healthz (the process runs), /readyz (ready, or the reason why not), and /metrics if ``metrics`` is set."""

    async def alive(_request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_request: web.Request) -> web.Response:
        found = problems()
        return web.Response(text="\n".join(found or ("ok",)) + "\n", status=503 if found else 200)

    async def counted(_request: web.Request) -> web.Response:
        text = metrics() if metrics is not None else b""
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    application = web.Application()
    application.router.add_get("/healthz", alive)
    application.router.add_get("/readyz", ready)
    if metrics is not None:
        application.router.add_get("/metrics", counted)
    return application
