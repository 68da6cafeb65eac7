# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Renew the token in the node's kubeconfig according to its own dates, whatever lifetime the server granted."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Callable

from ..api.client import ApiClient
from ..api.kubeconfig import Access, load_access
from ..api.throttling import spread
from ..api.token import read_claims
from ..core.errors import AcceleratorError
from ..core.host.system import System
from ..logs import StateLog
from ..renew_token import renew

LOG = logging.getLogger(__name__)

# Seconds between checks whether another program has changed the kubeconfig.
TICK_SECONDS = 30.0
RETRY_FIRST, RETRY_LIMIT = 10.0, 600.0
#: A change of the system clock, in seconds, after which the dates of the token are compared with it again.
STEP_SECONDS = 5.0


class TokenSupervisor:
    """Renew the token in one kubeconfig.

    ``lifetime`` is the requested lifetime in seconds; the server may grant less.
    """

    def __init__(
        self,
        client: ApiClient,
        kubeconfig: str,
        *,
        lifetime: int,
        system: System,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._kubeconfig = kubeconfig
        self.lifetime = lifetime
        self._system = system
        self._clock = clock
        self._monotonic = monotonic
        self._state = StateLog(LOG)
        self._retry = RETRY_FIRST
        #: The end of the token, in seconds since the epoch; 0 for an identity without a token.
        self.expires = 0.0

    def problem(self) -> str:
        """Return the current problem of the identity; "" if none is known."""
        if 0 < self.expires <= self._clock():
            return "the token has ended and could not be renewed"
        return ""

    async def run(self) -> None:
        """Check the token when due, after a change of the kubeconfig, and after a step of the system clock, until canceled.

        The wait until the next check uses the monotonic clock: the system clock can be set back at any time.
        """
        next_check, offset = self._monotonic(), self._offset()
        while True:
            if await self._client.reload_if_changed():
                LOG.info("the kubeconfig has changed and was read again")
                next_check = self._monotonic()
            if abs(self._offset() - offset) > STEP_SECONDS or self._monotonic() >= next_check:
                offset = self._offset()
                next_check = self._monotonic() + await asyncio.to_thread(self.renew_if_due)
                await self._client.reload_if_changed()
            await asyncio.sleep(min(TICK_SECONDS, max(next_check - self._monotonic(), 1.0)))

    def _offset(self) -> float:
        """Return the difference between the system clock and the monotonic clock, which a step of the system clock changes."""
        return self._clock() - self._monotonic()

    def _ends(self, access: Access) -> float:
        token = self._system.read_text(access.token_file) if access.token_file else access.token
        claims = read_claims(token) if token else None
        return claims.expires if claims is not None else 0.0

    def renew_if_due(self) -> float:
        """Renew the token if it is due. Return the seconds until the next check. Failures are logged."""
        try:
            access = load_access(self._kubeconfig)
            claims = read_claims(access.token) if access.token else None
            self.expires = self._ends(access)
            if claims is None or not claims.node:
                return RETRY_LIMIT  # a certificate, a pod's token, or a token that another program renews
            done = renew(self._kubeconfig, lifetime=self.lifetime, system=self._system)
        except (AcceleratorError, OSError) as error:
            self._state.report(f"the token of this node's identity is not renewed: {error}", level=logging.WARNING)
            wait, self._retry = self._retry, min(self._retry * 2, RETRY_LIMIT)
            return max(wait, spread(getattr(error, "retry_after", None) or 0.0))
        self._retry = RETRY_FIRST
        self.expires = done.claims.expires
        if done.renewed:
            LOG.info("%s", done.text)
        if done.shortened:
            self._state.report(done.shortened, level=logging.WARNING)
        return done.claims.seconds_until_check(self._clock())
