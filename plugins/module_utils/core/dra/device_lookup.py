# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Read published devices like the scheduler: attributes by name, and the applicable DeviceTaintRules. No side effects.

Source: k8s.io/dynamic-resource-allocation/resourceslice/tracker (tracker.go) and k8s.io/api/resource/v1/types.go,
QualifiedName.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def attribute_of(values: Mapping[str, T], driver: str, name: str) -> T | None:
    """Return an attribute or capacity by its qualified name, or None.

    Published names without a domain belong to the driver. A ``name`` without a domain also belongs to the driver.
    """
    domain, _slash, identifier = name.rpartition("/")
    if domain not in ("", driver):
        return values.get(name)
    qualified = values.get(f"{driver}/{identifier}")
    return values.get(identifier) if qualified is None else qualified


def selects(rule: Mapping[str, Any], *, driver: str, pool: str, device: str) -> bool:
    """Return whether a DeviceTaintRule applies to a device.

    To the scheduler, a rule with a missing or an empty selector applies to all devices. Each given field of a selector
    must be equal, even if it is the empty string.
    """
    selector = (rule.get("spec") or {}).get("deviceSelector") or {}
    named = ((selector.get("driver"), driver), (selector.get("pool"), pool), (selector.get("device"), device))
    return all(wanted is None or wanted == found for wanted, found in named)
