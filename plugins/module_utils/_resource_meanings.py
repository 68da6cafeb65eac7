# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What the resources of all vendors' device plugins are, by their names. Needs the standard library alone."""

from __future__ import annotations

from .core.ascend import vendor as ascend
from .core.extended_resources import Meaning
from .core.nvidia import vendor as nvidia

FACTS = (nvidia.FACTS, ascend.FACTS)
DRIVERS = tuple(each.driver_name for each in FACTS)
#: Labels of a Node by which a vendor's operator is told whether its device plugin runs there.
SWITCHES = tuple(label for each in FACTS for label in each.plugin_switches)
#: Labels of a Node by which programs are told of it that give devices out, or cut them up, without knowing of claims.
MANAGER_LABELS = tuple(label for each in FACTS for label in each.manager_labels)
#: Labels of a Node that say how many times each device is offered.
REPLICA_LABELS = tuple(label for each in FACTS for label in each.replica_labels)


def meaning(resource: str) -> Meaning | None:
    """Return what a resource is; None for what is no vendor's that this collection knows."""
    return nvidia.resource_meaning(resource) or ascend.resource_meaning(resource)
