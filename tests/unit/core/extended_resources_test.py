# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Names in the limits of pods are recognized: each name that the node driver offers, and no name of other plugins."""

from __future__ import annotations

import re
from dataclasses import replace

import board_model
import pytest
from chip_model import device as chip_device
from dra_driver.core.dra.extended_resources import DEVICE, PARTITION, SHARED
from dra_driver.core.vendors.ascend import vendor as ascend
from dra_driver.core.vendors.nvidia import vendor as nvidia

GPU = board_model.device("h100-80")
CHIP = replace(chip_device("310P"), pci_device_id=0xD50019E5)
CLASS = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")


def test_resource_meaning_of_gpu() -> None:
    found = nvidia.resource_meaning(nvidia.resource_name(GPU, None))
    assert found is not None and (found.kind, found.device_class, found.driver) == (
        DEVICE,
        "gpu.nvidia.com",
        "gpu.nvidia.com",
    )
    assert found.selector == "device.driver == 'gpu.nvidia.com' && device.attributes['gpu.nvidia.com'].type == 'gpu'"


@pytest.mark.parametrize(
    "profile", ["1g.10gb", "1g.10gb+me", "1g.10gb+me.all", "1g.24gb+gfx", "1g.24gb-me", "1c.3g.40gb"]
)
def test_resource_meaning_round_trips_each_profile(profile: str) -> None:
    found = nvidia.resource_meaning(nvidia.resource_name(GPU, profile))
    assert found is not None and found.kind == PARTITION
    assert found.selector.endswith(f".profile == '{profile}'") and ".type == 'mig'" in found.selector
    assert CLASS.fullmatch(found.device_class) and found.device_class.endswith(".nvidia.com")


@pytest.mark.parametrize("of", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"])
def test_resource_meaning_of_replicas(of: str) -> None:
    found = nvidia.resource_meaning(f"{of}.shared")
    assert found is not None and (found.kind, found.of, found.device_class, found.selector) == (SHARED, of, "", "")


@pytest.mark.parametrize(
    "resource",
    [
        "nvidia.com/hostdev",
        "nvidia.com/pgpu",
        "nvidia.com/mig-",
        "nvidia.com/gpu.deploy",
        "nvidia.com/x.shared",
        "cpu",
        "gpu",
        "huawei.com/Ascend910",
        "example.com/gpu",
    ],
)
def test_resource_meaning_foreign_names_are_unknown(resource: str) -> None:
    assert nvidia.resource_meaning(resource) is None


@pytest.mark.parametrize(
    "template",
    ["vir02", "vir02_1c", "vir05_1c_8g", "vir10_4c_16g_m", "vir04_3c_ndvpp", "vir04_4c_dvpp", "vir10_3c_16g_nm"],
)
def test_resource_meaning_round_trips_each_template(template: str) -> None:
    found = ascend.resource_meaning(ascend.resource_name(CHIP, template))
    assert found is not None and found.kind == PARTITION and f"'{template}'" in found.selector
    assert ".type == 'vnpu'" in found.selector and ".deviceType == 'Ascend310P'" in found.selector
    assert CLASS.fullmatch(found.device_class)
    # The selector lists exactly the templates that have this resource name.
    templates = re.findall(r"'(vir[^']*)'", found.selector)
    assert {ascend.resource_name(CHIP, each) for each in templates} == {found.resource}


def test_resource_meaning_of_chips() -> None:
    names = ("Ascend310P", "Ascend910", "Ascend310", "npu")
    found = {name: ascend.resource_meaning(f"huawei.com/{name}") for name in names}
    assert {name: each.device_class for name, each in found.items() if each} == {
        "Ascend310P": "ascend-310p",
        "Ascend910": "ascend-910",
        "Ascend310": "whole-ascend310.huawei.com",
        "npu": "whole-npu.huawei.com",
    }
    assert all(each and ".type == 'npu'" in each.selector for each in found.values())


@pytest.mark.parametrize(
    "resource",
    [
        "huawei.com/Ascend310-2c",
        "huawei.com/npu-core",
        "huawei.com/Ascend910-x",
        "huawei.com/Ascend910-2c.x",
        "nvidia.com/gpu",
    ],
)
def test_resource_meaning_other_huawei_names_are_unknown(resource: str) -> None:
    assert ascend.resource_meaning(resource) is None
