# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Look up the resources of all vendors' device plugins by name. Needs only the standard library."""

from __future__ import annotations

from ..core.dra.extended_resources import Meaning
from ..core.vendors.ascend import vendor as ascend
from ..core.vendors.nvidia import vendor as nvidia

FACTS = (nvidia.FACTS, ascend.FACTS)
DRIVERS = tuple(each.driver_name for each in FACTS)
#: Labels of a Node by which a vendor's operator removes its device plugin from the node.
SWITCHES = tuple(label for each in FACTS for label in each.plugin_switches)
#: Labels of a Node for programs that assign or partition devices without using claims.
MANAGER_LABELS = tuple(label for each in FACTS for label in each.manager_labels)
#: Labels of a Node with the number of times that each device is offered.
REPLICA_LABELS = tuple(label for each in FACTS for label in each.replica_labels)


def meaning(resource: str) -> Meaning | None:
    """Return the meaning of a resource, or None if it belongs to no supported vendor."""
    return nvidia.resource_meaning(resource) or ascend.resource_meaning(resource)
