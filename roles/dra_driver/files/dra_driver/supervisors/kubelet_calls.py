# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Accept the kubelet's calls. While another instance is active, the calls wait for its handover."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Callable

from ..claims.call_results import ANSWER_SECONDS, Outcome
from ..claims.store.records import ClaimReference
from ..deadlines import within
from ..kubelet.server import ClaimHandler

# Seconds of waiting beyond ANSWER_SECONDS, the timeout with which the claims answer themselves.
MARGIN_SECONDS = 2.0
Outcomes = Mapping[str, Outcome]


class KubeletCalls:
    """Accept the calls of the kubelet, and forward them to the claims that ``open`` sets. Until then the calls wait."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._claims: asyncio.Future[ClaimHandler] = asyncio.get_running_loop().create_future()
        # Waiting calls are forwarded in the order of their arrival. A Prepare must not run after a later Unprepare.
        self._order = asyncio.Lock()
        self._queued = 0

    def open(self, claims: ClaimHandler) -> None:
        """Forward new calls and the waiting ones to ``claims``."""
        self._claims.set_result(claims)

    def close(self) -> None:
        """Let new calls wait until ``open`` is called again."""
        if self._claims.done():
            self._claims = asyncio.get_running_loop().create_future()

    async def prepare(self, references: Sequence[ClaimReference]) -> Outcomes:
        """Return one outcome for each claim, by UID."""
        return await self._forward(references, lambda claims: claims.prepare(references))

    async def unprepare(self, references: Sequence[ClaimReference]) -> Outcomes:
        """Return one outcome for each claim, by UID."""
        return await self._forward(references, lambda claims: claims.unprepare(references))

    async def _forward(
        self, references: Sequence[ClaimReference], work: Callable[[ClaimHandler], Awaitable[Outcomes]]
    ) -> Outcomes:
        if not references:  # a probe's call
            return {}
        if self._claims.done() and not self._queued:
            return await work(self._claims.result())
        began = time.monotonic()
        self._queued += 1
        try:
            task = await within(self._start_in_order(work), ANSWER_SECONDS)
        except asyncio.TimeoutError:
            return self._timeout_outcomes(
                references, f"another instance of the driver {self._driver} has not handed over"
            )
        finally:
            self._queued -= 1
        # Started work continues without a waiting caller. The kubelet's next call gets the result.
        left = ANSWER_SECONDS - (time.monotonic() - began)
        await asyncio.wait((task,), timeout=max(left, 0.0) + MARGIN_SECONDS)
        return task.result() if task.done() else self._timeout_outcomes(references, "it is in progress and continues")

    async def _start_in_order(self, work: Callable[[ClaimHandler], Awaitable[Outcomes]]) -> asyncio.Future[Outcomes]:
        """Start a call when calls can be served, after the calls that arrived earlier."""
        async with self._order:
            task = asyncio.ensure_future(work(await asyncio.shield(self._claims)))
            await asyncio.sleep(0)  # the call reaches the claims before the next call starts
            return task

    @staticmethod
    def _timeout_outcomes(references: Sequence[ClaimReference], why: str) -> Outcomes:
        return {each.uid: Outcome(error=f"After {ANSWER_SECONDS:g} s {why}; ask again") for each in references}
