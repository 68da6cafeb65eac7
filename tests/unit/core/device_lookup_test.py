# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Attributes by name, and the devices that a taint rule selects."""

from __future__ import annotations

from typing import Any

import pytest
from dra_driver.core.dra.device_lookup import attribute_of, selects

DRIVER = "gpu.nvidia.com"


@pytest.mark.parametrize(
    ("values", "name", "found"),
    [
        ({"uuid": 1}, "uuid", 1),
        ({"uuid": 1}, f"{DRIVER}/uuid", 1),
        ({f"{DRIVER}/uuid": 1}, "uuid", 1),
        ({f"{DRIVER}/uuid": 1, "uuid": 2}, f"{DRIVER}/uuid", 1),
        ({"other.com/uuid": 1}, "other.com/uuid", 1),
        ({"uuid": 1}, "other.com/uuid", None),
        ({"other.com/uuid": 1}, "uuid", None),
        ({f"{DRIVER}/shared": False, "shared": True}, "shared", False),
        ({}, "uuid", None),
    ],
)
def test_attribute_of_qualified_or_short_name(values: dict[str, Any], name: str, found: Any) -> None:
    assert attribute_of(values, DRIVER, name) is found


@pytest.mark.parametrize(
    ("spec", "about"),
    [
        ({}, True),
        ({"deviceSelector": None}, True),
        ({"deviceSelector": {}}, True),
        ({"deviceSelector": {"driver": DRIVER}}, True),
        ({"deviceSelector": {"driver": DRIVER, "pool": "node-1", "device": "gpu-0"}}, True),
        ({"deviceSelector": {"driver": DRIVER, "pool": "node-1", "device": "gpu-1"}}, False),
        ({"deviceSelector": {"pool": "node-2"}}, False),
        ({"deviceSelector": {"driver": None, "device": "gpu-0"}}, True),
        ({"deviceSelector": {"device": ""}}, False),
    ],
)
def test_selects_without_selector_selects_every_device(spec: dict[str, Any], about: bool) -> None:
    assert selects({"spec": spec}, driver=DRIVER, pool="node-1", device="gpu-0") is about
