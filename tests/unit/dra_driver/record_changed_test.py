# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The record of a claim changes while a call for it waits for the claim's device: the call acts on the record as it is then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from claim_steps import SMALL, prepare, run, unprepare
from dra_driver.claims.records import ClaimReference
from dra_driver.metrics import NoMetrics, Stopwatch
from machine_model import Claims, Node


async def forget(node: Node, claim: ClaimReference) -> str:
    await node.service.forget(claim.uid)
    return ""


async def forget_ahead(node: Node, claim: ClaimReference) -> str:
    node.service.ahead.add(claim.uid)
    await node.service.forget_ahead(claim.uid)
    return ""


async def restore(node: Node, claim: ClaimReference) -> str:
    await node.service.restore(claim.uid)
    return ""


async def prepare_suspect(node: Node, claim: ClaimReference) -> str:
    node.service.suspect.add(claim.uid)
    return await prepare(node, claim)


async def while_device_is_held(
    node: Node, claim: ClaimReference, call: Awaitable[str], change: Callable[[], Awaitable[None]]
) -> str:
    """Let a call begin, and change the claim as the holder of its device does."""
    async with node.service.holding([node.gpus.template(0).uuid]):
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0.1)  # it has read the record and waits for the device
        await change()
    return await task


def moving(node: Node, claim: ClaimReference) -> Callable[[], Awaitable[None]]:
    """Destroy the claim's partition and create it again: it has another number and another UUID."""

    async def move() -> None:
        record = node.store.claims[claim.uid]
        held = record.devices[0]
        assert held.instance_id is not None
        node.backend.destroy_partition(held.device_uuid, held.instance_id)
        moved = await node.service.make_again(record, Stopwatch(NoMetrics(), "restore"))
        assert moved is not None and moved.devices[0].instance_id != held.instance_id

    return move


CALLS = [unprepare, forget, forget_ahead]


@pytest.mark.parametrize("call", CALLS)
def test_partition_that_was_moved_meanwhile_is_destroyed(
    tmp_path: Path, call: Callable[[Node, ClaimReference], Awaitable[str]]
) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        assert await while_device_is_held(node, claim, call(node, claim), moving(node, claim)) == ""
        assert not node.store.claims
        assert not node.partitions()
        assert not node.cdi_files()
        assert not node.owing()

    run(tmp_path, scenario)


@pytest.mark.parametrize("call", [restore, prepare_suspect])
def test_partition_that_was_moved_meanwhile_is_the_claims(
    tmp_path: Path, call: Callable[[Node, ClaimReference], Awaitable[str]]
) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        assert await while_device_is_held(node, claim, call(node, claim), moving(node, claim)) == ""
        (partition,) = node.gpus.devices()[0].partitions
        assert node.store.claims[claim.uid].devices[0].instance_id == partition.instance_id

    run(tmp_path, scenario)


@pytest.mark.parametrize("call", [*CALLS, restore, prepare_suspect])
def test_claim_that_was_undone_meanwhile_stays_away(
    tmp_path: Path, call: Callable[[Node, ClaimReference], Awaitable[str]]
) -> None:
    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""

        async def undo() -> None:
            await node.service.undo(node.store.claims[claim.uid])

        error = await while_device_is_held(node, claim, call(node, claim), undo)
        assert ("calls again" in error) == (call is prepare_suspect)
        assert not node.store.claims
        assert not node.partitions()
        assert not node.cdi_files()
        assert not node.service.suspect
        assert await prepare(node, claim) == ""

    run(tmp_path, scenario)
