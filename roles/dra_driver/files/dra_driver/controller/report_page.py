# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Gives the report as JSON to those who may read it."""

from __future__ import annotations

import logging

from aiohttp import web

from ..core.errors import AcceleratorError
from .fleet import FleetReport
from .measurements import REPORT_OUTCOMES, Measurements
from .readers import PATH, Readers

LOG = logging.getLogger(__name__)

SERVED, STALE, REFUSED, UNAVAILABLE = REPORT_OUTCOMES
RETRY_SECONDS = 10


def add_report(application: web.Application, report: FleetReport, readers: Readers, measurements: Measurements) -> None:
    """Serve the report at PATH. While the API server does not answer, the last one, which says itself when it was made."""

    async def get(request: web.Request) -> web.Response:
        verdict = await readers.judge(request.headers.get("Authorization", ""))
        if verdict.status != 200:
            measurements.reported(UNAVAILABLE if verdict.status == 503 else REFUSED)
            return refusal(verdict.status, verdict.why)
        try:
            made = await report.current()
        except AcceleratorError as error:
            if report.last is None:
                measurements.reported(UNAVAILABLE)
                return refusal(503, f"The report cannot be made: {error}")
            LOG.warning("the report is the last one: %s", error)
            measurements.reported(STALE)
            return _json(report.last.body, {"Warning": '110 - "the API server does not answer; see generated"'})
        measurements.reported(SERVED)
        return _json(made.body, {})

    application.router.add_get(PATH, get)


def _json(body: bytes, more: dict[str, str]) -> web.Response:
    headers = {"Content-Type": "application/json", "Cache-Control": "no-store", **more}
    return web.Response(body=body, headers=headers)


def refusal(status: int, why: str) -> web.Response:
    """Return the answer to a caller that may not read, or cannot be judged now."""
    retry = {"Retry-After": str(RETRY_SECONDS)}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: retry, 503: retry}.get(status, {})
    return web.Response(text=f"{why}\n", status=status, headers={"Cache-Control": "no-store", **headers})
