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


class Intake:
    """Claims of one instance; ``open`` says who serves them."""

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._served: asyncio.Future[Claims] = asyncio.get_running_loop().create_future()

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
        if self._served.done():
            return await work(self._served.result())
        began = time.monotonic()
        try:
            claims = await within(asyncio.shield(self._served), ANSWER_SECONDS)
        except asyncio.TimeoutError:
            return self._late(references, f"another instance of the driver {self._driver} has not handed over")
        # What has begun goes on though nobody waits for it; the kubelet's next call finds what became of it.
        task = asyncio.ensure_future(work(claims))
        left = ANSWER_SECONDS - (time.monotonic() - began)
        await asyncio.wait((task,), timeout=max(left, 0.0) + GRACE_SECONDS)
        return task.result() if task.done() else self._late(references, "it is under way and goes on")

    @staticmethod
    def _late(references: Sequence[ClaimReference], why: str) -> Mapping[str, Outcome]:
        return {each.uid: Outcome(error=f"After {ANSWER_SECONDS:g} s {why}; ask again") for each in references}
