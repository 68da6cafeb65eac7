# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: nodes_with_accelerators
version_added: 0.1.0
short_description: The nodes that hold so many devices of a kind
description:
  - Returns the names of the nodes that have at least so many devices that meet every criterion that is given.
  - Devices that draw on the same counters, such as the placements of a partition, are in each other's way. What can be had at the same time is
    counted by taking one after the other, as the first fit finds them.
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
- name: Say which nodes could run a job of four GPUs now
  ansible.builtin.debug:
    msg: "{{ slices.resources | dra.accelerators.accelerators(claims.resources) | dra.accelerators.nodes_with_accelerators(4, type='gpu', free='40Gi') }}"

- name: Say which nodes have an NPU with a taint
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
        # A template may have made a text of the number.
        return nodes_with(devices, int(count), **criteria)
    except (AttributeError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"nodes_with_accelerators: {error}") from error


class FilterModule:
    """The filter, as Ansible asks for it."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"nodes_with_accelerators": nodes_with_accelerators}
