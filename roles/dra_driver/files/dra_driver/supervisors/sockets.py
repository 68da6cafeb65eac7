# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Serve the kubelet, and serve again after a socket is lost."""

from __future__ import annotations

import asyncio
import logging

from ..kubelet.server import DRAIN_SECONDS, PluginServer
from ..kubelet.sockets import DirectoryReplaced, SocketError
from ..logs import StateLog, fields
from .driver_state import Conditions

LOG = logging.getLogger(__name__)

PART = "sockets"
RETRY_SECONDS = 2.0


class SocketSupervisor:
    """Run the servers of one driver."""

    def __init__(self, server: PluginServer, *, driver: str, conditions: Conditions) -> None:
        self._server = server
        self._driver = driver
        self._conditions = conditions

    async def start(self) -> None:
        """Start to serve. Retries until the sockets can be created. Raises DirectoryReplaced."""
        state = StateLog(LOG)
        while True:
            try:
                await self._server.start()
            except DirectoryReplaced:
                raise
            except SocketError as error:
                state.report(str(error), level=logging.ERROR)
                self._conditions.report(PART, str(error))
                await self._server.stop()
                await asyncio.sleep(RETRY_SECONDS)
            else:
                LOG.info("serving the kubelet", extra=fields(driver=self._driver))
                self._conditions.report(PART)
                return

    async def run(self) -> None:
        """Serve again when a socket is lost, until canceled. Raises DirectoryReplaced: the process must restart."""
        while True:
            try:
                await self._server.watch_sockets()
            except DirectoryReplaced:
                raise
            except SocketError as error:
                LOG.error("%s", error)  # noqa: TRY400  the machine is at fault, not the code
                self._conditions.report(PART, str(error))
                await self._server.stop()
                await asyncio.sleep(RETRY_SECONDS)
                await self.start()

    async def stop(self, grace: float = DRAIN_SECONDS, settle: float = 0.0) -> None:
        """Withdraw from the kubelet.

        New calls are accepted for ``settle`` seconds, and running calls then have ``grace`` seconds to finish.
        """
        await self._server.stop(grace, settle)

    @property
    def problem(self) -> str:
        """Return the reason why the kubelet does not use the serving driver; "" if it does."""
        return "" if self._server.registered else "the kubelet has not registered the driver"
