# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test vNPUs that a chip rejects although the counters allow them: another placement is used if there is one, or the
rejection is reported.
"""

from __future__ import annotations

from tests.simulator.backend.ascend_claims import Driver, acted
from tests.simulator.backend.ascend_stage import Stage, on

REFUSED = "partition-refused"


def kept_back(driver: Driver, chip: str = "npu-0") -> set[str]:
    return {
        offer.name
        for offer in driver.node.inventory.offers.values()
        if any(taint.key.endswith(REFUSED) for taint in offer.taints) and offer.name.startswith(chip)
    }


@on("8x310P-Pro")
def vnpus_of_unbound_pods_are_moved_to_make_room(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        waiting = driver.claims.allocate("waiting", "npu-0-vir01-0")
        assert (await driver.node.service.prepare_ahead(waiting)).error == ""
        stage.control("fault", "0", "fragmented")
        assert await driver.prepare("wanted", "npu-0-vir02-6") == ""
        assert driver.slices(0) == [("vir01", 0), ("vir02", 6)]
        assert driver.node.store.claims[waiting.uid].prepared and len(driver.node.cdi_files()) == 2
        assert not driver.node.reports.failures
        # The pod of the waiting claim is bound: its vNPU is not moved any more.
        assert await driver.prepare("waiting", "npu-0-vir01-0") == ""
        stage.control("fault", "0", "fragmented")
        assert "rejects the vNPU" in await driver.prepare("late", "npu-0-vir01-1")
        assert driver.slices(0) == [("vir01", 0), ("vir02", 6)]
        stage.control("clear", "0")
        for name in ("wanted", "waiting"):
            assert await driver.unprepare(name) == ""
        assert driver.slices(0) == []

    acted(stage, scene)


@on("8x310P-Pro")
def place_blocked_by_a_foreign_vnpu_is_tainted_until_it_is_destroyed(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir01", "-v", "100", "-g", "0")
        await driver.node.scan()
        stage.control("fault", "0", "fragmented")
        error = await driver.prepare("wanted", "npu-0-vir02-6")
        assert "rejects the vNPU" in error and "vir01 at 0:1" in error and "60 s" in error, error
        await driver.node.scan()
        back = kept_back(driver)
        # Only vNPUs of the same or a larger size at that place are excluded, on this chip only.
        assert back == {"npu-0-vir02-6", "npu-0-vir04-6", "npu-0-vir04-4c-dvpp-6"} or "npu-0-vir02-6" in back
        assert (
            all(name.endswith("-6") for name in back) and "npu-0-vir01-6" not in back and not kept_back(driver, "npu-1")
        )
        assert stage.by_slices(stage.first_npu()) == [("vir01", 0)], "the foreign vNPU was changed"
        # The other vNPU is destroyed, and the place is available again.
        stage.by_hand("destroy-vnpu", "-i", "0", "-c", "0", "-v", "100")
        await driver.node.scan()
        assert kept_back(driver) == set()
        assert await driver.prepare("wanted", "npu-0-vir02-6") == ""
        assert driver.slices(0) == [("vir02", 6)]

    acted(stage, scene)


@on("8x310P-Pro")
def vnpu_of_a_pod_is_never_moved(stage: Stage) -> None:
    """Neither one with a running container, nor one that existed before its claim."""

    async def scene(driver: Driver) -> None:
        stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir01", "-v", "103", "-g", "1")
        await driver.node.scan()
        assert (await driver.node.service.prepare_ahead(driver.claims.allocate("given", "npu-0-vir01-3"))).error == ""
        assert (await driver.node.service.prepare_ahead(driver.claims.allocate("runs", "npu-0-vir01-0"))).error == ""
        stage.control("fault", "0", "process", "1", "100")
        stage.control("fault", "0", "fragmented")
        assert "rejects the vNPU" in await driver.prepare("wanted", "npu-0-vir02-6")
        assert driver.slices(0) == [("vir01", 0), ("vir01", 3)]

    acted(stage, scene)


@on("8x910B4")
def next_number_is_tried_after_a_rejection(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        stage.control("fault", "0", "call", "dcmi_create_vdevice", "fail", "-8001", "nth", "1")
        assert await driver.prepare("one", "npu-0-vir05-1c-8g-new-0") == ""
        assert driver.slices(0) == [("vir05_1c_8g", 1)]
        stage.control("clear", "0")
        stage.control("fault", "0", "call", "dcmi_create_vdevice", "fail", "-8001")
        calls = stage.call_counts()
        assert "rejects the vNPU" in await driver.prepare("two", "npu-0-vir05-1c-8g-new-1")
        assert calls["dcmi_create_vdevice"] == 3, (
            "a rejection that does not depend on the number was tried with all numbers"
        )
        await driver.node.scan()
        # All numbers are equivalent, and larger vNPUs are excluded as well.
        assert kept_back(driver) == {
            offer.name
            for offer in driver.node.inventory.offers.values()
            if offer.dynamic and offer.name.startswith("npu-0")
        } - {"npu-0-vir10-3c-16g-nm-new-0", "npu-0-vir10-3c-16g-nm-new-1"}
        stage.control("clear", "0")
        assert await driver.prepare("two", "npu-0-vir05-1c-8g-new-1") == ""
        await driver.node.scan()
        assert kept_back(driver) == set()

    acted(stage, scene)


@on("8x310P-Pro")
def new_foreign_vnpu_is_avoided_or_named(stage: Stage) -> None:
    """A small vNPU uses either half of a vGroup, so the other half stays available. Any other vNPU blocks the place."""

    async def scene(driver: Driver) -> None:
        stage.by_hand("create-vnpu", "-i", "0", "-c", "0", "-f", "vir01", "-g", "2")
        assert await driver.prepare("half", "npu-0-vir01-4") == ""
        assert driver.slices(0) == [("vir01", 4), ("vir01", 5)]
        (record,) = driver.node.store.claims.values()
        assert (record.devices[0].instance_id, record.devices[0].placement_start) == (104, 4)
        stage.by_hand("create-vnpu", "-i", "1", "-c", "0", "-f", "vir01", "-g", "2")
        error = await driver.prepare("whole", "npu-1-vir02-4")
        assert "is taken by vir01 at 4:1" in error and "which this driver did not make" in error
        assert await driver.prepare("beside", "npu-1-vir02-6") == ""
        await driver.node.scan()
        assert "npu-0-vir01-5" in {offer.name for offer in driver.node.inventory.offers.values() if not offer.dynamic}
        assert await driver.unprepare("half") == "" and len(driver.slices(0)) == 1

    acted(stage, scene)
