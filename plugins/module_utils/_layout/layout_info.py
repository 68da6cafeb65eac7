# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Functions of the modules that read the layout of a vendor's devices, export it as rules, and compare it with a layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..core.partitioning.layout_differences import compare, unread_difference
from ..core.vendors.protocol import Backend
from .apply_layout import NodeScan, Rules, scan_node, state
from .describe import describe_devices

#: Whether to read devices, or only to validate the layout.
READ_OPTION: dict[str, Any] = {"read_devices": {"type": "bool", "default": True}}

Additions = Callable[[NodeScan], tuple[dict[str, Any], Sequence[str]]]


def read_layout(
    module: AnsibleModule,
    backend: Backend,
    rules: Rules | None,
    *,
    mode_only: bool = False,
    more: Additions = lambda _scan: ({}, ()),
) -> dict[str, Any]:
    """Return the state of the devices of an open backend, and the layout that creates it.

    With ``rules``, also return the differences between the devices and these rules. A device that cannot be read is a difference.
    ``more`` returns additions to the exported layout, and the parts that these cannot describe. Without ``rules``, the module
    warns about the parts that the export does not contain.
    """
    scan = scan_node(backend, module.params["state_path"])
    described, left_out = describe_devices(scan.devices, scan.prepared)
    added, further = more(scan)
    left_out = list(dict.fromkeys([*left_out, *further, *(each.describe() for each in scan.faulty)]))
    result = {
        "changed": False,
        "devices": [state(device) for device in scan.devices],
        "exported": {"layout": described, **added},
        "left_out": left_out,
    }
    if rules is None:
        for text in left_out:
            module.warn(f"Not in the export: {text}")
        return result
    differences = compare(scan.devices, rules(scan), scan.prepared, mode_only=mode_only)
    differences += [unread_difference(each.name, str(each.fault), each.index, each.uuid) for each in scan.faulty]
    return {**result, "matches": not differences, "differences": differences}
