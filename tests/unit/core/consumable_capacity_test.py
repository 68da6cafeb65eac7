# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Devices that several claims share: published capacities, and the interpretation of a claim's consumption."""

from __future__ import annotations

from typing import Any

import chip_model as model
import pytest
from board_model import board_names, device
from dra_driver.core import quantity
from dra_driver.core.dra.consumable_capacity import consumed, exclusive, shared
from dra_driver.core.dra.opaque_config import decode_configuration
from dra_driver.core.dra.resource_slices import build_pool, dropped_fields
from dra_driver.core.vendors.ascend import offers as ascend_offers
from dra_driver.core.vendors.ascend import sharing
from dra_driver.core.vendors.nvidia import offers
from dra_driver.core.vendors.nvidia.configs import CONFIG_KINDS
from hypothesis import given
from hypothesis import strategies as st


def published(board: str, shares: int) -> dict[str, Any]:
    if board in model.CHIPS:
        npu = model.device(board)
        (offer,) = ascend_offers.offers(npu, dynamic=False)
        whole = shared(offer, shares, sharing.shareable_capacities(npu))
    else:
        gpu = device(board, 0)
        (offer,) = offers.offers(gpu, dynamic=False)
        whole = shared(offer, shares, offers.shareable_capacities(gpu))
    pool = build_pool(driver="gpu.nvidia.com", pool="node", node_name="node", offers=[whole])
    return dict(pool.slices[0].devices[0])


@given(st.sampled_from([*board_names(), *sorted(model.CHIPS)]), st.integers(2, 1024))
def test_request_policies_are_valid_and_admit_all_shares(board: str, shares: int) -> None:
    found = published(board, shares)
    assert found["allowMultipleAllocations"] is True
    for name, capacity in found["capacity"].items():
        value = quantity.parse(capacity["value"])
        policy = capacity["requestPolicy"]
        default, allowed = quantity.parse(policy["default"]), policy["validRange"]
        least, step = quantity.parse(allowed["min"]), quantity.parse(allowed["step"])
        # Facts: the validation of CapacityRequestPolicy in resource.k8s.io.
        assert 0 <= least <= default <= value and step > 0 and least + step <= value, name
        assert (default - least) % step == 0, name
        assert default * shares <= value or default == least, name
    assert found["capacity"]["shares"]["value"] == str(shares)


def test_shared_h100_quarter_has_expected_policies() -> None:
    capacity = published("h100-80", 4)["capacity"]
    assert capacity["multiprocessors"]["requestPolicy"] == {"default": "33", "validRange": {"min": "0", "step": "1"}}
    assert capacity["memory"]["requestPolicy"]["validRange"] == {"min": "1Mi", "step": "1Mi"}
    quarter = quantity.parse(capacity["memory"]["requestPolicy"]["default"])
    assert quantity.parse(capacity["memory"]["value"]) - 4 * quarter < 4 * 1024**2


def test_shared_310p_quarter_has_quotas() -> None:
    """Memory and AI cores have quotas. The other engines are shared by all claims on the chip."""
    capacity = published("310P", 4)["capacity"]
    assert set(capacity) == {"memory", "aiCores", "shares"}
    assert capacity["aiCores"]["requestPolicy"] == {"default": "2", "validRange": {"min": "0", "step": "1"}}
    assert capacity["memory"]["requestPolicy"]["default"] == "5381Mi"


@given(st.sampled_from(sorted(model.CHIPS)), st.integers(0, 1 << 40), st.integers(0, 64))
def test_sharing_edits_have_quota_of_the_claim(kind: str, memory: int, cores: int) -> None:
    npu = model.device(kind)
    values = dict(each.split("=") for each in sharing.edits(npu, {"memory": memory, "aiCores": cores, "shares": 1}).env)
    whole = memory >> 20
    assert values.get("NPU_MEM_QUOTA") == values.get("NPU_SHARE_MEMORY_MIB") == (str(whole) if whole else None)
    percent = values.get("NPU_SHARE_AICORE_PERCENT")
    assert (percent is None) == (cores == 0)
    if percent is not None:
        assert int(percent) >= 1 and (int(percent) - 1) * sharing.shareable_capacities(npu)["aiCores"] < cores * 100


def test_obstacle_names_device_share_switch() -> None:
    assert sharing.sharing_obstacle(True) is None
    for switch, words in ((False, "device-share is off"), (None, "does not report device-share")):
        sign = sharing.sharing_obstacle(switch)
        assert sign is not None and words in sign.message and sign.remedy and sign.severity.word == "degraded"


def test_exclusive_restores_unshared_offer() -> None:
    (offer,) = offers.offers(device("h100-80", 0), dynamic=False)
    found = exclusive(shared(offer, 4, dict(offer.capacities)))
    assert (found.policies, dict(found.capacities)) == ({}, {name: n for name, n in offer.capacities.items() if n})


def test_consumed_capacity_is_in_whole_units() -> None:
    assert consumed({"memory": "20Gi", "shares": "1", "multiprocessors": "500m"}) == {
        "memory": 20 * 1024**3,
        "shares": 1,
        "multiprocessors": 1,
    }
    with pytest.raises(ValueError, match="not a quantity"):
        consumed({"memory": "much"})


def test_dropped_fields_detects_removed_shares() -> None:
    sent = {"spec": {"devices": [published("h100-80", 4)]}}
    kept = {"spec": {"devices": [{**sent["spec"]["devices"][0], "allowMultipleAllocations": None}]}}
    assert dropped_fields(sent, kept) == ("allowMultipleAllocations of 1 devices (feature gate DRAConsumableCapacity)",)


TOTALS = {"memory": 80 * 1024**3, "multiprocessors": 132}


@pytest.mark.parametrize(
    ("config", "has", "limits"),
    [
        ({}, {"memory": 1024**3, "multiprocessors": 33}, {"memory": 1024**3}),
        ({}, {"memory": 1024**3, "multiprocessors": 0}, {"memory": 1024**3}),
        ({}, {"multiprocessors": 1}, {}),
        ({}, {"shares": 2}, {}),
        ({"percentage": 10}, {"multiprocessors": 66}, {"percentage": 10}),
        (
            {"percentage": 90, "memory": "4Gi"},
            {"memory": 1024**3, "multiprocessors": 66},
            {"percentage": 90, "memory": 1024**3},
        ),
        ({"memory": "512Mi"}, {"memory": 1024**3}, {"memory": 512 * 1024**2}),
    ],
)
def test_mps_limits_are_within_consumed_capacity(
    config: dict[str, Any], has: dict[str, int], limits: dict[str, int]
) -> None:
    names = {"percentage": "defaultActiveThreadPercentage", "memory": "defaultPinnedDeviceMemoryLimit"}
    sharing = {"strategy": "MPS", "mpsConfig": {names[key]: value for key, value in config.items()}}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    configuration = decode_configuration(CONFIG_KINDS, parameters)
    kind = configuration.kind
    assert kind.within(kind.sharing(configuration.values), has, TOTALS) == {
        "strategy": "MPS",
        **{names[key]: value for key, value in limits.items()},
    }


@pytest.mark.parametrize(
    ("config", "has", "totals", "percentage"),
    [
        ({}, {"memory": 1024**3, "multiprocessors": 33}, TOTALS, 25),
        ({}, {"multiprocessors": 1}, TOTALS, 1),
        ({"defaultActiveThreadPercentage": 90}, {"multiprocessors": 66}, TOTALS, 50),
        ({"defaultActiveThreadPercentage": 10}, {"multiprocessors": 66}, TOTALS, 10),
        ({}, {"memory": 1024**3, "multiprocessors": 0}, TOTALS, None),
        ({}, {"shares": 1, "memory": 1024**3}, {"shares": 3}, 33),
    ],
)
def test_mps_shared_daemon_has_consumed_percentage(
    config: dict[str, Any], has: dict[str, int], totals: dict[str, int], percentage: int | None
) -> None:
    sharing = {"strategy": "MPS", "mpsConfig": {**config, "sharedDaemon": True}}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    configuration = decode_configuration(CONFIG_KINDS, parameters)
    limits = configuration.kind.within(configuration.kind.sharing(configuration.values), has, totals)
    assert limits["servesDevice"] is True and "sharedDaemon" not in limits
    assert limits.get("defaultActiveThreadPercentage") == percentage
    assert limits.get("defaultPinnedDeviceMemoryLimit") == has.get("memory")
