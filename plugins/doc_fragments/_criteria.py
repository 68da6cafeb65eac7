# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """The input and the criteria of the plugins that select devices."""

    DOCUMENTATION = r"""
options:
  _input:
    description: Devices, as the filter P(dra.accelerators.accelerators#filter) returns them, or as the inventory plugin sets them for each node.
    type: list
    elements: dict
    required: true
  free:
    description:
      - The capacity of the device that must be available to a claim now. The value is a memory quantity, for example V(40Gi), or a dictionary of
        capacities and quantities.
      - A GPU with a nominal memory of 80 GB has slightly less than V(80Gi) of memory.
    type: raw
  capacity:
    description: The total capacity that the device must have, whether it is in use or not. The format is the same as that of O(free).
    type: raw
  available:
    description: Whether a claim without tolerations can hold the device, or a share of it.
    type: bool
  driver:
    description: A shell pattern for the name of the driver, or a list of patterns.
    type: raw
  type:
    description: A shell pattern for the type, or a list of patterns. Types are V(gpu), V(mig), or V(npu), for example.
    type: raw
  product:
    description: A shell pattern for the product name, for example V(*H100*), or a list of patterns.
    type: raw
  profile:
    description: A shell pattern for the partition profile, for example V(1g.10gb), or a list of patterns.
    type: raw
  name:
    description: A shell pattern for the name of the device, or a list of patterns.
    type: raw
  uuid:
    description: A shell pattern for the UUID, or a list of patterns.
    type: raw
  pool:
    description: A shell pattern for the name of the pool, or a list of patterns.
    type: raw
  node:
    description: A shell pattern for the name of the node, or a list of patterns.
    type: raw
  whole:
    description: Whether the device is a whole device, and not a part of another published device.
    type: bool
  shared:
    description: Whether several claims can hold the device at the same time.
    type: bool
  tainted:
    description: Whether the device has a taint.
    type: bool
  held:
    description: Whether a claim holds the device, or a share of it.
    type: bool
  attributes:
    description: Attributes and their required values. Names of the driver's own attributes need no domain.
    type: dict
"""

    COUNT = r"""
options:
  count:
    description:
      - The minimum number of devices. With O(free) or O(available), the minimum number of devices that claims can hold at the same time.
    type: int
    default: 1
"""
