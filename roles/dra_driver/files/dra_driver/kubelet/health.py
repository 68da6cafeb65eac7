# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The stream over which the kubelet learns how devices are: protocol only, no decisions.

Facts: the kubelet opens one stream for each driver and shows in the status of pods what it hears. What it does not hear of
again within the timeout, 30 seconds for those that know no other, counts as unknown; so does everything once the stream ends.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

# All is sent again so often, in seconds: well within the kubelet's timeout, also when one report is late.
REPEAT_SECONDS = 10.0
TIMEOUT_SECONDS = 30
MESSAGE_LIMIT = 1024


class DeviceState(enum.IntEnum):
    """How a device is, by the protocol's numbers."""

    UNKNOWN = 0
    HEALTHY = 1
    UNHEALTHY = 2


@dataclass(frozen=True)
class DeviceReport:
    """How one published device is; ``seen_at`` is when that was looked at, in seconds since the epoch."""

    pool: str
    name: str
    state: DeviceState
    message: str = ""
    seen_at: float = 0.0


class HealthSource(Protocol):
    """Who knows how the devices are."""

    def reports(self) -> tuple[DeviceReport, ...]:
        """Return how all devices are at this moment."""

    async def changed(self, seconds: float) -> None:
        """Wait until that may have changed, for so many seconds at most."""


class HealthService:
    """NodeWatchResources for one version of the messages."""

    def __init__(self, source: HealthSource, messages: Any, closing: asyncio.Event) -> None:
        self._source = source
        self._messages = messages
        self._closing = closing

    async def NodeWatchResources(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """Send all devices, then all again when something changes, and before the kubelet takes them for unknown."""
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
                    message=_short(report.message),
                )
            )
        return response


def _short(message: str) -> str:
    return message if len(message) <= MESSAGE_LIMIT else message[: MESSAGE_LIMIT - 3] + "..."
