# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Manifests of any form are checked without unexpected errors, and refused only for their own content."""

from __future__ import annotations

from typing import Any

import pytest
from dra_driver.core.dra.configuration_check import VERSIONS, check_manifest
from dra_driver.core.vendors.nvidia.configs import CONFIG_KINDS, DEVICE_CLASSES
from hypothesis import given
from hypothesis import strategies as st

DRIVER = "gpu.nvidia.com"
KEYS = st.sampled_from(
    [
        "spec",
        "devices",
        "requests",
        "config",
        "opaque",
        "driver",
        "parameters",
        "exactly",
        "firstAvailable",
        "deviceClassName",
        "name",
        "sharing",
        "kind",
        "apiVersion",
        "adminAccess",
        "metadata",
        "items",
    ]
)
WORDS = st.sampled_from(
    [DRIVER, "mig.nvidia.com", "gpu", "GpuConfig", "DeviceSettings", "resource.nvidia.com/v1beta1", "TimeSlicing"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4),
    max_leaves=15,
)
KINDS = st.sampled_from(["ResourceClaim", "ResourceClaimTemplate", "DeviceClass", "List", "Pod"])
CONFIGURATION = st.fixed_dictionaries(
    {"opaque": st.fixed_dictionaries({"driver": st.just(DRIVER), "parameters": JSON})}, optional={"requests": JSON}
)
REQUEST = st.fixed_dictionaries({"name": WORDS}, optional={"exactly": JSON, "firstAvailable": JSON})


def document(kind: str, version: str, spec: Any) -> dict[str, Any]:
    inside = {"spec": spec} if kind == "ResourceClaimTemplate" else spec
    return {"apiVersion": f"resource.k8s.io/{version}", "kind": kind, "metadata": {"name": "x"}, "spec": inside}


@given(KINDS, st.sampled_from(VERSIONS), JSON)
def test_check_manifest_any_document_raises_nothing(kind: str, version: str, spec: Any) -> None:
    checked = check_manifest(document(kind, version, spec), {DRIVER: CONFIG_KINDS}, DEVICE_CLASSES)
    assert all(problem.path and problem.message for problem in checked.problems)
    assert check_manifest(spec, {}, {}).configurations == 0


@given(st.lists(CONFIGURATION, max_size=3), st.lists(REQUEST, max_size=3))
def test_check_manifest_checks_each_configuration_of_the_driver(configs: list[Any], requests: list[Any]) -> None:
    spec = {"devices": {"config": configs, "requests": requests}}
    checked = check_manifest(document("ResourceClaim", "v1", spec), {DRIVER: CONFIG_KINDS}, DEVICE_CLASSES)
    if not any(problem.message.endswith(("instead of a mapping", "instead of a list")) for problem in checked.problems):
        assert checked.configurations == len(configs)
    others = check_manifest(document("ResourceClaim", "v1", spec), {"other.example.com": CONFIG_KINDS}, {})
    assert others.configurations == 0


def test_check_manifest_overridden_configuration_is_doubted() -> None:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}

    def given(*requests: list[str]) -> dict[str, Any]:
        configs = [{"requests": each, "opaque": {"driver": DRIVER, "parameters": parameters}} for each in requests]
        request_for = [{"name": name, "exactly": {"deviceClassName": DRIVER}} for name in "ab"]
        return document("ResourceClaim", "v1", {"devices": {"requests": request_for, "config": configs}})

    def doubted(*requests: list[str]) -> list[str]:
        checked = check_manifest(given(*requests), {DRIVER: CONFIG_KINDS}, DEVICE_CLASSES)
        assert not checked.problems
        return [doubt.path for doubt in checked.doubts]

    assert doubted([]) == doubted(["a"], ["b"]) == doubted([], ["b"]) == []
    assert doubted(["a"], ["b"], []) == ["spec.devices.config[0]", "spec.devices.config[1]"]
    assert doubted(["a"], ["a"]) == ["spec.devices.config[0]"]


def opaque(requests: list[str], kind: str, **fields: Any) -> dict[str, Any]:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, **fields}
    return {"requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}}


def mps(**fields: Any) -> dict[str, Any]:
    return {"strategy": "MPS", "mpsConfig": fields}


LIMITS = {"defaultActiveThreadPercentage": 50, "defaultPinnedDeviceMemoryLimit": "10Gi"}
BY_TURNS = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Long"}}
IOMMU = {"backendPolicy": "PreferIommuFD", "enableAPIDevice": True}
#: Claims like the manifests of kubernetes-sigs/dra-driver-nvidia-gpu for sharing and for virtual machines: the class of
#: each request, and the configurations.
SHAPES: dict[str, tuple[dict[str, str], list[dict[str, Any]]]] = {
    "MPS": (
        {"mps-gpu": DRIVER},
        [opaque(["mps-gpu"], "GpuConfig", sharing=mps(**LIMITS, defaultPerDevicePinnedMemoryLimit={"0": "5Gi"}))],
    ),
    "MPS by the name of a device": (
        {"gpu": DRIVER},
        [
            opaque(
                [], "GpuConfig", sharing=mps(defaultPerDevicePinnedMemoryLimit={f"GPU-{'0' * 36}": "1Gi", "1": "2Gi"})
            )
        ],
    ),
    "time-slicing with MPS": (
        {"ts-gpu": DRIVER, "mps-gpu": DRIVER},
        [
            opaque(["ts-gpu"], "GpuConfig", sharing=BY_TURNS),
            opaque(["mps-gpu"], "GpuConfig", sharing=mps(**LIMITS)),
        ],
    ),
    "MPS on a partition": ({"mig": "mig.nvidia.com"}, [opaque(["mig"], "MigDeviceConfig", sharing=mps(**LIMITS))]),
    "whole and part": (
        {"gpu": DRIVER, "mig": "mig.nvidia.com"},
        [opaque(["gpu"], "GpuConfig", sharing=BY_TURNS), opaque(["mig"], "MigDeviceConfig")],
    ),
    "a virtual machine": ({"vm": "vfio.gpu.nvidia.com"}, [opaque(["vm"], "VfioDeviceConfig", iommu=IOMMU)]),
    "a virtual machine as it comes": ({"vm": "vfio.gpu.nvidia.com"}, [opaque(["vm"], "VfioDeviceConfig")]),
}
#: By class, a kind of configuration that is wrong because it is for another class of devices.
OTHERS = {DRIVER: "MigDeviceConfig", "mig.nvidia.com": "VfioDeviceConfig", "vfio.gpu.nvidia.com": "GpuConfig"}


def request_for(version: str, name: str, device_class: str) -> dict[str, Any]:
    """Return a request for one device. The first version of the API had no `exactly`."""
    inside = {"deviceClassName": device_class}
    return {"name": name, **(inside if version == "v1beta1" else {"exactly": inside})}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate"])
@pytest.mark.parametrize("shape", SHAPES)
def test_check_manifest_vendor_sharing_and_passthrough_are_accepted(version: str, kind: str, shape: str) -> None:
    classes, configs = SHAPES[shape]
    requests = [request_for(version, name, device_class) for name, device_class in classes.items()]

    def checked(given: list[dict[str, Any]]) -> Any:
        manifest = document(kind, version, {"devices": {"requests": requests, "config": given}})
        return check_manifest(manifest, {DRIVER: CONFIG_KINDS}, DEVICE_CLASSES)

    found = checked(configs)
    assert (list(found.problems), list(found.doubts), found.configurations) == ([], [], len(configs))
    (name, device_class), *_others = classes.items()
    wrong = checked([opaque([name], OTHERS[device_class]), *configs[1:]])
    assert [problem.path.rpartition("devices.")[2].partition(".")[0] for problem in wrong.problems] == ["config[0]"]
