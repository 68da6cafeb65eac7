# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: accelerators
version_added: 0.1.0
short_description: The devices that ResourceSlices publish, and what of them is free
description:
  - Turns ResourceSlices, and where given ResourceClaims, into a list of plain devices, as the filters, tests and the inventory of this collection
    have them, of any vendor and any driver.
  - What is free is what the scheduler could still give to a claim. It goes by claims that have the device, by the counters of partitions that
    overlap, by the shares of a device that several claims have, and by the taints in the slices.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: ResourceSlices, as the API server has them.
    type: list
    elements: dict
    required: true
  claims:
    description: ResourceClaims, in the same form. If they are omitted, all devices count as free.
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
- name: Ask for slices
  kubernetes.core.k8s_info:
    api_version: resource.k8s.io/v1
    kind: ResourceSlice
  register: slices

- name: Ask for claims
  kubernetes.core.k8s_info:
    api_version: resource.k8s.io/v1
    kind: ResourceClaim
  register: claims

- name: Say how much memory each whole GPU has left
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
      description: The pool.
      type: str
      sample: gpu-node-1
    node:
      description: The node; empty for a device that several nodes reach.
      type: str
      sample: gpu-node-1
    name:
      description: The name, unique in its pool.
      type: str
      sample: gpu-0
    type:
      description: Its type, where the driver publishes one.
      type: str
      sample: gpu
    product:
      description: Its product (C(productName) or C(model)), likewise.
      type: str
      sample: NVIDIA H100 80GB HBM3
    profile:
      description: The kind of partition (C(profile) or C(template)), likewise.
      type: str
      sample: ""
    uuid:
      description: Its UUID, likewise.
      type: str
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    attributes:
      description: All attributes, without the names of their types.
      type: dict
      sample: {type: gpu, architecture: Hopper, "resource.kubernetes.io/numaNode": 0}
    capacity:
      description: All capacities, as numbers; memory in bytes.
      type: dict
      sample: {memory: 85520809984, multiprocessors: 132}
    free:
      description: Of each capacity what a claim could still have; nothing of a device that is not available.
      type: dict
      sample: {memory: 85520809984, multiprocessors: 132}
    available:
      description: Whether a claim that tolerates no taint could have the device, or a share of it.
      type: bool
      sample: true
    shared:
      description: Whether several claims can have it at a time.
      type: bool
      sample: false
    whole:
      description: Whether it is no part of something else that is published. It draws on no counters, or it takes all that there is in a set of them.
      type: bool
      sample: true
    taints:
      description: Its taints, each with C(key), C(value) and C(effect). Those of DeviceTaintRules are not among them.
      type: list
      elements: dict
      sample: []
    claims:
      description: The claims that have it, as namespace and name. Those that only watch it are not among them.
      type: list
      elements: str
      sample: [default/training]
    draws:
      description: By counter set and counter, how much the device takes (C(takes)), and how much there is left (C(left)).
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
    """The filter, as Ansible asks for it."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"accelerators": accelerators}
