# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Takes the kubelet's calls, also while another instance of the driver still serves: they wait for it to hand over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Callable

from ..claims.answers import ANSWER_SECONDS, Outcome
from ..claims.records import ClaimReference
from ..deadlines import within
from ..kubelet.server import Claims

# Who serves a call gives an answer of his own when his time is up; it is waited for.
GRACE_SECONDS = 2.0
Outcomes = Mapping[str, Outcome]


class Intake:
    """Claims of one instance; ``open`` says who serves them."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._served: asyncio.Future[Claims] = asyncio.get_running_loop().create_future()
        # Calls that have to wait are passed on in the order of their arrival: a Prepare never after a later Unprepare.
        self._order = asyncio.Lock()
        self._queued = 0

    def open(self, claims: Claims) -> None:
        """Pass calls on from now on, those that wait among them."""
        self._served.set_result(claims)

    def close(self) -> None:
        """Have calls wait from now on, until it is opened again."""
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
        if not references:  # a probe's call: it asks whether somebody answers
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
        # What has begun goes on though nobody waits for it; the kubelet's next call finds what became of it.
        left = ANSWER_SECONDS - (time.monotonic() - began)
        await asyncio.wait((task,), timeout=max(left, 0.0) + GRACE_SECONDS)
        return task.result() if task.done() else self._late(references, "it is under way and goes on")

    async def _begin(self, work: Callable[[Claims], Awaitable[Mapping[str, Outcome]]]) -> asyncio.Future[Outcomes]:
        """Begin a call when it may be served, and after the calls that had arrived before it."""
        async with self._order:
            task = asyncio.ensure_future(work(await asyncio.shield(self._served)))
            await asyncio.sleep(0)  # it has reached the claims before the next call begins
            return task

    @staticmethod
    def _late(references: Sequence[ClaimReference], why: str) -> Mapping[str, Outcome]:
        return {each.uid: Outcome(error=f"After {ANSWER_SECONDS:g} s {why}; ask again") for each in references}
