# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the complete node driver with the real GPUs of this host and the API server of the unit tests. It does not change
settings of the GPUs.
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

__all__ = ["exit_on_error", "restart", "run", "scene"]
SECONDS = 300


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """Yield a driver that has published the GPUs and is registered with the kubelet's API."""
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
                sys.exit(f"No GPU was published: {'; '.join((await made.status())['problems']) or 'no GPU was found'}")
            yield made
        finally:
            if hasattr(made, "task"):
                await made.stop()
            await made.api.stop()


async def restart(made: Scene) -> None:
    """Start the driver, or stop it and start it again."""
    if hasattr(made, "task"):
        await made.stop()
    made.backend = NvidiaBackend()  # type: ignore[assignment]
    await made.start()


def exit_on_error(error: str) -> None:
    """Exit if a call to the driver has returned an error. "" is a success."""
    if error:
        sys.exit(f"The driver rejected the call: {error}")


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario with a timeout. An unexpected result raises AssertionError."""

    async def with_timeout() -> None:
        await asyncio.wait_for(scenario(), SECONDS)

    asyncio.run(with_timeout())
