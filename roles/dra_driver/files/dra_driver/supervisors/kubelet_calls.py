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
from ..kubelet.server import Claims

# The serving part answers at its own timeout, so wait a little longer for it.
GRACE_SECONDS = 2.0
Outcomes = Mapping[str, Outcome]


class KubeletCalls:
    """Accept calls for one instance. ``open`` sets the part that serves them."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._served: asyncio.Future[Claims] = asyncio.get_running_loop().create_future()
        # Waiting calls are passed on in the order of their arrival: a Prepare never after a later Unprepare.
        self._order = asyncio.Lock()
        self._queued = 0

    def open(self, claims: Claims) -> None:
        """Pass calls on from now on, and the waiting ones."""
        self._served.set_result(claims)

    def close(self) -> None:
        """Queue calls from now on, until it is opened again."""
        if self._served.done():
            self._served = asyncio.get_running_loop().create_future()

    async def prepare(self, references: Sequence[ClaimReference]) -> Mapping[str, Outcome]:
        """Return one outcome for each claim, by UID."""
        return await self._pass(references, lambda claims: claims.prepare(references))

    async def unprepare(self, references: Sequence[ClaimReference]) -> Mapping[str, Outcome]:
        """Return one outcome for each claim, by UID."""
        return await self._pass(references, lambda claims: claims.unprepare(references))

    async def _pass(
        self, references: Sequence[ClaimReference], work: Callable[[Claims], Awaitable[Mapping[str, Outcome]]]
    ) -> Mapping[str, Outcome]:
        if not references:  # a probe's call
            return {}
        if self._served.done() and not self._queued:
            return await work(self._served.result())
        began = time.monotonic()
        self._queued += 1
        try:
            task = await within(self._begin(work), ANSWER_SECONDS)
        except asyncio.TimeoutError:
            return self._late(references, f"another instance of the driver {self._driver} has not handed over")
        finally:
            self._queued -= 1
        # Started work continues without a waiting caller. The kubelet's next call gets the result.
        left = ANSWER_SECONDS - (time.monotonic() - began)
        await asyncio.wait((task,), timeout=max(left, 0.0) + GRACE_SECONDS)
        return task.result() if task.done() else self._late(references, "it is in progress and continues")

    async def _begin(self, work: Callable[[Claims], Awaitable[Mapping[str, Outcome]]]) -> asyncio.Future[Outcomes]:
        """Start a call when calls can be served, after the calls that arrived earlier."""
        async with self._order:
            task = asyncio.ensure_future(work(await asyncio.shield(self._served)))
            await asyncio.sleep(0)  # the call reaches the claims before the next call starts
            return task

    @staticmethod
    def _late(references: Sequence[ClaimReference], why: str) -> Mapping[str, Outcome]:
        return {each.uid: Outcome(error=f"After {ANSWER_SECONDS:g} s {why}; ask again") for each in references}
