# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: accelerators_with
version_added: 0.1.0
short_description: Select the devices that meet all criteria
description:
  - Returns the devices of a list that meet all given criteria, in the same order.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
extends_documentation_fragment:
  - dra.accelerators._criteria
seealso:
  - plugin: dra.accelerators.accelerators
    plugin_type: filter
  - plugin: dra.accelerators.nodes_with_accelerators
    plugin_type: filter
  - plugin: dra.accelerators.holding_accelerators
    plugin_type: test
"""

EXAMPLES = r"""
- name: Show the GPUs of this node with at least 40 GiB of free memory
  ansible.builtin.debug:
    msg: "{{ accelerators | dra.accelerators.accelerators_with(type='gpu', free='40Gi') | map(attribute='name') | list }}"

- name: Show the H100 GPUs that are not in use
  ansible.builtin.debug:
    msg: "{{ accelerators | dra.accelerators.accelerators_with(product='*H100*', whole=true, held=false, tainted=false) }}"

- name: Show the devices with eight AI cores and 16 GiB free for a share
  ansible.builtin.debug:
    msg: "{{ accelerators | dra.accelerators.accelerators_with(shared=true, free={'aicores': 8, 'memory': '16Gi'}) }}"
"""

RETURN = r"""
_value:
  description: The unchanged devices.
  type: list
  elements: dict
  sample: [{driver: gpu.nvidia.com, node: gpu-node-1, name: gpu-0, available: true, free: {memory: 85520809984}}]
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import select


def accelerators_with(devices: Any, **criteria: Any) -> list[Any]:
    """Return the devices that meet the criteria. Raises AnsibleFilterError."""
    if not isinstance(devices, (list, tuple)):
        raise AnsibleFilterError(f"accelerators_with: found {devices!r}, expected a list of devices")
    try:
        return select(devices, **criteria)
    except (AttributeError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"accelerators_with: {error}") from error


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"accelerators_with": accelerators_with}
