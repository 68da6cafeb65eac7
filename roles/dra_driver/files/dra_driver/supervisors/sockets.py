# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Serves the kubelet, and goes on serving it whatever becomes of the sockets."""

from __future__ import annotations

import asyncio
import logging

from ..kubelet.server import DRAIN_SECONDS, PluginServer
from ..kubelet.sockets import FolderReplaced, SocketError
from ..logs import StateLog, fields
from .shared import Conditions

LOG = logging.getLogger(__name__)

PART = "sockets"
RETRY_SECONDS = 2.0


class SocketKeeper:
    """The servers of one driver."""

    def __init__(self, server: PluginServer, *, driver: str, conditions: Conditions) -> None:
        self._server = server
        self._driver = driver
        self._conditions = conditions

    async def start(self) -> None:
        """Serve; tries until the sockets can be made. Raises FolderReplaced."""
        state = StateLog(LOG)
        while True:
            try:
                await self._server.start()
            except FolderReplaced:
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
        """Serve again whenever a socket is lost, until cancelled. Raises FolderReplaced: the process has to begin anew."""
        while True:
            try:
                await self._server.watch_sockets()
            except FolderReplaced:
                raise
            except SocketError as error:
                LOG.error("%s", error)  # noqa: TRY400  the machine is at fault, not the code
                self._conditions.report(PART, str(error))
                await self._server.stop()
                await asyncio.sleep(RETRY_SECONDS)
                await self.start()

    async def stop(self, grace: float = DRAIN_SECONDS, settle: float = 0.0) -> None:
        """Withdraw from the kubelet; for ``settle`` seconds calls are still taken, and those under way get ``grace`` seconds then."""
        await self._server.stop(grace, settle)

    @property
    def problem(self) -> str:
        """What keeps the kubelet from using the driver though it serves; "" when it does."""
        return "" if self._server.registered else "the kubelet has not registered the driver"
