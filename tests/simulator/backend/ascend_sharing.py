# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test whole chips shared by several claims: only if the chip allows several containers, and with the metadata of the
share.
"""

from __future__ import annotations

import json
from typing import Any

from dra_driver.core.model import devices_of
from dra_driver.core.vendors.ascend.backend import AscendBackend
from dra_driver.core.vendors.ascend.modes import SHARE, Switch, Switches
from dra_driver.core.vendors.ascend.npu_smi.npu_smi import Tool
from dra_driver.core.vendors.ascend.npu_smi.npu_smi_source import Program

from tests.simulator.backend.ascend_claims import Driver, acted
from tests.simulator.backend.ascend_stage import SCENARIOS, Stage, on

IN_FOUR = ({"match": {"index": [0, 1]}, "mode": "whole", "shares": 4}, {"match": {}, "mode": "whole"})


def share(number: int, device: str = "npu-0", memory: str = "4Gi", cores: str = "2") -> dict[str, Any]:
    return {
        "device": device,
        "shareID": f"{number}1111111-1111-1111-1111-111111111111",
        "consumedCapacity": {"memory": memory, "aiCores": cores, "shares": "1"},
    }


def switch_is_read(stage: Stage) -> None:
    program = AscendBackend(stage.system, source=Program(stage.system))
    program.open()
    assert {npu.sharing_obstacle.cause for npu in stage.npus() if npu.sharing_obstacle is not None} == {"not-shareable"}
    assert all("device-share is off" in npu.sharing_obstacle.message for npu in stage.npus() if npu.sharing_obstacle)
    stage.control("device-share", "0", "1")
    for backend in (stage.backend, program):
        found = devices_of(backend.discover())
        assert found[0].sharing_obstacle is None and all(npu.sharing_obstacle for npu in found[1:])
        assert backend.device(found[0].uuid).sharing_obstacle is None
    stage.control("power-cycle")
    assert devices_of(stage.fresh().discover())[0].sharing_obstacle is not None


for _machine in ("8x310P-Pro", "8x910B4", "1x950"):
    SCENARIOS[f"the_switch_of_sharing_is_read_on_{_machine}"] = (_machine, {}, switch_is_read)


@on("8x310P-Pro")
def claims_share_a_chip(stage: Stage) -> None:
    for physical in ("0", "1"):
        stage.control("device-share", physical, "1")

    async def scene(driver: Driver) -> None:
        offered = driver.node.inventory.offers["npu-0"]
        assert set(offered.capacities) == set(offered.policies) == {"memory", "aiCores", "shares"}
        assert (offered.capacities["aiCores"], offered.policies["aiCores"].default) == (8, 2)
        assert not driver.node.inventory.offers["npu-2"].policies
        assert await driver.prepare("one", share(1)) == ""
        assert await driver.prepare("two", share(2, memory="2Gi", cores="1")) == ""
        assert await driver.prepare("three", share(3, cores="0")) == ""
        found = {}
        for name in ("one", "two", "three"):
            cdi = driver.node.cdi(driver.claims.allocate(name, "npu-0").uid)
            (device,) = cdi["devices"]
            assert [node["path"] for node in device["containerEdits"]["deviceNodes"]] == ["/dev/davinci0"]
            found[name] = device["containerEdits"]["env"]
        quota = ["NPU_SHARE_MEMORY_MIB=4096", "NPU_MEM_QUOTA=4096"]
        assert found["one"] == [*quota, "NPU_SHARE_AICORE_PERCENT=25"]
        assert found["two"] == ["NPU_SHARE_MEMORY_MIB=2048", "NPU_MEM_QUOTA=2048", "NPU_SHARE_AICORE_PERCENT=12"]
        assert found["three"] == quota
        (record,) = [each for each in driver.node.store.claims.values() if each.name == "one"]
        assert record.devices[0].share_id == share(1)["shareID"]
        assert dict(record.devices[0].consumed) == {"memory": 4 << 30, "aiCores": 2, "shares": 1}
        answer = json.loads(next(driver.folder.rglob(f"*-metadata/{record.uid}/*.json")).read_text().splitlines()[0])[
            "requests"
        ][0]["devices"][0]["attributes"]
        assert answer["shareID"] == {"string": record.devices[0].share_id} and answer["consumedAiCores"] == {"int": 2}
        # A share can be used only once. A claim with the whole chip has no share metadata.
        assert "still prepared for claim default/one" in await driver.prepare("again", share(1))
        assert await driver.prepare("alone", "npu-2") == ""
        alone = driver.node.cdi(driver.claims.allocate("alone", "npu-2").uid)
        assert "env" not in alone["devices"][0]["containerEdits"]
        for name in ("one", "two", "three", "alone"):
            assert await driver.unprepare(name) == ""
        assert not driver.node.cdi_files()

    acted(stage, scene, IN_FOUR)


@on("8x310P-Pro")
def chip_with_single_container_mode_is_not_shared(stage: Stage) -> None:
    async def scene(driver: Driver) -> None:
        def signs() -> list[list[str]]:
            survey = driver.node.survey
            assert survey is not None
            return [[sign.cause for sign in device.health.signs] for device in survey.devices.values()]

        assert signs() == [["not-shareable"]] * 2 + [[]] * 6
        error = await driver.prepare("one", share(1))
        assert "cannot be shared" in error and "ascend_vnpu_device_share: true" in error
        assert driver.node.reports.failures[-1][2].code == "not-shareable" and driver.node.store.claims == {}
        # Whole chips are still allocatable.
        assert await driver.prepare("alone", "npu-2") == ""
        Switches(Tool(stage.system)).apply(Switch(SHARE, True, stage.first_npu()))
        assert await driver.prepare("one", share(1)) == ""
        await driver.node.scan()
        assert signs() == [[], ["not-shareable"]] + [[]] * 6
        # Sharing is disabled while a claim uses the chip: the claim's holder is notified, and no new claim is
        # prepared.
        stage.control("device-share", "0", "0")
        await driver.node.scan()
        assert signs()[0] == ["not-shareable"]
        assert "cannot be shared" in await driver.prepare("two", share(2))
        assert await driver.prepare("one", share(1)) == "" and await driver.unprepare("one") == ""

    acted(stage, scene, IN_FOUR)
