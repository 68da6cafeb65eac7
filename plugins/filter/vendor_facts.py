# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: vendor_facts
version_added: 0.1.0
short_description: Return the names and constants of vendors
description:
  - Returns for each vendor the name of its DRA driver, its extended resources and Node labels, the units and sockets of its other programs, and
    the port of its metrics exporter.
  - The node driver and the modules use the same values, so roles do not need code for a vendor.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: The vendors, V(nvidia) or V(ascend).
    type: list
    elements: str
    required: true
seealso:
  - plugin: dra.accelerators.npu_claim
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show the extended resources that pods can request without a claim
  ansible.builtin.debug:
    msg: "{{ ['nvidia', 'ascend'] | dra.accelerators.vendor_facts | map(attribute='extended_resources') | combine }}"

- name: Show the names of the DRA drivers of both vendors
  ansible.builtin.debug:
    msg: "{{ ['nvidia', 'ascend'] | dra.accelerators.vendor_facts | map(attribute='driver_name') | list }}"

- name: Show the ports of the metrics exporters of a node
  ansible.builtin.debug:
    msg: "{{ item.exporter.job }} serves port {{ item.exporter.port }}"
  loop: "{{ accelerator_vendors | dra.accelerators.vendor_facts }}"
"""

RETURN = r"""
_value:
  description: The facts of each vendor, in the order of the vendors without duplicates.
  type: list
  elements: dict
  contains:
    word:
      description: The identifier of the vendor in this collection.
      type: str
      sample: ascend
    title:
      description: The display name of the vendor.
      type: str
      sample: Ascend
    devices:
      description: The plural name of the vendor's devices.
      type: str
      sample: NPUs
    driver_name:
      description: The name of the DRA driver.
      type: str
      sample: npu.huawei.com
    cdi_kind:
      description: The kind of the CDI devices for containers.
      type: str
      sample: k8s.npu.huawei.com/claim
    domain:
      description: The domain of the vendor's extended resources and of its labels on a Node.
      type: str
      sample: huawei.com
    labels:
      description: The fixed names of labels that this collection can set on a Node for the vendor's devices. Other names match C(label_patterns).
      type: list
      elements: str
      sample: [huawei.com/npu.chip.name, huawei.com/topotree.superpodid]
    label_patterns:
      description: Regular expressions for names of labels that contain a partition profile. This collection can set such labels on a Node.
      type: list
      elements: str
      sample: ["nvidia\\.com/mig-[0-9]+g\\.[0-9]+gb\\.count"]
    extended_resources:
      description: The extended resources that pods can request without a claim, by the DeviceClass that serves them.
      type: dict
      sample: {ascend-310p: huawei.com/Ascend310P}
    device_plugins:
      description: The name prefixes of the vendor's device plugin sockets in the kubelet's directory.
      type: list
      elements: str
      sample: [Ascend, npu, davinci]
    manager_units:
      description: The systemd units of programs that allocate or partition devices independently of claims.
      type: list
      elements: str
      sample: [nvidia-mig-manager.service]
    manager_labels:
      description: The Node labels that configure programs that allocate or partition devices independently of claims.
      type: list
      elements: str
      sample: [nvidia.com/mig.config]
    plugin_switches:
      description: The Node labels that control the vendor's device plugin. With the value V(false), the vendor's operator does not run it on the node.
      type: list
      elements: str
      sample: [nvidia.com/gpu.deploy.device-plugin]
    replica_labels:
      description: The Node labels with the number of times that the vendor's device plugin offers each device.
      type: list
      elements: str
      sample: [nvidia.com/gpu.replicas]
    kernel_module:
      description: The kernel module that shows that the vendor's driver is loaded.
      type: str
      sample: drv_davinci_intf_host
    control_nodes:
      description: The device nodes that containers need in addition to those of their devices.
      type: list
      elements: str
      sample: [/dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc, /dev/dvpp_cmdlist]
    device_nodes:
      description: Shell patterns for the device nodes of devices and partitions.
      type: list
      elements: str
      sample: ["/dev/davinci[0-9]*", "/dev/vdavinci[0-9]*"]
    layout_unit:
      description: The systemd unit of this collection that applies a layout at boot.
      type: str
      sample: dra-accelerators-layout-ascend.service
    exporter:
      description:
        - The vendor's metrics exporter, with C(job), C(port), C(path), and the C(prefixes) of the names of its metrics.
      type: dict
      sample: {job: npu-exporter, port: 8082, path: /metrics, prefixes: [npu_chip_]}
    fabric:
      description:
        - The published data about a device interconnect between nodes. These are the C(device_type) of the relevant devices, their attributes
          C(domain), C(server), and C(rack), and the C(label) of a Node. The value is null for a vendor without such data.
      type: dict
      sample: {device_type: npu, domain: superPodID, server: serverID, rack: rackID, label: huawei.com/topotree.superpodid}
    link_groups:
      description: The display names of device groups, by attribute. Devices with the same value are one group, such as a card, a ring, or a super-pod.
      type: dict
      sample: {hccsRing: HCCS ring, cardID: card, superPodID: super-pod}
    links:
      description: The display name of links between devices that no attribute describes, or empty for a vendor without such links.
      type: str
      sample: NVLink
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils._host.vendor_names import VENDOR_FACTS


def facts(vendors: Any) -> list[dict[str, Any]]:
    """Return the names and constants of each vendor. Raises AnsibleFilterError."""
    if not isinstance(vendors, (list, tuple)):
        raise AnsibleFilterError(f"vendor_facts: found {vendors!r}, expected a list of vendors")
    unknown = [str(each) for each in vendors if each not in VENDOR_FACTS]
    if unknown:
        raise AnsibleFilterError(
            f"vendor_facts: found {', '.join(unknown)}, expected {' or '.join(sorted(VENDOR_FACTS))}"
        )
    return [VENDOR_FACTS[each].document() for each in dict.fromkeys(vendors)]


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"vendor_facts": facts}
