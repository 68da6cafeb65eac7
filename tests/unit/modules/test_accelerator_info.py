# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module accelerator_info: facts about each device, with and without a driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.modules import accelerator_info

if TYPE_CHECKING:
    from conftest import Node

LAYOUT = {"match": {"index": 1}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 2}}


@pytest.mark.prove
def test_devices_have_all_facts(node: Node) -> None:
    node.layout(LAYOUT)
    result = node.module("accelerator_info", {})
    assert result["changed"] is False
    driver = {"vendor": "nvidia", "driver_name": "gpu.nvidia.com", "available": True, "reason": "", "unanswered": []}
    (driver_facts,) = result["drivers"]
    labels = driver_facts.pop("labels")
    assert driver_facts == {**driver, "pci_labels": {}}
    assert labels["nvidia.com/gpu.count"] == "8" and labels["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"
    assert [device["index"] for device in result["devices"]] == list(range(8))
    first, second = result["devices"][:2]
    assert first["product"] == "NVIDIA H100 80GB HBM3"
    assert first["partitioning"] == {
        "supported": True,
        "enabled": False,
        "pending": False,
        "needs_reset": False,
        "blocked": "",
    }
    assert {profile["name"] for profile in first["profiles"]} >= {"1g.10gb", "3g.40gb", "7g.80gb"}
    assert first["partitions"] == []
    assert first["health"] == {"healthy": True, "causes": [], "signs": []}
    assert len({device["uuid"] for device in result["devices"]}) == 8
    assert second["partitioning"]["enabled"] is True
    assert [one["profile"] for one in second["partitions"]].count("1g.10gb") == 2
    assert node.module("accelerator_info", {}, check=True)["devices"] == result["devices"]


def test_labels_match_the_vendor_program(node: Node) -> None:
    """The labels have the driver, CUDA, and partition values of NVML."""
    node.layout(LAYOUT)
    (driver_facts,) = node.module("accelerator_info", {"partition_labels": "mixed"})["drivers"]
    labels = driver_facts["labels"]
    assert labels["nvidia.com/mig.strategy"] == "mixed" and labels["nvidia.com/mig-1g.10gb.count"] == "2"
    assert labels["nvidia.com/mig-3g.40gb.product"] == "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb"
    assert labels["nvidia.com/mig-3g.40gb.slices.gi"] == labels["nvidia.com/mig-3g.40gb.slices.ci"] == "3"
    full = labels["nvidia.com/cuda.driver-version.full"]
    assert full.split(".")[:2] == [labels[f"nvidia.com/cuda.driver-version.{part}"] for part in ("major", "minor")]
    # Without the option these labels are not reported.
    (plain,) = node.module("accelerator_info", {})["drivers"]
    assert not [name for name in plain["labels"] if "/mig-" in name or (name.endswith("strategy") and "mig" in name)]


def test_result_matches_documentation(node: Node) -> None:
    documented = yaml.safe_load(accelerator_info.RETURN)
    result = node.module("accelerator_info", {"offers": True, "fail_without_driver": True})
    for key in ("devices", "drivers"):
        assert all(set(each) == set(documented[key]["contains"]) for each in result[key])
    device = result["devices"][0]
    assert device["offers"]
    for key in ("partitioning", "health"):
        assert set(device[key]) == set(documented["devices"]["contains"][key]["sample"])
    for key in ("profiles", "offers"):
        assert set(device[key][0]) == set(documented["devices"]["contains"][key]["sample"][0])


def test_processes_and_faults_are_reported(node: Node) -> None:
    node.simulator("fault", "0", "process", "4711")
    device = node.module("accelerator_info", {"match": {"index": 0}})["devices"][0]
    assert [process["pid"] for process in device["processes"]] == [4711]


def test_unreadable_gpu_is_named(node: Node) -> None:
    node.simulator("fault", "3", "lost")
    result = node.module("accelerator_info", {})
    assert [device["index"] for device in result["devices"]] == [0, 1, 2, 4, 5, 6, 7]
    (text,) = result["drivers"][0]["unanswered"]
    assert "GPU 3" in text and "lost" in text
    assert text in str(result["warnings"])


@pytest.mark.parametrize(
    ("match", "indices"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"index": 3}, [3]),
        ({"index": [1, 2, 9]}, [1, 2]),
        ({"vendor": "nvidia", "product": "*H100*", "index": [7]}, [7]),
        ({"product": "*A100*"}, []),
        ({"uuid": "GPU-none"}, []),
    ],
)
def test_match_selects_devices(shared_node: Node, match: dict[str, Any], indices: list[int]) -> None:
    result = shared_node.module("accelerator_info", {"match": match, "vendor": ["nvidia", "nvidia"]})
    assert [device["index"] for device in result["devices"]] == indices


def test_offers_are_static_or_dynamic(node: Node) -> None:
    node.layout(LAYOUT)
    as_they_are = node.module("accelerator_info", {"offers": True, "match": {"index": [0, 1]}})["devices"]
    assert [offer["name"] for offer in as_they_are[0]["offers"]] == ["gpu-0"]
    assert sorted(offer["profile"] for offer in as_they_are[1]["offers"]) == ["1g.10gb", "1g.10gb", "3g.40gb"]
    assert not any(offer["dynamic"] for offer in as_they_are[1]["offers"])
    (dynamic,) = node.module("accelerator_info", {"offers": True, "dynamic": True, "match": {"index": 0}})["devices"]
    names = [offer["name"] for offer in dynamic["offers"]]
    assert "gpu-0" in names
    assert "gpu-0-mig-3g40gb-9-4" in names
    assert len(names) == len(set(names)) > 20
    assert all(offer["consumes"] for offer in dynamic["offers"])


def test_several_boards_are_supported(make_node: Callable[[str], Node]) -> None:
    devices = make_node("mixed").module("accelerator_info", {"offers": True})["devices"]
    assert len({device["product"] for device in devices}) > 1
    assert all(device["offers"] for device in devices)


def test_without_driver_reports_reason(node: Node) -> None:
    node.driver = False
    result = node.module("accelerator_info", {})
    assert not result.get("failed"), result
    assert result["devices"] == []
    drivers = {driver["vendor"]: driver for driver in result["drivers"]}
    assert not any(driver["available"] for driver in drivers.values())
    assert "libnvidia-ml.so.1" in drivers["nvidia"]["reason"]
    assert "No devices of nvidia" in str(result["warnings"])
    refused = node.module("accelerator_info", {"fail_without_driver": True})
    assert refused["failed"]
    assert refused["error_code"] == "backend-unavailable"


def test_without_binding_reports_reason(node: Node, bare_python: Path) -> None:
    options = {"interpreter": "/nowhere/python"}
    result = node.module_of(bare_python, "accelerator_info", options)
    assert result["devices"] == []
    assert "pynvml" in next(each["reason"] for each in result["drivers"] if each["vendor"] == "nvidia")
    refused = node.module_of(bare_python, "accelerator_info", {**options, "fail_without_driver": True})
    assert refused["failed"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"vendor": ["nvidia", "acme"]}, "acme"),
        ({"match": {"colour": "green"}}, "colour"),
        ({"match": {"index": "first"}}, "first"),
        ({"match": "all"}, "match"),
        ({"offers": "some"}, "offers"),
        ({"state": "present"}, "state"),
    ],
)
def test_invalid_options_are_rejected(shared_node: Node, options: dict[str, Any], named: str) -> None:
    result = shared_node.module("accelerator_info", options)
    assert result["failed"]
    assert named in result["msg"]


def test_runs_as_packed_by_ansible(node: Node, bare_python: Path) -> None:
    result = node.ansible("accelerator_info", {"match": {"index": 2}}, bare_python)
    assert [device["index"] for device in result["devices"]] == [2]
