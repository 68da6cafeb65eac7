# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The selectors' certain statements about a class's devices. Uncertain ones are ignored."""

from __future__ import annotations

from typing import Any

import pytest
from dra_driver.core.dra.class_kinds import kind_of_class, kinds_of_classes
from dra_driver.core.model import DEVICE, PARTITION, PASSTHROUGH
from dra_driver.core.vendors.nvidia.configs import DEVICE_TYPES
from hypothesis import given
from hypothesis import strategies as st

TYPES = {"gpu.nvidia.com": DEVICE_TYPES}
ATTRIBUTE = "device.attributes['gpu.nvidia.com'].type"
GPU, MIG = f"{ATTRIBUTE} == 'gpu'", f"{ATTRIBUTE} == 'mig'"


def device_class(*expressions: str, name: str = "ours", version: str = "v1") -> dict[str, Any]:
    selectors = [{"cel": {"expression": expression}} for expression in expressions]
    metadata = {"name": name}
    return {
        "apiVersion": f"resource.k8s.io/{version}",
        "kind": "DeviceClass",
        "metadata": metadata,
        "spec": {"selectors": selectors},
    }


@pytest.mark.parametrize(
    ("expressions", "kind"),
    [
        ([GPU], DEVICE),
        ([MIG], PARTITION),
        ([f"{ATTRIBUTE} == 'vfio'"], PASSTHROUGH),
        ([f"'mig' == {ATTRIBUTE}"], PARTITION),
        (['device.attributes["gpu.nvidia.com"].type=="mig"'], PARTITION),
        ([f"device.driver == 'gpu.nvidia.com' &&\n  {MIG}\n"], PARTITION),
        (["device.driver == 'gpu.nvidia.com'", MIG], PARTITION),
        ([f"(1 == 1 || 2 == 2) && {GPU} && device.attributes['gpu.nvidia.com'].productName.matches('A|B')"], DEVICE),
        ([f"device.attributes['gpu.nvidia.com'].productName == 'a && b || c' && {GPU}"], DEVICE),
        ([GPU, "true"], DEVICE),
    ],
)
def test_kind_of_class_certain_expressions_are_read(expressions: list[str], kind: str) -> None:
    assert kind_of_class(device_class(*expressions), TYPES) == kind


@pytest.mark.parametrize(
    "expressions",
    [
        [],
        ["device.driver == 'gpu.nvidia.com'"],
        [f"{GPU} || {MIG}"],
        [f"{GPU} && true || true"],
        [f"true ? {GPU} : {MIG}"],
        [f"!({GPU})"],
        [f"{ATTRIBUTE} != 'gpu'"],
        [f"{GPU} == false"],
        [f"[{GPU} && {GPU}].size() == 1"],
        [f"'x' == 'x && {GPU} && x'"],
        [f"'a\\' && {GPU} && b' == 'c'"],
        [f"'''&& {GPU} &&''' == ''"],
        [f"true // && {GPU}"],
        [f"true && {GPU} && ("],
        ["device.attributes['gpu.example.com'].type == 'gpu'"],
        [f"{ATTRIBUTE} == 'fpga'"],
        [GPU, MIG],
    ],
)
def test_kind_of_class_uncertain_expressions_are_ignored(expressions: list[str]) -> None:
    assert kind_of_class(device_class(*expressions), TYPES) is None


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_kinds_of_classes_reads_manifests_and_lists(version: str) -> None:
    one, other = device_class(GPU, version=version), device_class(MIG, name="b", version=version)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
    documents = [pod, one, None, {"kind": "List", "items": [other, device_class("true", name="c")]}]
    assert kinds_of_classes(documents, TYPES) == {"ours": DEVICE, "b": PARTITION}


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["cel", "expression", "x"]), inner),
    max_leaves=8,
)


@given(spec=JSON, selectors=JSON, metadata=JSON)
def test_kinds_of_classes_any_class_raises_nothing(spec: Any, selectors: Any, metadata: Any) -> None:
    document = {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": metadata}
    for each in (spec, {"selectors": selectors}):
        kinds_of_classes([{**document, "spec": each}], TYPES)


@given(st.text(alphabet="ab'\"&|?()[]! =", max_size=20), st.sampled_from(["||", "?"]))
def test_kind_of_class_alternative_is_never_ignored(other: str, operator: str) -> None:
    assert kind_of_class(device_class(f"{GPU} {operator} {other}"), TYPES) is None
