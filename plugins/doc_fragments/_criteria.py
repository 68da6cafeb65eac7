# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """What every plugin that chooses devices says of the devices, and of the criteria."""

    DOCUMENTATION = r"""
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
"""

    COUNT = r"""
options:
  count:
    description: So many of them at least. Where O(free) or O(available) is given, so many that can be had at the same time.
    type: int
    default: 1
"""
