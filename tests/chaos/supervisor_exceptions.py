# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Inject exceptions into the supervisors of a driver, in its own process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from dra_driver import node, serving, vendor
from dra_driver.supervisors import driver_state

#: The time until a supervisor gets an exception (minimum, maximum), and until it restarts, in seconds.
SHORTEST, LONGEST, PAUSE = 1.0, 6.0, 0.3


async def keep(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run a supervisor as the driver does, and end it repeatedly with an exception."""

    async def defective() -> None:
        task = asyncio.ensure_future(work())
        try:
            done, _pending = await asyncio.wait((task,), timeout=random.uniform(SHORTEST, LONGEST))
            if done:
                return task.result()
            raise RuntimeError(f"a defect in {name}")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    await driver_state.keep_running(name, defective)


def inject() -> None:
    """Inject exceptions into each supervisor from now on."""
    driver_state.RETRY_LIMIT = PAUSE
    for module in (node, serving, vendor):
        module.keep = keep  # type: ignore[attr-defined]
