# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This fragment is private to the collection: it can change in any release.

from __future__ import annotations


class ModuleDocFragment:
    """The layout rules of the modules that apply or read a layout, and the store of prepared claims. One part for each vendor."""

    DOCUMENTATION = r"""
options: {}
"""

    NVIDIA = r"""
options:
  layout:
    description:
      - Rules for the layout of the GPUs. For each GPU the first matching rule applies.
    type: list
    elements: dict
    suboptions:
      match:
        description:
          - The GPUs to which the rule applies. All given keys must match. An empty dictionary matches every GPU.
        type: dict
        required: true
        suboptions:
          vendor:
            description: The vendor. This module supports only V(nvidia).
            type: str
          index:
            description: The driver's index of the GPU, or a list of indexes.
            type: raw
          uuid:
            description: The GPU's UUID, or a list of UUIDs.
            type: raw
          pci_address:
            description: The GPU's PCI address, or a list of addresses.
            type: raw
          product:
            description: A shell pattern for the product name, or a list of patterns.
            type: raw
      mode:
        description:
          - With V(static), MIG is enabled, and the GPU has exactly the given partitions.
          - With V(dynamic), the node driver creates and deletes partitions for claims. Partitions of the driver stay. All
            other partitions are deleted. If a GPU can change the MIG mode only by a reset, MIG is enabled.
          - With V(whole), the GPU has no partitions, and MIG is disabled.
        type: str
        required: true
        choices:
          - static
          - dynamic
          - whole
      partitions:
        description:
          - For O(layout[].mode=static), a dictionary of profile names and counts, or a list of dictionaries. The keys in the list are C(profile) and
            C(count), or for a fixed placement C(profile) and C(placement), the first memory slice.
        type: raw
      shares:
        description:
          - For O(layout[].mode=whole), the number of claims that can share the GPU, from 2 to 1024. By default, one claim can use the GPU.
          - This module does not use it. The node driver reads the same rules and publishes the GPU accordingly.
        type: int
      prepared_before_binding:
        description:
          - For O(layout[].mode=dynamic), or with O(layout[].passthrough), whether pods are bound to the node only when the GPU is prepared for them.
          - This module does not use it. The node driver reads the same rules and publishes the GPU accordingly.
        type: bool
      passthrough:
        description:
          - For O(layout[].mode=whole) and O(layout[].mode=dynamic), whether virtual machines can use the GPU.
          - This module does not use it. The node driver reads the same rules and publishes the GPU accordingly.
        type: bool
      composed:
        description:
          - Whether the device can be a member of a composed device. Only NPUs support this. The option is accepted because a layout can
            contain rules for several vendors.
        type: bool
  config:
    description:
      - The content of a C(nvidia-mig-parted) configuration file, as data. The module reads the configuration O(config_name) in it. A ConfigMap that
        contains the file is also accepted, as with O(config_file).
    type: dict
  config_file:
    description:
      - Path of a C(nvidia-mig-parted) configuration file on the node. The module reads the configuration O(config_name) in it.
      - Requires the Python package C(PyYAML) on the node.
    type: path
  config_name:
    description:
      - The name of the configuration in O(config) or O(config_file). Required with one of them.
    type: str
  state_path:
    description:
      - The node driver's store of prepared claims. The module only reads it. A missing file means that no claims are
        prepared.
    type: path
    default: /var/lib/kubelet/plugins/gpu.nvidia.com/state.db
"""

    ASCEND = r"""
options:
  layout:
    description:
      - Rules for the layout of the NPUs. For each NPU the first matching rule applies.
    type: list
    elements: dict
    suboptions:
      match:
        description:
          - The NPUs to which the rule applies. All given keys must match. An empty dictionary matches every NPU.
        type: dict
        required: true
        suboptions:
          vendor:
            description: The vendor. The module ignores rules for vendors other than V(ascend).
            type: str
          index:
            description: The physical ID of the NPU, or a list of physical IDs.
            type: raw
          uuid:
            description: The NPU's UUID, or a list of UUIDs.
            type: raw
          pci_address:
            description: The NPU's PCI address, or a list of addresses.
            type: raw
          product:
            description: A shell pattern for the product name, or a list of patterns.
            type: raw
      mode:
        description:
          - With V(static), the NPU has exactly the given vNPUs.
          - With V(dynamic), the node driver creates and deletes vNPUs for claims. vNPUs of the driver stay. All others are deleted.
          - With V(whole), the NPU has no vNPUs.
        type: str
        required: true
        choices:
          - static
          - dynamic
          - whole
      partitions:
        description:
          - For O(layout[].mode=static), a dictionary of template names and counts, or a list of dictionaries with C(profile) and C(count),
            or C(profile) and C(placement) for a fixed placement. On a 310P, placements 0 and 1 are in the first vGroup, 2 and 3 in the second.
        type: raw
      shares:
        description:
          - For O(layout[].mode=whole), the number of claims that can share the NPU, from 2 to 1024. By default, one claim can use the NPU.
          - This module does not use it. The node driver reads the same rules and publishes the NPU accordingly. It rejects claims for an
            NPU that accepts one container at a time; see O(dra.accelerators.ascend_vnpu#module:device_share).
        type: int
      prepared_before_binding:
        description:
          - For O(layout[].mode=dynamic), whether pods are bound to the node only when the NPU is prepared for them.
          - This module does not use it. The node driver reads the same rules and publishes the NPU accordingly.
        type: bool
      passthrough:
        description:
          - Whether virtual machines can use the device. NPUs do not support this yet. The option is accepted because a layout can contain rules for
            several vendors.
        type: bool
      composed:
        description:
          - Whether the NPU can be a member of a composed device, such as a card or a ring. The default is V(true).
          - This module does not use it. The node driver reads the same rules and publishes the NPU accordingly.
        type: bool
  state_path:
    description:
      - The node driver's store of prepared claims. The module only reads it. A missing file means that no claims are prepared.
    type: path
    default: /var/lib/kubelet/plugins/npu.huawei.com/state.db
"""
