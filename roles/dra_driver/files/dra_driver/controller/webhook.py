# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Serve the admission webhook over HTTPS, on every controller, active or not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from aiohttp import web

from ..core.decoding import UndecodableObject, decode
from .admission import NoReview, Rules, answer
from .admission_queue import AdmissionQueue, close_with
from .controller_metrics import ControllerMetrics

LOG = logging.getLogger(__name__)

PATH = "/validate"
#: The size limit of a request. An AdmissionReview contains an object once or twice, and the API server stores none
#: above 1.5 MiB.
MOST_BYTES = 4 * 1024 * 1024


def application(
    rules: Rules, measurements: ControllerMetrics, classes: Callable[[], Mapping[str, str]] = dict
) -> web.Application:
    """Return the webhook. ``classes`` returns the kinds of devices of the cluster's classes, by name."""
    queue = AdmissionQueue()

    async def validate(request: web.Request) -> web.Response:
        began = time.perf_counter()
        outcome = "unreadable"
        try:
            kinds = dict(classes())
            answered = await queue.run(request, lambda body: answer(_document(body, rules.config_kinds), rules, kinds))
            outcome = "allowed" if answered["response"]["allowed"] else "refused"
        except NoReview as error:
            return web.Response(text=f"{error}\n", status=400)
        except asyncio.TimeoutError:
            outcome = "timeout"
            return web.Response(text="The request waited too long, or its body was not sent in time\n", status=503)
        finally:
            measurements.admission(outcome, time.perf_counter() - began)
        if outcome == "refused":
            LOG.info("refused: %s", answered["response"]["status"]["message"])
        return web.json_response(answered)

    made = web.Application(client_max_size=MOST_BYTES)
    made.router.add_post(PATH, validate)
    close_with(made, queue)
    return made


def _document(body: bytes, drivers: Collection[str]) -> Any:
    try:
        return decode(body, opaque_of=drivers).value
    except UndecodableObject as error:
        raise NoReview(str(error)) from None
    except ValueError as error:
        raise NoReview(f"The request body is not JSON: {error}") from None
