# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Convert devices and counter sets to the form of a ResourceSlice."""

from __future__ import annotations

from typing import Any

from .. import quantity
from ..model import AttributeValue, CounterSet, Offer, RequestPolicy, Version

#: The conditions of a claim's device for which the scheduler waits before it binds the pod (KEP-5007): success and
#: failure.
PREPARED_CONDITION = "dra.accelerators/Prepared"
FAILED_CONDITION = "dra.accelerators/PreparationFailed"


def attribute_json(value: AttributeValue) -> dict[str, Any]:
    """Return an attribute's value in the API's form: a mapping with the one key that names its type."""
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    if isinstance(value, Version):
        return {"version": value.text}
    return {"string": value}


def amount(name: str, value: int) -> str:
    """Return a capacity or counter as a quantity; those named memory are in bytes."""
    return quantity.format_bytes(value) if name in ("memory", "addressableMemory") else str(value)


def published_form(offer: Offer) -> dict[str, Any]:
    """Return a device in the API's form, for a ResourceSlice."""
    device: dict[str, Any] = {"name": offer.name}
    if offer.attributes:
        device["attributes"] = {name: attribute_json(value) for name, value in sorted(offer.attributes.items())}
    if offer.capacities:
        device["capacity"] = {
            name: {"value": amount(name, value), **_policy_json(name, offer.policies.get(name))}
            for name, value in sorted(offer.capacities.items())
        }
    if offer.policies:
        device["allowMultipleAllocations"] = True
    if offer.all_counters:
        device["consumesCounters"] = [
            {
                "counterSet": name,
                "counters": {counter: {"value": amount(counter, value)} for counter, value in sorted(counters.items())},
            }
            for name, counters in offer.all_counters.items()
        ]
    if offer.prepared_before_binding:
        device.update({"bindingConditions": [PREPARED_CONDITION], "bindingFailureConditions": [FAILED_CONDITION]})
    if offer.taints:
        device["taints"] = [
            {"key": taint.key, "effect": taint.effect, **({"value": taint.value} if taint.value else {})}
            for taint in offer.taints
        ]
    return device


def _policy_json(name: str, policy: RequestPolicy | None) -> dict[str, Any]:
    if policy is None:
        return {}
    allowed = {"min": amount(name, policy.minimum), "step": amount(name, policy.step)}
    return {"requestPolicy": {"default": amount(name, policy.default), "validRange": allowed}}


def counter_set_form(each: CounterSet) -> dict[str, Any]:
    """Return a counter set in the API's form, for a ResourceSlice."""
    counters = {name: {"value": amount(name, value)} for name, value in sorted(each.counters.items())}
    return {"name": each.name, "counters": counters}
