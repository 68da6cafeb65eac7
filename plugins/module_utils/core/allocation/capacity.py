# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Compute the amounts of a device's capacities that a request consumes, and compare them with the remaining amounts.

No side effects. Source: KEP-5075 and k8s.io/dynamic-resource-allocation/structured, 1.37. Amounts are exact here. The
scheduler computes in thousandths if a policy can be expressed in them, which gives the same result.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil

from .. import quantity
from .objects import Device, Json


def taken(requested: Mapping[str, Fraction], device: Device) -> dict[str, Fraction] | None:
    """Return the consumed amounts by capacity; None if a capacity is missing or its policy does not allow the request."""
    capacity = device.capacity
    if any(name not in capacity for name in requested):
        return None
    found = {}
    for name, entry in capacity.items():
        policy = entry.get("requestPolicy") or {}
        amount = _amount(requested.get(name), quantity.parse(entry["value"]), policy)
        if amount is None:
            return None
        found[name] = amount
    return found


def lacking(
    amounts: Mapping[str, Fraction], device: Device, consumed: Mapping[str, Fraction]
) -> tuple[str, Fraction, Fraction] | None:
    """Return the first insufficient capacity, with the requested and the remaining amount; None if all are sufficient."""
    for name, amount in amounts.items():
        left = quantity.parse(device.capacity[name]["value"]) - consumed.get(name, Fraction(0))
        if amount > left:
            return name, amount, left
    return None


def _amount(asked: Fraction | None, whole: Fraction, policy: Json) -> Fraction | None:
    if asked is None:
        return quantity.parse(policy["default"]) if policy.get("default") is not None else whole
    span = policy.get("validRange") or {}
    if span.get("min") is not None:
        least = quantity.parse(span["min"])
        amount = asked
        if asked < least:
            amount = least
        elif span.get("step") is not None:
            step = quantity.parse(span["step"])
            amount = least + step * ceil((asked - least) / step)
        too_much = span.get("max") is not None and amount > quantity.parse(span["max"])
        return None if too_much else amount
    if policy.get("validValues"):
        return next((one for each in policy["validValues"] if (one := quantity.parse(each)) >= asked), None)
    return asked
