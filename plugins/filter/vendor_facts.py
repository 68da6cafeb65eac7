# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: vendor_facts
version_added: 0.1.0
short_description: What vendors and their things are called
description:
  - Turns words for vendors into what each vendor's things are called, from the name of its DRA driver and of its extended resources to
    the labels of a Node, the units and sockets of its other programs, and the port of its exporter of metrics.
  - The node driver and the modules take the same names from the same place, so that roles need not know any vendor.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: Words for vendors, V(nvidia) or V(ascend).
    type: list
    elements: str
    required: true
seealso:
  - plugin: dra.accelerators.npu_claim
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show what pods may ask for without a claim
  ansible.builtin.debug:
    msg: "{{ ['nvidia', 'ascend'] | dra.accelerators.vendor_facts | map(attribute='extended_resources') | combine }}"

- name: Show under which names a fleet with both vendors publishes
  ansible.builtin.debug:
    msg: "{{ ['nvidia', 'ascend'] | dra.accelerators.vendor_facts | map(attribute='driver_name') | list }}"

- name: Say where the exporters of a node are
  ansible.builtin.debug:
    msg: "{{ item.exporter.job }} serves port {{ item.exporter.port }}"
  loop: "{{ accelerator_vendors | dra.accelerators.vendor_facts }}"
"""

RETURN = r"""
_value:
  description: The facts, in the order of the vendors, each once.
  type: list
  elements: dict
  contains:
    word:
      description: How this collection names the vendor.
      type: str
      sample: ascend
    title:
      description: How people name the vendor.
      type: str
      sample: Ascend
    devices:
      description: What people call several of its devices.
      type: str
      sample: NPUs
    driver_name:
      description: The name of the DRA driver.
      type: str
      sample: npu.huawei.com
    cdi_kind:
      description: The kind of the CDI devices that containers are given.
      type: str
      sample: k8s.npu.huawei.com/claim
    domain:
      description: The domain of the vendor's extended resources and of its labels on a Node.
      type: str
      sample: huawei.com
    labels:
      description: The labels that this collection may write on a Node for the vendor's devices. It writes no other label.
      type: list
      elements: str
      sample: [huawei.com/npu.chip.name, huawei.com/topotree.superpodid]
    label_patterns:
      description: Regular expressions for the names of labels with a partition profile, which it may write too.
      type: list
      elements: str
      sample: ["nvidia\\.com/mig-[0-9]+g\\.[0-9]+gb\\.count"]
    extended_resources:
      description: What pods ask for without a claim, by the DeviceClass that serves it.
      type: dict
      sample: {ascend-310p: huawei.com/Ascend310P}
    device_plugins:
      description: How the sockets of the vendor's device plugins begin in the kubelet's folder.
      type: list
      elements: str
      sample: [Ascend, npu, davinci]
    manager_units:
      description: Units of programs that give devices out, or cut them up, without knowing of claims.
      type: list
      elements: str
      sample: [nvidia-mig-manager.service]
    manager_labels:
      description: Labels by which a Node is told to such programs.
      type: list
      elements: str
      sample: [nvidia.com/mig.config]
    plugin_switches:
      description: Labels of a Node by which the vendor's operator keeps its device plugin off when they say V(false).
      type: list
      elements: str
      sample: [nvidia.com/gpu.deploy.device-plugin]
    replica_labels:
      description: Labels of a Node that say how many times the vendor's device plugin offers each device.
      type: list
      elements: str
      sample: [nvidia.com/gpu.replicas]
    kernel_module:
      description: The module by which the vendor's driver is known to be loaded.
      type: str
      sample: drv_davinci_intf_host
    control_nodes:
      description: The device nodes that containers need besides those of their devices.
      type: list
      elements: str
      sample: [/dev/davinci_manager, /dev/devmm_svm, /dev/hisi_hdc, /dev/dvpp_cmdlist]
    device_nodes:
      description: Shell patterns of the device nodes of devices and partitions.
      type: list
      elements: str
      sample: ["/dev/davinci[0-9]*", "/dev/vdavinci[0-9]*"]
    layout_unit:
      description: This collection's unit that applies a layout at boot.
      type: str
      sample: dra-accelerators-layout-ascend.service
    exporter:
      description:
        - The vendor's own exporter of metrics, with C(job), C(port), C(path), and C(prefixes), with which the names of its metrics begin.
      type: dict
      sample: {job: npu-exporter, port: 8082, path: /metrics, prefixes: [npu_chip_]}
    fabric:
      description:
        - How devices tell which nodes are joined by more than the network, as the C(device_type) of the devices that count, the attributes
          C(domain), C(server) and C(rack), and the C(label) of a Node. Null where they do not tell.
      type: dict
      sample: {device_type: npu, domain: superPodID, server: serverID, rack: rackID, label: huawei.com/topotree.superpodid}
    link_groups:
      description: Attributes that are the same for devices of a node with direct links between them, or on one card, by what people call such a group.
      type: dict
      sample: {hccsRing: HCCS ring, cardID: card, superPodID: super-pod}
    links:
      description: What people call the links between devices that no attribute tells of. Empty where there are none.
      type: str
      sample: NVLink
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils._vendor_facts import VENDOR_FACTS


def facts(vendors: Any) -> list[dict[str, Any]]:
    """Return what the vendors' things are called. Raises AnsibleFilterError."""
    if not isinstance(vendors, (list, tuple)):
        raise AnsibleFilterError(f"vendor_facts: found {vendors!r}, expected a list of vendors")
    unknown = [str(each) for each in vendors if each not in VENDOR_FACTS]
    if unknown:
        raise AnsibleFilterError(
            f"vendor_facts: found {', '.join(unknown)}, expected {' or '.join(sorted(VENDOR_FACTS))}"
        )
    return [VENDOR_FACTS[each].document() for each in dict.fromkeys(vendors)]


class FilterModule:
    """The filter, as Ansible asks for it."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"vendor_facts": facts}
