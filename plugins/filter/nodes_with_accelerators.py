# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: nodes_with_accelerators
version_added: 0.1.0
short_description: List the nodes with a number of matching devices
description:
  - Returns the names of the nodes that have at least O(count) devices that meet all given criteria.
  - Devices that consume the same counters, such as the placements of a partition, exclude each other. With O(free) or O(available=true), the filter
    counts only devices that can be allocated at the same time. It selects them one after another, first fit.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
extends_documentation_fragment:
  - dra.accelerators._criteria
  - dra.accelerators._criteria.count
seealso:
  - plugin: dra.accelerators.accelerators
    plugin_type: filter
  - plugin: dra.accelerators.accelerators_with
    plugin_type: filter
  - plugin: dra.accelerators.holding_accelerators
    plugin_type: test
"""

EXAMPLES = r"""
- name: Show the nodes with four free GPUs
  ansible.builtin.debug:
    msg: "{{ slices.resources | dra.accelerators.accelerators(claims.resources) | dra.accelerators.nodes_with_accelerators(4, type='gpu', free='40Gi') }}"

- name: Show the nodes with a tainted NPU
  ansible.builtin.debug:
    msg: "{{ slices.resources | dra.accelerators.accelerators | dra.accelerators.nodes_with_accelerators(driver='npu.huawei.com', tainted=true) }}"
"""

RETURN = r"""
_value:
  description: The names, sorted.
  type: list
  elements: str
  sample: [gpu-node-1, gpu-node-4]
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import nodes_with


def nodes_with_accelerators(devices: Any, count: Any = 1, **criteria: Any) -> list[str]:
    """Return the names of the nodes. Raises AnsibleFilterError."""
    if not isinstance(devices, (list, tuple)):
        raise AnsibleFilterError(f"nodes_with_accelerators: found {devices!r}, expected a list of devices")
    try:
        # A template can have converted the integer to a string.
        return nodes_with(devices, int(count), **criteria)
    except (AttributeError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"nodes_with_accelerators: {error}") from error


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"nodes_with_accelerators": nodes_with_accelerators}
