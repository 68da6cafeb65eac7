# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Serve /metrics over TLS to callers that the API server authorizes, for the node driver and the controller."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from .api.client import ApiClient
from .controller.health_server import keep_serving
from .controller.reader_authorization import METRICS_AUDIENCE, METRICS_KEPT_SECONDS, METRICS_PATH, ReaderAuthorizer
from .controller.report_endpoint import refusal
from .controller.serving_certificate import load_pair
from .core.certificates import KeyPair
from .logs import StateLog

LOG = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: How often the files of the certificate are checked for changes, in seconds.
CHECK_SECONDS = 60.0
FileStamps = tuple[tuple[int, int], ...]


def metrics_readers(client: ApiClient) -> ReaderAuthorizer:
    """Return the authorizer for metrics: it accepts tokens for METRICS_AUDIENCE with the right to get METRICS_PATH."""
    right = f"the nonResourceURL {METRICS_PATH}"
    return ReaderAuthorizer(
        client, path=METRICS_PATH, audience=METRICS_AUDIENCE, right=right, kept=METRICS_KEPT_SECONDS
    )


def add_metrics(application: web.Application, text: Callable[[], bytes], readers: ReaderAuthorizer | None) -> None:
    """Serve the metrics at METRICS_PATH; with ``readers`` None, to all callers. ``text`` runs on a thread."""

    async def get(request: web.Request) -> web.Response:
        if readers is not None:
            verdict = await readers.judge(request.headers.get("Authorization", ""))
            if verdict.status != 200:
                return refusal(verdict.status, verdict.why)
        return web.Response(body=await asyncio.to_thread(text), headers={"Content-Type": CONTENT_TYPE})

    application.router.add_get(METRICS_PATH, get)


async def keep_serving_metrics(
    text: Callable[[], bytes], address: str, *, readers: ReaderAuthorizer | None, certificate: str = "", key: str = ""
) -> None:
    """Serve the metrics at host:port until cancelled.

    ``certificate`` and ``key`` are paths of PEM files for TLS. Changed files are loaded while the server runs. The
    server starts after the files were first loaded.
    """

    def application() -> web.Application:
        made = web.Application()
        add_metrics(made, text, readers)
        return made

    if not certificate:
        await keep_serving(application, address, "the metrics endpoint")
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    loaded = asyncio.Event()
    reloading = asyncio.create_task(_keep_loading(context, certificate, key, loaded))
    try:
        await loaded.wait()
        await keep_serving(application, address, "the metrics endpoint", context)
    finally:
        reloading.cancel()


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    load_pair(context, KeyPair(certificate.read_bytes(), key.read_bytes()))


async def _keep_loading(context: ssl.SSLContext, certificate: str, key: str, loaded: asyncio.Event) -> None:
    """Load the certificate at each change of its files.

    The previous certificate stays in use while the new files cannot be loaded.
    """
    state = StateLog(LOG)
    last: FileStamps = ()
    while True:
        try:
            stamp = tuple((seen.st_ino, seen.st_mtime_ns) for seen in (Path(certificate).stat(), Path(key).stat()))
            if stamp != last:
                await asyncio.to_thread(_load, context, Path(certificate), Path(key))
                last = stamp
                loaded.set()
                state.report("the certificate of the metrics endpoint is loaded", certificate=certificate)
        except OSError as error:  # includes SSLError
            problem = f"cannot load the certificate of the metrics endpoint: {error.strerror or error}"
            state.report(problem, level=logging.WARNING, certificate=certificate, key=key)
        await asyncio.sleep(CHECK_SECONDS)
