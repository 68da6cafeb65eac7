# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""After a reboot a partition at the place of a claim's earlier partition belongs to the layout, and survives the claim."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from backend_model import ALL_DYNAMIC, ModelGpus
from dra_driver.claims.plan import plan_restore
from dra_driver.claims.store.records import ClaimReference, DeviceRecord
from dra_driver.core.errors import InUse
from dra_driver.core.model import Partition, Placement
from machine_model import Claims, Node, copy_of

from tests.cluster.stop_at import StopPoint

FORMER, OTHER = "gpu-0-mig-1g10gb-19-0", "gpu-1-mig-1g10gb-19-2"
STATIC = (
    {"match": {"index": [0]}, "mode": "static", "partitions": {"1g.10gb": 1}},
    {"match": {}, "mode": "dynamic"},
)


class Killed(BaseException):
    """Simulated end of the process."""


def prepared(directory: Path, claims: Claims, *devices: str) -> ClaimReference:
    """Prepare a claim with dynamic partitions in the first boot, and reboot the node."""

    async def scenario() -> ClaimReference:
        node = Node(directory, claims, rules=ALL_DYNAMIC)
        await node.start()
        claim = claims.allocate("a", *devices)
        assert (await node.service.prepare([claim]))[claim.uid].error == ""
        node.close()
        return claim

    claim = asyncio.run(scenario())
    ModelGpus(directory / "gpus.json").reboot()
    shutil.rmtree(directory / "root/var/run/cdi", ignore_errors=True)
    return claim


def second_boot(
    directory: Path, claims: Claims, reached: Callable[[str], None] = lambda stage: None, *, layout: bool = True
) -> Node:
    """Return a node after the reboot. The new layout has created a partition at the place of the claim's earlier one."""
    node = Node(directory, claims, rules=STATIC, boot_id="boot-2", reached=reached)
    gpu = node.gpus.template(0).uuid
    if layout:
        node.backend.set_partitioning(gpu, True)
        node.backend.create_partition(gpu, 19, Placement(0, 1))
    return node


def of_layout(node: Node) -> Partition:
    (partition,) = node.gpus.devices()[0].partitions
    return partition


def held(node: Node, claim: ClaimReference) -> tuple[DeviceRecord, ...]:
    return node.store.claims[claim.uid].devices


def test_restored_claim_uses_partition_of_layout_and_leaves_it(tmp_path: Path) -> None:
    claims = Claims()
    claim = prepared(tmp_path, claims, FORMER)

    async def scenario() -> None:
        node = second_boot(tmp_path, claims)
        partition = of_layout(node)
        await node.start()
        (device,) = held(node, claim)
        assert (device.partition_uuid, device.created) == (partition.uuid, False)
        assert (await node.service.prepare([claim]))[claim.uid].error == ""
        assert (await node.service.unprepare([claim]))[claim.uid].error == ""
        assert of_layout(node) == partition
        assert not node.store.claims
        node.close()

    asyncio.run(scenario())


def test_unprepared_claim_that_was_not_restored_leaves_partition_of_layout(tmp_path: Path) -> None:
    claims = Claims()
    claim = prepared(tmp_path, claims, FORMER)

    async def scenario() -> None:
        node = second_boot(tmp_path, claims)
        partition = of_layout(node)
        await node.scan()
        node.service.set_ready()
        assert node.survey is not None
        # The partition belongs to the layout once it is published.
        assert [offer.dynamic for offer in node.survey.offers if offer.name == FORMER] == [False]
        assert (await node.service.unprepare([claim]))[claim.uid].error == ""
        assert of_layout(node) == partition
        node.close()

    asyncio.run(scenario())


def test_incomplete_partition_at_previous_placement_is_not_destroyed(tmp_path: Path) -> None:
    """A partition without a compute instance has another owner after a reboot. The restore fails, and names it."""
    claims = Claims()
    claim = prepared(tmp_path, claims, FORMER)

    async def scenario() -> None:
        node = second_boot(tmp_path, claims)
        gpu = node.gpus.devices()[0]
        bare = replace(gpu, partitions=(replace(gpu.partitions[0], uuid=""),))
        record = node.store.claims[claim.uid]
        with pytest.raises(InUse, match="did not make"):
            plan_restore(record, {gpu.uuid: bare}, {gpu.uuid}, is_from_previous_boot=True)
        node.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("stage", ["partition-created", "cdi-written"])
def test_killed_restore_keeps_ownership_of_each_partition(tmp_path: Path, stage: str) -> None:
    """The driver is killed after it has created one partition again. The other one belongs to the layout."""
    claims = Claims()
    disk = tmp_path / "disk"
    disk.mkdir()
    claim = prepared(disk, claims, FORMER, OTHER)
    frozen: list[Path] = []

    def stop() -> None:
        frozen.append(copy_of(disk, tmp_path / "after"))
        raise Killed

    async def killed() -> None:
        point = StopPoint(f"{stage}:1", stop)
        node = second_boot(disk, claims, point.reached)
        try:
            await node.start()
        finally:
            node.close()

    with pytest.raises(Killed):
        asyncio.run(killed())

    async def after() -> None:
        node = second_boot(frozen[0], claims, layout=False)
        partition = of_layout(node)
        await node.start()
        first, second = held(node, claim)
        assert (first.partition_uuid, first.created, second.created) == (partition.uuid, False, True)
        assert len(node.gpus.devices()[1].partitions) == 1
        assert (await node.service.unprepare([claim]))[claim.uid].error == ""
        assert [each.partitions for each in node.gpus.devices()] == [(partition,), ()]
        node.close()

    asyncio.run(after())


def test_restored_partition_of_the_claim_is_destroyed(tmp_path: Path) -> None:
    """A partition that the driver creates again in this boot belongs to the claim, and is deleted with it."""
    claims = Claims()
    claim = prepared(tmp_path, claims, OTHER)

    async def scenario() -> None:
        node = second_boot(tmp_path, claims)
        await node.start()
        assert len(node.partitions()) == 2
        assert (await node.service.unprepare([claim]))[claim.uid].error == ""
        assert len(node.partitions()) == 1
        node.close()

    asyncio.run(scenario())
