# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: accelerators
version_added: 0.1.0
short_description: List the devices in ResourceSlices with their free capacity
description:
  - Converts ResourceSlices, and optionally ResourceClaims, to a list of devices. The filters, the tests, and the inventory plugin of this collection
    use this format for all vendors and drivers.
  - The free capacity is the capacity that the scheduler can still allocate. It depends on the claims that hold the device, the counters of
    overlapping partitions, the shares of a device with several claims, and the taints in the slices.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: ResourceSlices, as the API server returns them.
    type: list
    elements: dict
    required: true
  claims:
    description: ResourceClaims, as the API server returns them. Without them, all devices count as free.
    type: list
    elements: dict
    default: []
seealso:
  - plugin: dra.accelerators.accelerators_with
    plugin_type: filter
  - plugin: dra.accelerators.nodes_with_accelerators
    plugin_type: filter
  - plugin: dra.accelerators.holding_accelerators
    plugin_type: test
  - plugin: dra.accelerators.accelerators
    plugin_type: inventory
"""

EXAMPLES = r"""
- name: Read the ResourceSlices
  kubernetes.core.k8s_info:
    api_version: resource.k8s.io/v1
    kind: ResourceSlice
  register: slices

- name: Read the ResourceClaims
  kubernetes.core.k8s_info:
    api_version: resource.k8s.io/v1
    kind: ResourceClaim
  register: claims

- name: Show the free memory of each available GPU
  ansible.builtin.debug:
    msg: "{{ item.node }} {{ item.name }} {{ item.free.memory }}"
  loop: >-
    {{ slices.resources | dra.accelerators.accelerators(claims.resources)
       | dra.accelerators.accelerators_with(type='gpu', available=true) }}
"""

RETURN = r"""
_value:
  description: The devices, in the order in which the scheduler tries them.
  type: list
  elements: dict
  contains:
    driver:
      description: The name of the driver.
      type: str
      sample: gpu.nvidia.com
    pool:
      description: The name of the pool.
      type: str
      sample: gpu-node-1
    node:
      description: The name of the node, or empty for a device that several nodes can use.
      type: str
      sample: gpu-node-1
    name:
      description: The name of the device, which is unique in its pool.
      type: str
      sample: gpu-0
    type:
      description: The type of the device, if the driver publishes it.
      type: str
      sample: gpu
    product:
      description: The product (C(productName) or C(model)), if the driver publishes it.
      type: str
      sample: NVIDIA H100 80GB HBM3
    profile:
      description: The kind of partition (C(profile) or C(template)), if the driver publishes it.
      type: str
      sample: ""
    uuid:
      description: The UUID, if the driver publishes it.
      type: str
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    attributes:
      description: All attributes, without the names of their types.
      type: dict
      sample: {type: gpu, architecture: Hopper, "resource.kubernetes.io/numaNode": 0}
    capacity:
      description: All capacities, as numbers. Memory is in bytes.
      type: dict
      sample: {memory: 85520809984, multiprocessors: 132}
    free:
      description: The free amount of each capacity. All amounts are 0 for a device that is not available.
      type: dict
      sample: {memory: 85520809984, multiprocessors: 132}
    available:
      description: Whether the device, or a share of it, can be allocated to a claim without tolerations.
      type: bool
      sample: true
    shared:
      description: Whether several claims can hold the device at the same time.
      type: bool
      sample: false
    whole:
      description: Whether the device is not a part of another published device. It consumes no counters, or it consumes a counter set completely.
      type: bool
      sample: true
    taints:
      description: The taints in the slice, each with C(key), C(value), and C(effect). Taints of DeviceTaintRules are not included.
      type: list
      elements: dict
      sample: []
    claims:
      description: The claims that hold the device, as C(namespace/name). Claims with admin access are not included.
      type: list
      elements: str
      sample: [default/training]
    draws:
      description: By counter set and counter, the amount that the device consumes (C(takes)) and the remaining amount (C(left)).
      type: dict
      sample: {gpu-0-counter-set: {memory-slice-0: {takes: 1, left: 1}}}
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import devices


def accelerators(slices: Any, claims: Any = ()) -> list[dict[str, Any]]:
    """Return the devices. Raises AnsibleFilterError."""
    for given, what in ((slices, "ResourceSlices"), (claims, "ResourceClaims")):
        if not isinstance(given, (list, tuple)):
            raise AnsibleFilterError(f"accelerators: found {given!r}, expected a list of {what}")
    try:
        return devices(slices, claims)
    except ValueError as error:
        raise AnsibleFilterError(f"accelerators: {error}") from error


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"accelerators": accelerators}
