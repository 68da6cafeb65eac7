# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Scenarios of claims on a model node, with the calls of a kubelet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dra_driver.claims.store.records import ClaimReference
from machine_model import Claims, Node

SMALL = "gpu-0-mig-1g10gb-19-0"
SMALL_2 = "gpu-0-mig-1g10gb-19-1"


def run(directory: Path, scenario: Callable[[Node, Claims], Awaitable[None]], **options: Any) -> None:
    """Run a scenario on a started node."""

    async def main() -> None:
        claims = Claims()
        node = Node(directory, claims, **options)
        await node.start()
        try:
            await scenario(node, claims)
        finally:
            node.close()

    asyncio.run(main())


async def prepare_all(node: Node, *references: ClaimReference) -> list[str]:
    """Prepare claims in one call, and return the error of each ("" for success)."""
    outcomes = await node.service.prepare(references)
    assert sorted(outcomes) == sorted(reference.uid for reference in references)
    return [outcomes[reference.uid].error for reference in references]


async def unprepare_all(node: Node, *references: ClaimReference) -> list[str]:
    """Unprepare claims in one call, and return the error of each ("" for success)."""
    outcomes = await node.service.unprepare(references)
    return [outcomes[reference.uid].error for reference in references]


async def prepare(node: Node, reference: ClaimReference) -> str:
    """Prepare one claim, and return its error ("" for success)."""
    return (await prepare_all(node, reference))[0]


async def unprepare(node: Node, reference: ClaimReference) -> str:
    """Unprepare one claim, and return its error ("" for success)."""
    return (await unprepare_all(node, reference))[0]
