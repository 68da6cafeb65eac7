# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Serve the report as JSON to authorized readers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AbstractContextManager, nullcontext

from aiohttp import web

from ..core.errors import AcceleratorError
from ..deadlines import within
from .connection_limit import IDLE_SECONDS
from .controller_metrics import REPORT_OUTCOMES, ControllerMetrics
from .fleet_report import FleetReport
from .health_server import CONNECTIONS
from .reader_authorization import PATH, ReaderAuthorizer

LOG = logging.getLogger(__name__)

SERVED, STALE, REFUSED, UNAVAILABLE = REPORT_OUTCOMES
RETRY_SECONDS = 10
#: The size of the parts in which the report is sent.
PART_BYTES = 256 * 1024


def add_report(
    application: web.Application, report: FleetReport, readers: ReaderAuthorizer, measurements: ControllerMetrics
) -> None:
    """Serve the report at PATH. While the API server does not answer, serve the last one, which contains its time."""

    async def get(request: web.Request) -> web.StreamResponse:
        verdict = await readers.judge(request.headers.get("Authorization", ""))
        if verdict.status != 200:
            measurements.reported(UNAVAILABLE if verdict.status == 503 else REFUSED)
            return refusal(verdict.status, verdict.why)
        with answering(request):
            return await answer(request)

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            made = await report.current()
        except AcceleratorError as error:
            if report.last is None:
                measurements.reported(UNAVAILABLE)
                return refusal(503, f"The report cannot be made: {error}")
            LOG.warning("the report is the last one: %s", error)
            measurements.reported(STALE)
            stale = {"Warning": '110 - "the report cannot be created now; see generated"'}
            return await _send(request, report.last.body, stale)
        measurements.reported(SERVED)
        return await _send(request, made.body, {})

    application.router.add_get(PATH, get)


def answering(request: web.Request) -> AbstractContextManager[None]:
    """Return a context in which the connection of a request is not idle: a report of a large fleet needs minutes."""
    connections = request.app.get(CONNECTIONS)
    client = request.transport.get_extra_info("peername") if request.transport is not None else None
    return nullcontext() if connections is None else connections.answering(client)


async def _send(request: web.Request, body: bytes, more: dict[str, str]) -> web.StreamResponse:
    """Send the report in parts. TLS encrypts each part at once, and the webhook answers between two parts."""
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store", **more}
    response = web.StreamResponse(headers=headers)
    response.content_length = len(body)
    await response.prepare(request)
    for start in range(0, len(body), PART_BYTES):
        await within(response.write(body[start : start + PART_BYTES]), IDLE_SECONDS)  # a reader that does not read
        await asyncio.sleep(0)
    await response.write_eof()
    return response


def refusal(status: int, why: str) -> web.Response:
    """Return the answer to a caller that may not read, or cannot be judged now."""
    retry = {"Retry-After": str(RETRY_SECONDS)}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: retry, 503: retry}.get(status, {})
    return web.Response(text=f"{why}\n", status=status, headers={"Cache-Control": "no-store", **headers})
