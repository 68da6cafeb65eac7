# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Manifests of any form are checked without an accident, and never for more than they hold."""

from __future__ import annotations

from typing import Any

from dra_driver.core.manifests import VERSIONS, check_manifest
from dra_driver.core.nvidia.configs import CONFIG_KINDS, DEVICE_CLASSES
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
def test_anything_at_all(kind: str, version: str, spec: Any) -> None:
    checked = check_manifest(document(kind, version, spec), {DRIVER: CONFIG_KINDS}, DEVICE_CLASSES)
    assert all(problem.path and problem.message for problem in checked.problems)
    assert check_manifest(spec, {}, {}).configurations == 0


@given(st.lists(CONFIGURATION, max_size=3), st.lists(REQUEST, max_size=3))
def test_every_configuration_of_the_driver_is_looked_at(configs: list[Any], requests: list[Any]) -> None:
    spec = {"devices": {"config": configs, "requests": requests}}
    checked = check_manifest(document("ResourceClaim", "v1", spec), {DRIVER: CONFIG_KINDS}, DEVICE_CLASSES)
    if not any(problem.message.endswith(("instead of a mapping", "instead of a list")) for problem in checked.problems):
        assert checked.configurations == len(configs)
    others = check_manifest(document("ResourceClaim", "v1", spec), {"other.example.com": CONFIG_KINDS}, {})
    assert others.configurations == 0


def test_a_configuration_that_a_later_one_makes_void_is_doubted_and_no_other() -> None:
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}

    def given(*requests: list[str]) -> dict[str, Any]:
        configs = [{"requests": each, "opaque": {"driver": DRIVER, "parameters": parameters}} for each in requests]
        asked = [{"name": name, "exactly": {"deviceClassName": DRIVER}} for name in "ab"]
        return document("ResourceClaim", "v1", {"devices": {"requests": asked, "config": configs}})

    def doubted(*requests: list[str]) -> list[str]:
        checked = check_manifest(given(*requests), {DRIVER: CONFIG_KINDS}, DEVICE_CLASSES)
        assert not checked.problems
        return [doubt.path for doubt in checked.doubts]

    assert doubted([]) == doubted(["a"], ["b"]) == doubted([], ["b"]) == []
    assert doubted(["a"], ["b"], []) == ["spec.devices.config[0]", "spec.devices.config[1]"]
    assert doubted(["a"], ["a"]) == ["spec.devices.config[0]"]
