# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What is published of a device, read as the scheduler reads it: its attributes by name, and the taint rules that are about it. Pure.

Facts: k8s.io/dynamic-resource-allocation/resourceslice/tracker (tracker.go) and k8s.io/api/resource/v1/types.go, QualifiedName.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def attribute_of(values: Mapping[str, T], driver: str, name: str) -> T | None:
    """Return what is published under a fully qualified name, of attributes or capacities; what has no domain is the driver's own.

    ``name`` without a domain is taken for the driver's own as well. None where there is none.
    """
    domain, _slash, identifier = name.rpartition("/")
    if domain not in ("", driver):
        return values.get(name)
    qualified = values.get(f"{driver}/{identifier}")
    return values.get(identifier) if qualified is None else qualified


def selects(rule: Mapping[str, Any], *, driver: str, pool: str, device: str) -> bool:
    """Whether a DeviceTaintRule is about a device.

    A rule without a selector is about all devices to the scheduler, and so is one whose selector is empty. What a selector
    names has to be the same, also where it names the empty text.
    """
    selector = (rule.get("spec") or {}).get("deviceSelector") or {}
    named = ((selector.get("driver"), driver), (selector.get("pool"), pool), (selector.get("device"), device))
    return all(wanted is None or wanted == found for wanted, found in named)
