# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What the resources are that pods ask for in their limits, by the names of the vendors' device plugins, and which devices serve them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .model import DEVICE, PARTITION

__all__ = ("DEVICE", "PARTITION", "SHARED", "Meaning", "attribute_in", "class_of", "selector")

#: One of several replicas of a device, or of a partition, without a part of its own.
SHARED = "shared"


@dataclass(frozen=True)
class Meaning:
    """What one resource is of its vendor's.

    ``kind`` is DEVICE, PARTITION or SHARED; ``driver`` is the DRA driver that has such devices. ``device_class`` is the DeviceClass by
    which this collection serves it and ``selector`` the CEL of that; both are empty for what no claim can be. ``of`` is then the resource
    of which it is a replica.
    """

    resource: str
    vendor: str
    driver: str
    kind: str
    device_class: str = ""
    selector: str = ""
    of: str = ""


def class_of(resource: str) -> str:
    """Return the name of the DeviceClass for a resource that has no class of its own: ``part-4.example.com`` for ``example.com/part-4``."""
    domain, _slash, name = resource.partition("/")
    return f"{name.lower().replace('_', '-')}.{domain}"


def attribute_in(driver: str, name: str, values: Sequence[str]) -> str:
    """Return CEL that is true where an attribute of the driver's own has one of these values."""
    attribute = f"device.attributes['{driver}'].{name}"
    if len(values) == 1:
        return f"{attribute} == '{values[0]}'"
    return f"{attribute} in [{', '.join(repr(each) for each in values)}]"


def selector(driver: str, *conditions: str) -> str:
    """Return CEL that is true for the devices of a driver for which all conditions are; a later one is asked only where the former hold."""
    return " && ".join((f"device.driver == '{driver}'", *conditions))
