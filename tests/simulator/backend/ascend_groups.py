# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the driver's claims on several chips as one device, on DCMI, and on all devices that the counters allow next to
them.
"""

from __future__ import annotations

import random

from tests.simulator.backend.ascend_claims import SICK, Driver, Scheduler, acted
from tests.simulator.backend.ascend_stage import SCENARIOS, Stage, on


def chips_in(driver: Driver, uid: str) -> list[str]:
    """Return the chips' device nodes in the single CDI device of a claim."""
    (device,) = driver.node.cdi(uid)["devices"]
    return sorted(each["path"] for each in device["containerEdits"]["deviceNodes"] if each["path"][-1].isdigit())


@on("4x300I-Duo")
def both_chips_of_a_card_are_one_device(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        offers = driver.node.inventory.offers
        listed = [name for name, offer in offers.items() if offer.members]
        assert listed == ["npu-card-6", "npu-card-4", "npu-card-2", "npu-card-0", "npu-node"], listed
        pair, chip = offers["npu-card-6"], offers["npu-6"]
        assert pair.attributes["cardID"] == chip.attributes["cardID"] and pair.attributes["chips"] == 2
        assert pair.capacities["memory"] == 2 * chip.capacities["memory"] > 0
        assert await driver.prepare("pair", "npu-card-6") == ""
        assert chips_in(driver, "0uid-pair") == ["/dev/davinci6", "/dev/davinci7"]
        for other in ("npu-6", "npu-7", "npu-card-6", "npu-node"):
            assert "is still prepared for claim default/pair" in await driver.prepare("other", other)
        # A vNPU that was created by hand blocks its card, and no other card.
        stage.by_hand("create-vnpu", "-i", "2", "-c", "1", "-f", "vir01")
        error = await driver.prepare("late", "npu-card-4")
        assert "npu-card-4 cannot be prepared as a whole device" in error and "vir01 at " in error, error
        await driver.node.scan()
        assert {"npu-card-4", "npu-node"}.isdisjoint(driver.node.inventory.offers)
        assert await driver.prepare("late", "npu-card-2") == ""
        driver = await driver.again("boot-2")
        assert chips_in(driver, "0uid-pair") == ["/dev/davinci6", "/dev/davinci7"]
        assert await driver.unprepare("pair") == "" and await driver.unprepare("late") == ""
        assert not driver.node.cdi_files() and driver.slices(5) == [("vir01", 0)]
        assert await driver.prepare("chip", "npu-7") == ""
        driver.node.close()

    acted(stage, scene)


@on("4x300I-Duo")
def card_with_a_faulty_or_missing_chip_is_not_offered(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        stage.control("fault", str(SICK), "call", "dcmi_get_device_info", "fail", "-8005")
        await driver.node.scan()
        (uuid,) = driver.node.inventory.faults
        assert uuid in driver.node.inventory.offers["npu-card-2"].device_uuids
        assert uuid in await driver.prepare("late", "npu-card-2")
        assert await driver.prepare("beside", "npu-2") == ""
        stage.control("clear")
        stage.command("unplug", str(SICK))
        stage.backend.reopen()
        await driver.node.scan()
        there = set(driver.node.inventory.offers)
        assert {"npu-2", "npu-card-0", "npu-card-4"} <= there and {"npu-3", "npu-card-2", "npu-node"}.isdisjoint(there)
        stage.command("plug", str(SICK))
        stage.backend.reopen()
        await driver.node.scan()
        assert {"npu-3", "npu-card-2", "npu-node"} <= set(driver.node.inventory.offers)

    acted(stage, scene)


@on("8x910A")
def four_chips_of_a_ring_are_one_device(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        listed = [name for name, offer in driver.node.inventory.offers.items() if offer.members]
        assert listed == ["npu-ring-4", "npu-ring-0", "npu-node"], listed
        assert await driver.prepare("ring", "npu-ring-4") == ""
        assert chips_in(driver, "0uid-ring") == [f"/dev/davinci{number}" for number in range(4, 8)]
        assert "is still prepared" in await driver.prepare("node", "npu-node")
        assert await driver.unprepare("ring") == "" and await driver.prepare("node", "npu-node") == ""
        assert len(chips_in(driver, "0uid-node")) == 8

    acted(stage, scene)


def every_set_that_the_counters_allow_can_be_created(stage: Stage) -> None:
    """Allocate and release vNPUs, chips, and groups at random: each device that the scheduler considers free can be
    prepared.
    """

    async def scene(driver: Driver) -> None:
        rng = random.Random(5)
        scheduler = Scheduler(driver)
        kinds = sorted({offer.kind for offer in scheduler.offers})
        # All chips of one card are used in the same way: they are not partitioned for claims.
        assert kinds == ["device", "group"] + ["partition"] * (stage.npus()[1].attributes["chipID"] == 0)
        given: dict[str, int] = dict.fromkeys(kinds, 0)
        for step in range(90):
            if scheduler.held and rng.random() < 0.45:
                name = rng.choice(sorted(scheduler.held))
                assert await driver.unprepare(name) == ""
                scheduler.give_back(name)
                continue
            kind = rng.choice(kinds)
            free = [offer for offer in scheduler.offers if offer.kind == kind and scheduler.is_free(offer)]
            if free:
                offer, name = rng.choice(free), f"c{step}"
                error = await driver.prepare(name, offer.name)
                assert error == "", (offer.name, error, {each.name for each in scheduler.held.values()})
                scheduler.take(name, offer)
                given[kind] += 1
        assert all(given.values()), given
        for name in sorted(scheduler.held):
            assert await driver.unprepare(name) == ""
        assert not driver.node.cdi_files()

    acted(stage, scene)


for _machine in ("4x300I-Duo", "8x310P-Pro", "8x910A", "8x910B3"):
    SCENARIOS[f"what_the_counters_give_can_be_had_on_{_machine}"] = (
        _machine,
        {},
        every_set_that_the_counters_allow_can_be_created,
    )
