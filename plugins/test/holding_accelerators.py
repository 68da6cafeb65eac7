# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: holding_accelerators
version_added: 0.1.0
short_description: Whether there are so many devices of a kind
description:
  - Is true where at least so many of the devices meet every criterion that is given.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: Devices, as the filter P(dra.accelerators.accelerators#filter) returns them, or as the inventory has them for each node.
    type: list
    elements: dict
    required: true
  count:
    description: So many of them at least. Where O(free) or O(available) is given, so many that can be had at the same time.
    type: int
    default: 1
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
  - plugin: dra.accelerators.accelerators_with
    plugin_type: filter
  - plugin: dra.accelerators.nodes_with_accelerators
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Run the benchmark where two GPUs are free
  ansible.builtin.command:
    cmd: /opt/benchmark/run
  when: accelerators is dra.accelerators.holding_accelerators(2, type='gpu', free='40Gi')

- name: Stop where a device has a taint
  ansible.builtin.fail:
    msg: "{{ inventory_hostname }} has devices that are not well."
  when: accelerators is dra.accelerators.holding_accelerators(tainted=true)
"""

RETURN = r"""
_value:
  description: Whether there are.
  type: bool
  sample: true
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils._inventory import are_there


def holding_accelerators(devices: Any, count: Any = 1, **criteria: Any) -> bool:
    """Return whether there are so many. Raises AnsibleFilterError."""
    if not isinstance(devices, (list, tuple)):
        raise AnsibleFilterError(f"holding_accelerators: found {devices!r}, expected a list of devices")
    try:
        # A template may have made a text of the number.
        return are_there(devices, int(count), **criteria)
    except (AttributeError, TypeError, ValueError) as error:
        raise AnsibleFilterError(f"holding_accelerators: {error}") from error


class TestModule:
    """The test, as Ansible asks for it."""

    def tests(self) -> dict[str, Callable[..., Any]]:
        """Return the test by its name."""
        return {"holding_accelerators": holding_accelerators}
