# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The record of a claim changes while a call for the claim waits for its device: the call uses the changed record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from claim_steps import SMALL, prepare, run, unprepare
from dra_driver.claims.store.records import ClaimReference
from dra_driver.metrics import Metrics, Stopwatch
from machine_model import Claims, Node

Call = Callable[[Node, ClaimReference], Awaitable[str]]
Change = Callable[[Node, ClaimReference], Awaitable[None]]


async def forget(node: Node, claim: ClaimReference) -> str:
    await node.service.forget(claim.uid)
    return ""


async def undo_prepared_ahead(node: Node, claim: ClaimReference) -> str:
    node.service.prepared_ahead.add(claim.uid)
    await node.service.undo_prepared_ahead(claim.uid)
    return ""


async def restore(node: Node, claim: ClaimReference) -> str:
    await node.service.restore(claim.uid)
    return ""


async def prepare_suspect(node: Node, claim: ClaimReference) -> str:
    node.service.suspect.add(claim.uid)
    return await prepare(node, claim)


ENDING_CALLS: list[Call] = [unprepare, forget, undo_prepared_ahead]
RESTORING_CALLS: list[Call] = [restore, prepare_suspect]


async def move(node: Node, claim: ClaimReference) -> None:
    """Destroy the claim's partition and create it again, with another number and another UUID."""
    record = node.store.claims[claim.uid]
    held = record.devices[0]
    assert held.instance_id is not None
    node.backend.destroy_partition(held.device_uuid, held.instance_id)
    moved = await node.service.restore_locked(record, Stopwatch(Metrics(), "restore"))
    assert moved is not None and moved.devices[0].instance_id != held.instance_id


async def undo(node: Node, claim: ClaimReference) -> None:
    await node.service.undo(node.store.claims[claim.uid])


def run_with_change(
    tmp_path: Path, call: Call, change: Change, check: Callable[[Node, ClaimReference, str], Awaitable[None]]
) -> None:
    """Prepare a claim, start a call, and change the record while the call waits for the device. ``check`` gets the error of the call."""

    async def scenario(node: Node, claims: Claims) -> None:
        claim = claims.allocate("a", SMALL)
        assert await prepare(node, claim) == ""
        async with node.service.lock_devices([node.gpus.template(0).uuid]):
            task = asyncio.ensure_future(call(node, claim))
            await asyncio.sleep(0.1)  # it has read the record and waits for the device
            await change(node, claim)
        await check(node, claim, await task)

    run(tmp_path, scenario)


def assert_nothing_left(node: Node) -> None:
    assert not node.store.claims
    assert not node.partitions()
    assert not node.cdi_files()


@pytest.mark.parametrize("call", ENDING_CALLS)
def test_moved_partition_is_destroyed(tmp_path: Path, call: Call) -> None:
    async def check(node: Node, _claim: ClaimReference, error: str) -> None:
        assert error == ""
        assert_nothing_left(node)
        assert not node.owing()

    run_with_change(tmp_path, call, move, check)


@pytest.mark.parametrize("call", RESTORING_CALLS)
def test_moved_partition_stays_with_the_claim(tmp_path: Path, call: Call) -> None:
    async def check(node: Node, claim: ClaimReference, error: str) -> None:
        assert error == ""
        (partition,) = node.gpus.devices()[0].partitions
        assert node.store.claims[claim.uid].devices[0].instance_id == partition.instance_id

    run_with_change(tmp_path, call, move, check)


@pytest.mark.parametrize("call", [*ENDING_CALLS, *RESTORING_CALLS])
def test_undone_claim_is_not_created_again(tmp_path: Path, call: Call) -> None:
    async def check(node: Node, claim: ClaimReference, error: str) -> None:
        assert ("calls again" in error) == (call is prepare_suspect)
        assert_nothing_left(node)
        assert not node.service.suspect
        assert await prepare(node, claim) == ""

    run_with_change(tmp_path, call, undo, check)
