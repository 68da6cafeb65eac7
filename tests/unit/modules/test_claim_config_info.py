# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module claim_config_info reports exactly the configurations in manifests that the driver would refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Run = Callable[..., dict[str, Any]]
V = "resource.nvidia.com/v1beta1"
GPU = {"apiVersion": V, "kind": "GpuConfig"}
MIG = {"apiVersion": V, "kind": "MigDeviceConfig"}
MULTI_USER = {"strategy": "MPS", "mpsConfig": {"multiUser": True}}
SHARING = {**GPU, "sharing": {"strategy": "TimeSlicing"}}
VNPU = {"apiVersion": "dra.accelerators/v1alpha1", "kind": "VnpuConfig", "template": "vir02"}
NPU = "npu.huawei.com"
SETTINGS = {"apiVersion": "dra.accelerators/v1alpha1", "kind": "DeviceSettings"}


def config(parameters: Any, *requests: str, driver: str = "gpu.nvidia.com") -> dict[str, Any]:
    return {"requests": list(requests), "opaque": {"driver": driver, "parameters": parameters}}


def request(name: str, device_class: str = "gpu.nvidia.com", **more: Any) -> dict[str, Any]:
    return {"name": name, "exactly": {"deviceClassName": device_class, **more}}


WHOLE = (request("gpu"),)


def claim(*configs: dict[str, Any], requests: Any = WHOLE, version: str = "v1") -> dict[str, Any]:
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "ResourceClaim",
        "metadata": {"name": "c", "namespace": "team"},
        "spec": {"devices": {"requests": list(requests), "config": list(configs)}},
    }


@pytest.mark.parametrize("example", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_valid(run_here: Run, example: Path) -> None:
    result = run_here("claim_config_info", {"src": str(example), "fail_if_invalid": True})
    assert (result["changed"], result["valid"], result["problems"]) == (False, True, [])
    assert result["configurations"] == example.read_text(encoding="utf-8").count("parameters:")


FIRST_AVAILABLE = {
    "name": "any",
    "firstAvailable": [
        {"name": "whole", "deviceClassName": "gpu.nvidia.com"},
        {"name": "part", "deviceClassName": "mig.nvidia.com"},
    ],
}


@pytest.mark.parametrize(
    "document",
    [
        claim(),
        claim(config(SHARING, "gpu"), config({**SETTINGS, "powerLimit": 300})),
        claim(config(SHARING), config(MIG), requests=[request("gpu"), request("part", "mig.nvidia.com")]),
        claim(config(SHARING, "any/whole"), config(MIG, "any/part"), requests=[FIRST_AVAILABLE]),
        claim(config(MIG, "own"), requests=[request("own", "a-class-of-the-site")]),
        claim(config({"anything": 1}, driver="another.example.com")),
        claim(config(VNPU, driver=NPU), requests=[request("slice", "vnpu.huawei.com")]),
        # A later configuration of a kind replaces an earlier one, so these two do not conflict.
        claim(config({**SETTINGS, "computeMode": "Prohibited"}), config(SETTINGS), config(SHARING)),
        claim(config({**GPU, "sharing": MULTI_USER})),
        claim(config({**GPU, "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 50}}})),
        {**claim(config({"kind": 1})), "apiVersion": "example.com/v1"},
        {"apiVersion": "v1", "kind": "Pod"},
    ],
)
def test_configuration_accepted_by_driver_is_valid(run_here: Run, document: dict[str, Any]) -> None:
    assert run_here("claim_config_info", {"definition": document})["problems"] == []


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        (
            claim(config({**GPU, "sharing": {"strategy": "Quick"}})),
            "spec.devices.config[0].opaque.parameters.sharing.strategy",
            "it is 'Quick'; expected TimeSlicing or MPS",
        ),
        (claim(config({"kind": "GpuConfig"})), "spec.devices.config[0].opaque.parameters", "has no apiVersion"),
        (claim(config("text")), "spec.devices.config[0].opaque.parameters", "it is 'text'. Expected a mapping"),
        (
            claim(config(GPU), config(MIG, "gpu")),
            "spec.devices.config[1]",
            "is for a partition, and the class gpu.nvidia.com",
        ),
        (claim(config(MIG)), "spec.devices.config[0]", "MigDeviceConfig is for a partition"),
        (
            claim(config(VNPU, "npu", driver=NPU), requests=[request("npu", NPU)]),
            "spec.devices.config[0]",
            "VnpuConfig is for a partition, and the class npu.huawei.com",
        ),
        (
            claim(config({**VNPU, "template": "1g.10gb"}, driver=NPU), requests=[request("slice", "vnpu.huawei.com")]),
            "spec.devices.config[0].opaque.parameters.template",
            "it is '1g.10gb'; expected the name of a template such as vir02",
        ),
        (claim(config(GPU, "gpu", "other")), "spec.devices.config[0].requests", "'other' is no request of this object"),
        (
            claim(config(SHARING), config({**SETTINGS, "computeMode": "Prohibited"})),
            "spec.devices.config",
            "DeviceSettings wants computeMode Prohibited and GpuConfig wants Default",
        ),
        (
            claim(
                config({**MIG, "sharing": {"strategy": "MPS"}}),
                requests=[request("p", "mig.nvidia.com", adminAccess=True)],
            ),
            "spec.devices.config",
            "it has a program run for the device, and a claim with administrator's access changes nothing",
        ),
        (
            claim(config(SHARING), requests=[request("gpu", adminAccess=True)]),
            "spec.devices.config",
            "a claim with administrator's access changes nothing on a device. Leave the configuration out, or adminAccess. (request gpu)",
        ),
        (claim(config(GPU), version="v9"), "apiVersion", "it is 'v9'; expected resource.k8s.io/v1, "),
        ({**claim(), "spec": {"devices": []}}, "spec.devices", "a list instead of a mapping"),
        ({**claim(), "spec": {"devices": {"config": {}}}}, "spec.devices.config", "a mapping instead of a list"),
    ],
)
def test_configuration_rejected_by_driver_is_reported(run_here: Run, document: Any, path: str, message: str) -> None:
    result = run_here("claim_config_info", {"definition": [document]})
    assert result["valid"] is False
    (problem,) = result["problems"]
    assert (problem["object"], problem["path"]) == ("ResourceClaim team/c", path)
    assert message in problem["message"]


def test_all_api_versions_and_kinds_are_checked(run_here: Run) -> None:
    wrong = config({**GPU, "shading": 1}, "gpu")
    older = {**claim(wrong, version="v1beta1"), "kind": "ResourceClaim"}
    older["spec"]["devices"]["requests"] = [{"name": "gpu", "deviceClassName": "gpu.nvidia.com"}]
    template = {**claim(wrong, version="v1beta2"), "kind": "ResourceClaimTemplate"}
    template["spec"] = {"spec": template["spec"]}
    device_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": "mig.nvidia.com"},
        "spec": {"config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": GPU}}]},
    }
    text = yaml.safe_dump_all([{"apiVersion": "v1", "kind": "List", "items": [older, template]}, device_class, None])
    result = run_here("claim_config_info", {"definition": text})
    assert result["configurations"] == 3
    assert [(problem["object"], problem["path"]) for problem in result["problems"]] == [
        ("ResourceClaim team/c", "spec.devices.config[0].opaque.parameters.shading"),
        ("ResourceClaimTemplate team/c", "spec.spec.devices.config[0].opaque.parameters.shading"),
        ("DeviceClass mig.nvidia.com", "spec.config[0]"),
    ]


def test_device_classes_option_sets_kind(run_here: Run) -> None:
    document = claim(config(MIG), requests=[request("gpu", "big")])
    result = run_here("claim_config_info", {"definition": document, "device_classes": {"big": "device"}})
    assert "the class big has devices" in result["problems"][0]["message"]
    passed = run_here("claim_config_info", {"definition": document, "device_classes": {"big": "passthrough"}})
    assert "the class big has devices that are passed through" in passed["problems"][0]["message"]
    refused = run_here("claim_config_info", {"definition": document, "device_classes": {"big": "gpu"}})
    assert refused["failed"] and "big is 'gpu'; expected device, partition, passthrough or group" in refused["msg"]


def test_device_classes_in_manifests_set_kind(run_here: Run) -> None:
    of_partitions = "device.attributes['gpu.nvidia.com'].type == 'mig'"
    device_class = {
        "apiVersion": "resource.k8s.io/v1beta1",
        "kind": "DeviceClass",
        "metadata": {"name": "small"},
        "spec": {"selectors": [{"cel": {"expression": of_partitions}}]},
    }
    document = claim(config(GPU), requests=[request("gpu", "small")])
    assert run_here("claim_config_info", {"definition": document})["valid"] is True
    both = {"apiVersion": "v1", "kind": "List", "items": [document, device_class]}
    for definition in ([document, device_class], both):
        result = run_here("claim_config_info", {"definition": definition})
        assert "GpuConfig is for a device, and the class small has partitions" in result["problems"][0]["message"]
    options = {"definition": both, "device_classes": {"small": "device"}}
    assert run_here("claim_config_info", options)["valid"] is True


def test_fail_if_invalid_fails(run_here: Run) -> None:
    document = claim(config({**SETTINGS, "powerLimit": 0, "clock": 1}))
    result = run_here("claim_config_info", {"definition": document, "fail_if_invalid": True})
    assert result["failed"] and result["error_code"] == "config-refused"
    assert len(result["problems"]) == 2
    assert "powerLimit: it is 0; expected a whole number from 1 to 100000 W" in result["msg"]


def test_invalid_yaml_is_an_error(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: [")
    result = run_here("claim_config_info", {"src": str(tmp_path / "x.yaml")})
    assert (
        result["failed"]
        and result["error_code"] == "manifest-unreadable"
        and "x.yaml is not valid YAML" in result["msg"]
    )
    missing = run_here("claim_config_info", {"src": str(tmp_path / "y.yaml")})
    assert missing["failed"] and missing["error_code"] == "os-error"
