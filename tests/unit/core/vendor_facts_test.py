# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Names of vendors, and the labels of a Node about its devices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import board_model
import pytest
from chip_model import device as chip_device
from dra_driver.core.dra.node_labels import LONGEST_VALUE, common_value, drop_empty_labels, value_of
from dra_driver.core.model import Device
from dra_driver.core.vendors.registry import BACKENDS, create
from hypothesis import given
from hypothesis import strategies as st

LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
LABEL_NAME = re.compile(r"[a-z0-9.-]+/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")


@pytest.mark.parametrize("vendor", BACKENDS)
def test_vendor_facts_are_complete(vendor: str) -> None:
    backend = create(vendor)
    facts = backend.facts
    assert (facts.word, facts.driver_name, facts.cdi_kind) == (vendor, backend.driver_name, backend.cdi_kind)
    assert facts.title and facts.devices and facts.kernel_module and facts.exporter.prefixes
    assert all(name.startswith(f"{facts.domain}/") for name in facts.extended_resources.values())
    assert all(LABEL_NAME.fullmatch(name) for name in facts.labels)
    assert all(path.startswith("/dev/") for path in (*facts.control_nodes, *facts.device_nodes))
    assert facts.layout_unit.startswith("dra-accelerators-layout") and facts.layout_unit.endswith(".service")
    document = json.loads(json.dumps(facts.document()))
    assert document["driver_name"] == facts.driver_name and document["exporter"]["port"] == facts.exporter.port
    assert document["extended_resources"] == dict(facts.extended_resources) and document["labels"] == list(facts.labels)
    assert dict(backend.labels([])) == {}


def test_vendor_facts_are_unique() -> None:
    facts = [create(vendor).facts for vendor in BACKENDS]
    for name in ("driver_name", "cdi_kind", "domain", "layout_unit", "kernel_module", "title"):
        assert len({getattr(each, name) for each in facts}) == len(facts), name
    assert len({each.exporter.port for each in facts}) == len(facts)


def test_labels_of_gpus_have_expected_values() -> None:
    """The most important labels. docs/labels.md has all of them, and node_labels_test.py compares them."""
    first = board_model.device("h100-80")
    found = create("nvidia").labels([first, first])
    assert found["nvidia.com/gpu.count"] == "2" and found["nvidia.com/gpu.family"] == "hopper"
    assert found["nvidia.com/gpu.memory"] == str(first.memory_bytes // 1024**2)
    assert set(found) <= set(create("nvidia").facts.labels)


def npu(kind: str, **attributes: Any) -> Device:
    found = chip_device(kind)
    return replace(found, attributes={**found.attributes, **attributes})


def test_labels_of_npus_have_expected_values() -> None:
    labels = create("ascend").labels
    pod: Mapping[str, Any] = {"model": "Ascend910", "superPodID": 7, "serverID": 0, "sdid": 11}
    here = [npu("A3", **pod), npu("A3", **pod, rackID=3)]
    here = [replace(each, pci_device_id=0xD80319E5, memory_bytes=64 * 1024**3) for each in here]
    assert dict(labels(here)) == {
        "huawei.com/npu.chip.memory": "64G",
        "huawei.com/npu.chip.name": "Ascend910",
        "huawei.com/topotree.serverid": "0",
        "huawei.com/topotree.superpodid": "7",
        "node.kubernetes.io/npu.chip.name": "Ascend910",
    }
    assert labels([here[1]])["huawei.com/topotree.rackid"] == "3"
    # A chip with external memory has no memory label, and chips of two super-pods get no super-pod label.
    small = replace(npu("310P", model="310P3"), pci_device_id=0xD50019E5)
    assert set(labels([small])) == {"huawei.com/npu.chip.name", "node.kubernetes.io/npu.chip.name"}
    torn = labels([here[0], npu("A3", **{**pod, "superPodID": 8})])
    assert "huawei.com/topotree.superpodid" not in torn and "huawei.com/topotree.serverid" in torn


@given(st.text(max_size=90))
def test_value_of_any_text_is_a_label_value(text: str) -> None:
    value = value_of(text)
    assert LABEL_VALUE.fullmatch(value) and len(value) <= LONGEST_VALUE


@given(st.lists(st.none() | st.sampled_from(["a", "b", ""]) | st.integers(0, 1), max_size=4))
def test_common_value_of_differing_values_is_empty(values: list[object]) -> None:
    document = common_value(values)
    assert document == (
        str(values[0]) if values and values[0] is not None and len({str(each) for each in values}) == 1 else ""
    )
    assert drop_empty_labels({"x": document}) == ({"x": document} if document else {})
