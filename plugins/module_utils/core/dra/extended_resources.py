# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Define the meaning of extended resources with the names of the vendors' device plugins: their devices and DeviceClasses.

No side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..model import DEVICE, PARTITION

__all__ = ("DEVICE", "PARTITION", "SHARED", "Meaning", "attribute_in", "class_of", "selector")

#: The kind of a resource that is one of several replicas of a device or partition, without dedicated capacity.
SHARED = "shared"


@dataclass(frozen=True)
class Meaning:
    """The meaning of one resource.

    ``kind`` is DEVICE, PARTITION, or SHARED. ``driver`` is the DRA driver with such devices. ``device_class`` is the
    DeviceClass by which this collection serves the resource, and ``selector`` its CEL expression. Both are empty if
    claims cannot serve it. ``of`` is then the resource whose replicas it offers.
    """

    resource: str
    vendor: str
    driver: str
    kind: str
    device_class: str = ""
    selector: str = ""
    of: str = ""


def class_of(resource: str) -> str:
    """Return the DeviceClass name for a resource: ``part-4.example.com`` for ``example.com/part-4``."""
    domain, _slash, name = resource.partition("/")
    return f"{name.lower().replace('_', '-')}.{domain}"


def attribute_in(driver: str, name: str, values: Sequence[str]) -> str:
    """Return a CEL expression that is true if a driver's attribute has one of these values."""
    attribute = f"device.attributes['{driver}'].{name}"
    if len(values) == 1:
        return f"{attribute} == '{values[0]}'"
    return f"{attribute} in [{', '.join(repr(each) for each in values)}]"


def selector(driver: str, *conditions: str) -> str:
    """Return a CEL expression that is true for a driver's devices that meet all conditions.

    Conditions are evaluated in order.
    """
    return " && ".join((f"device.driver == '{driver}'", *conditions))
