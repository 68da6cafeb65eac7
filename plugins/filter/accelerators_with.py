# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: accelerators_with
version_added: 0.1.0
short_description: Those devices that meet all criteria
description:
  - Leaves of a list of devices those that meet every criterion that is given, in their order.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: Devices, as the filter P(dra.accelerators.accelerators#filter) returns them, or as the inventory has them for each node.
    type: list
    elements: dict
    required: true
  free:
    description:
      - What a claim has to be able to have of the device at this moment. A quantity such as V(40Gi), which is one of memory, or a dictionary of
        capacities with quantities.
      - A GPU that is sold as one of 80 GB has somewhat less than V(80Gi) of memory.
    type: raw
  capacity:
    description: What the device has, whoever has it. As O(free).
    type: raw
  available:
    description: Whether a claim that tolerates no taint could have it, or a share of it.
    type: bool
  driver:
    description: A pattern of shell, or a list of them, for the name of the driver.
    type: raw
  type:
    description: Likewise for the type, such as V(gpu), V(mig) or V(npu).
    type: raw
  product:
    description: Likewise for the product, such as V(*H100*).
    type: raw
  profile:
    description: Likewise for the kind of partition, such as V(1g.10gb).
    type: raw
  name:
    description: Likewise for the name.
    type: raw
  uuid:
    description: Likewise for the UUID.
    type: raw
  pool:
    description: Likewise for the pool.
    type: raw
  node:
    description: Likewise for the node.
    type: raw
  whole:
    description: Whether it is no part of something else that is published.
    type: bool
  shared:
    description: Whether several claims can have it at a time.
    type: bool
  tainted:
    description: Whether it has a taint.
    type: bool
  held:
    description: Whether a claim has it, or a share of it.
    type: bool
  attributes:
    description: Attributes with the values that they have to have. The names of the driver's own need no domain.
    type: dict
seealso:
  - plugin: dra.accelerators.accelerators
    plugin_type: filter
  - plugin: dra.accelerators.nodes_with_accelerators
    plugin_type: filter
  - plugin: dra.accelerators.holding_accelerators
    plugin_type: test
"""

EXAMPLES = r"""
- name: Say which GPUs of this node have at least 40 GiB of memory free
  ansible.builtin.debug:
    msg: "{{ accelerators | dra.accelerators.accelerators_with(type='gpu', free='40Gi') | map(attribute='name') | list }}"

- name: Say which H100 nobody has
  ansible.builtin.debug:
    msg: "{{ accelerators | dra.accelerators.accelerators_with(product='*H100*', whole=true, held=false, tainted=false) }}"

- name: Say which devices have eight AI cores and 16 GiB left for a share
  ansible.builtin.debug:
    msg: "{{ accelerators | dra.accelerators.accelerators_with(shared=true, free={'aicores': 8, 'memory': '16Gi'}) }}"
"""

RETURN = r"""
_value:
  description: The devices, as they were.
  type: list
  elements: dict
  sample: [{driver: gpu.nvidia.com, node: gpu-node-1, name: gpu-0, available: true, free: {memory: 85520809984}}]
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils._inventory import select


def accelerators_with(devices: Any, **criteria: Any) -> list[Any]:
    """Return the devices that meet the criteria. Raises AnsibleFilterError."""
    if not isinstance(devices, (list, tuple)):
        raise AnsibleFilterError(f"accelerators_with: found {devices!r}, expected a list of devices")
    try:
        return select(devices, **criteria)
    except (AttributeError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"accelerators_with: {error}") from error


class FilterModule:
    """The filter, as Ansible asks for it."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"accelerators_with": accelerators_with}
