# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stream of device health to the kubelet. Protocol only, no decisions.

Facts: the kubelet opens one stream for each driver, and shows the health in the status of pods. A device without a
report within the timeout (30 seconds for kubelets without a configurable timeout) counts as unknown, and so do all
devices after the end of the stream.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

# Seconds between repeated reports: well within the kubelet's timeout, also if one report is late.
REPEAT_SECONDS = 10.0
TIMEOUT_SECONDS = 30
MESSAGE_LIMIT = 1024


class DeviceState(enum.IntEnum):
    """The health of a device, with the protocol's numbers."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


@dataclass(frozen=True)
class DeviceReport:
    """The health of one published device. ``seen_at`` is the time of the scan, in seconds since the epoch."""

    pool: str
    name: str
    state: DeviceState
    message: str = ""
    seen_at: float = 0.0


class HealthSource(Protocol):
    """Returns the health of devices."""

    def reports(self) -> tuple[DeviceReport, ...]:
        """Return the current health of all devices."""

    async def changed(self, seconds: float) -> None:
        """Wait until the health may have changed, up to ``seconds``."""


class HealthService:
    """NodeWatchResources for one version of the messages."""

    def __init__(self, source: HealthSource, messages: Any, closing: asyncio.Event) -> None:
        self._source = source
        self._messages = messages
        self._closing = closing

    async def NodeWatchResources(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """Send all devices, again after a change, and repeatedly before the kubelet's timeout."""
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            while not closing.done():
                yield self._response(self._source.reports())
                changed = asyncio.ensure_future(self._source.changed(REPEAT_SECONDS))
                await asyncio.wait((changed, closing), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            closing.cancel()

    def _response(self, reports: tuple[DeviceReport, ...]) -> Any:
        response = self._messages.NodeWatchResourcesResponse()
        for report in reports:
            response.devices.append(
                self._messages.DeviceHealth(
                    device=self._messages.DeviceIdentifier(pool_name=report.pool, device_name=report.name),
                    health=int(report.state),
                    last_updated_time=int(report.seen_at),
                    health_check_timeout_seconds=TIMEOUT_SECONDS,
                    message=_shortened(report.message),
                )
            )
        return response


def _shortened(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 3] + "..."
