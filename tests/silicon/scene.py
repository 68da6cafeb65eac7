# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the complete node driver on this host's real GPUs with the unit tests' model of the API server. It changes no
setting of a GPU.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/unit/dra_driver"), str(ROOT / "tests/unit/core")]

from dra_driver.core.vendors.nvidia.backend import NvidiaBackend  # noqa: E402
from vendor_scene import Scene  # noqa: E402

__all__ = ["expect_none", "restart", "run", "scene"]
SECONDS = 300


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """Run a driver that has published GPUs and is registered."""
    # Socket paths must be short.
    with tempfile.TemporaryDirectory(prefix="dra-", dir="/tmp") as name:
        made = Scene(Path(name))
        made.settings = {"layout": []}
        await made.api.start()
        try:
            await restart(made)
            await made.register()
            try:
                await made.until(made.devices)
            except AssertionError:
                sys.exit(f"No GPU was published: {'; '.join((await made.status())['problems']) or 'none was found'}")
            yield made
        finally:
            if hasattr(made, "task"):
                await made.stop()
            await made.api.stop()


async def restart(made: Scene) -> None:
    """Start the driver, or replace its process by another one."""
    if hasattr(made, "task"):
        await made.stop()
    made.backend = NvidiaBackend()  # type: ignore[assignment]
    await made.start()


def expect_none(error: str) -> None:
    """Exit with the error of a driver's call; "" is no error."""
    if error:
        sys.exit(f"Refused: {error}")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario to its end. An unexpected result ends the program with an assertion."""

    async def within() -> None:
        await asyncio.wait_for(scenario(), SECONDS)

    asyncio.run(within())
