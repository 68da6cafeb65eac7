#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: accelerator_info
version_added: 0.1.0
short_description: Gather facts about the accelerators of a node and their partitions
description:
  - Returns all facts about each accelerator of a node, with its partition profiles, its partitions, and the processes that use it.
  - With O(offers), also returns the devices that a node driver publishes to Kubernetes for each accelerator.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.info_module
  - dra.accelerators._node_driver
  - dra.accelerators._nvml
attributes:
  platform:
    support: full
    platforms: linux
options:
  vendor:
    description:
      - The vendors whose drivers are queried, for example V(nvidia). By default, all vendors that have devices on the node, or
        all supported vendors if there are no devices. The error for an unknown vendor lists the supported ones.
    type: list
    elements: str
  match:
    description:
      - Return only the devices that match. All given keys must match. The keys are the same as in the C(match) of a
        layout rule.
    type: dict
    suboptions:
      vendor:
        description: The vendor.
        type: str
      index:
        description: The device's index in the vendor's order, or a list of indices.
        type: raw
      uuid:
        description: The device's UUID, or a list of UUIDs.
        type: raw
      pci_address:
        description: The device's PCI address, or a list of addresses. Domain, case, and leading zeros do not matter.
        type: raw
      product:
        description: A shell pattern for the product name, or a list of patterns.
        type: raw
  offers:
    description:
      - Whether to also return the devices that the node driver publishes in a ResourceSlice for each device, in RV(devices[].offers).
    type: bool
    default: false
  dynamic:
    description:
      - With O(offers), whether to treat the devices as dynamic, so that RV(devices[].offers) contains every partition that the node
        driver can create.
    type: bool
    default: false
  partition_labels:
    description:
      - How RV(drivers[].labels) describe partitions. The values are the strategies of the vendor's labeling program. For GPUs, they are those of
        gpu-feature-discovery.
      - V(none) omits partitions. V(mixed) adds labels for each profile to the labels of the devices. With V(single), the labels of the devices
        describe the partitions, if all partitions are alike. V(auto) is V(mixed) if there are partitions, and V(none) otherwise.
      - The labels include partitions that claims currently hold.
    type: str
    default: none
    choices:
      - none
      - single
      - mixed
      - auto
  pci_label_fields:
    description:
      - The fields in the names of the labels in RV(drivers[].pci_labels). Node Feature Discovery creates labels with these names for PCI devices. If
        the list is empty, the module returns no such labels.
      - V([class, vendor]) is the default of Node Feature Discovery. V([vendor]) is its setting in the NVIDIA GPU Operator.
    type: list
    elements: str
    choices:
      - class
      - vendor
      - device
    default: []
  fail_without_driver:
    description:
      - Whether to fail if a vendor's driver or its library is missing or does not respond.
      - If V(false), the module returns no devices for the vendor, and RV(drivers) and a warning contain the reason.
    type: bool
    default: false
seealso:
  - module: dra.accelerators.ascend_vnpu
  - module: dra.accelerators.nvidia_mig
"""

EXAMPLES = r"""
- name: Gather facts about all accelerators of the node
  dra.accelerators.accelerator_info:
  register: accelerators

- name: Show the product names
  ansible.builtin.debug:
    msg: "{{ accelerators.devices | map(attribute='product') }}"

- name: Gather facts about the first two GPUs, with the devices that the node driver would publish for dynamic GPUs
  dra.accelerators.accelerator_info:
    vendor:
      - nvidia
    match:
      index: [0, 1]
    offers: true
    dynamic: true

- name: Get the labels of the node, with labels for partition profiles, and the labels of Node Feature Discovery
  dra.accelerators.accelerator_info:
    partition_labels: mixed
    pci_label_fields: [class, vendor]

- name: Fail if the driver does not work
  dra.accelerators.accelerator_info:
    match:
      product: "NVIDIA H100*"
    fail_without_driver: true
"""

RETURN = r"""
devices:
  description: The devices, ordered by vendor and index.
  returned: success
  type: list
  elements: dict
  contains:
    vendor:
      description: The vendor.
      type: str
      returned: success
      sample: nvidia
    index:
      description: The index of the device in the vendor's order.
      type: int
      returned: success
      sample: 0
    minor:
      description: The minor number of the device node.
      type: int
      returned: success
      sample: 0
    uuid:
      description: The device's UUID.
      type: str
      returned: success
      sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
    product:
      description: The product name.
      type: str
      returned: success
      sample: NVIDIA H100 80GB HBM3
    pci_address:
      description: The PCI address, as in sysfs.
      type: str
      returned: success
      sample: "0000:18:00.0"
    pcie_root:
      description: The PCI root complex of the device.
      type: str
      returned: success
      sample: "pci0000:15"
    numa_node:
      description: The NUMA node. It is null if the platform does not report it.
      type: int
      returned: success
      sample: 0
    memory_bytes:
      description: The memory in bytes.
      type: int
      returned: success
      sample: 85520809984
    memory_slices:
      description: The number of memory slices for partitions. It is 0 for a device that does not support partitions.
      type: int
      returned: success
      sample: 8
    attributes:
      description: The attributes that are published for the whole device.
      type: dict
      returned: success
      sample: {"architecture": "Hopper", "type": "gpu"}
    capacities:
      description: The capacities of the whole device. Memory is in bytes.
      type: dict
      returned: success
      sample: {"memory": 85520809984}
    partitioning:
      description:
        - Whether the device supports partitioning (C(supported)), whether partitioning is enabled now (C(enabled)) and after the next reset
          (C(pending)), and whether the device needs a reset (C(needs_reset)).
        - C(blocked) is the reason why no partition can be created now, with a remedy. It is empty if partitions can be created.
      type: dict
      returned: success
      sample: {"supported": true, "enabled": true, "pending": true, "needs_reset": false, "blocked": ""}
    profiles:
      description: The partition profiles that the device supports.
      type: list
      elements: dict
      returned: success
      sample:
        - name: 3g.40gb
          profile_id: 9
          memory_bytes: 42412802048
          maximum: 2
          placements: [{"start": 0, "size": 4}, {"start": 4, "size": 4}]
          attributes: {}
          capacities: {"multiprocessors": 60, "copyEngines": 3, "memory": 42412802048}
    partitions:
      description: The existing partitions. The UUID is empty for a partition that uses resources, but has no handle.
      type: list
      elements: dict
      returned: success
      sample:
        - uuid: MIG-0c1d0c5e-6b1b-5d6f-9f50-1c5d8f2f7a10
          profile: 3g.40gb
          profile_id: 9
          placement: {"start": 4, "size": 4}
          instance_id: 1
          compute_instance_id: 0
          memory_bytes: 42412802048
          processes: []
    processes:
      description: The processes that use the device or one of its partitions.
      type: list
      elements: dict
      returned: success
      sample: [{"pid": 4711, "name": "python3"}]
    health:
      description:
        - Whether the device is healthy now, and the causes if it is not. The module checks the device once.
        - Only the node driver knows about errors that the device reported earlier, for example Xids.
      type: dict
      returned: success
      sample:
        healthy: false
        causes: [recovery-action]
        signs:
          - cause: recovery-action
            severity: failed
            value: reset
            message: It asks for a reset.
            remedy: The GPU has to be reset (nvidia-smi --gpu-reset) once nothing uses it.
    offers:
      description: The devices that the node driver publishes for this device.
      type: list
      elements: dict
      returned: if O(offers)
      sample:
        - name: gpu-0-mig-3g40gb-9-4
          kind: partition
          dynamic: true
          profile: 3g.40gb
          placement: {"start": 4, "size": 4}
          partition_uuid: null
          attributes: {"type": "mig", "profile": "3g.40gb"}
          capacities: {"memory": 42412802048, "multiprocessors": 60}
          counter_set: gpu-0-counter-set
          consumes: {"multiprocessors": 60}
          taints: []
drivers:
  description: The queried vendors, whether their driver responded, and the reason if it did not.
  returned: success
  type: list
  elements: dict
  contains:
    vendor:
      description: The vendor.
      type: str
      returned: success
      sample: nvidia
    driver_name:
      description: The name of the Kubernetes driver for the vendor's devices.
      type: str
      returned: success
      sample: gpu.nvidia.com
    available:
      description: Whether the vendor's driver responded.
      type: bool
      returned: success
      sample: true
    reason:
      description: The reason why the driver did not respond. It is empty if the driver responded.
      type: str
      returned: success
      sample: ""
    labels:
      description:
        - The Node labels for these devices, with the label names of the vendor's own programs.
        - Labels whose value is not the same for all devices are omitted. If a device did not respond, there are no labels.
      type: dict
      returned: success
      sample: {"huawei.com/npu.chip.name": "910B3", "huawei.com/topotree.superpodid": "7"}
    pci_labels:
      description:
        - The labels that Node Feature Discovery would create for the devices on the PCI bus, if O(pci_label_fields) is set.
        - If a device did not respond, there are no labels.
      type: dict
      returned: success
      sample: {"feature.node.kubernetes.io/pci-0302_10de.present": "true"}
    unanswered:
      description:
        - The devices that exist but could not be read, each with the reason, for example that the device is lost, needs a reset, or
          did not respond before the timeout. The module also warns about them.
      type: list
      elements: str
      returned: success
      sample: []
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.state_directory import (
    STATE_DIRECTORY_OPTIONS,
    check_known_vendors,
    check_one_vendor,
    state_directory_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import (
    INTERPRETER_OPTION,
    fail,
    find_binding,
    run,
)
from ansible_collections.dra.accelerators.plugins.module_utils._report.device_facts import device_facts, offer_facts
from ansible_collections.dra.accelerators.plugins.module_utils.core.dra.node_labels import (
    BUS_FIELDS,
    NO_PARTITIONS,
    STRATEGIES,
    bus_labels,
    read_machine,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import BackendUnavailable
from ansible_collections.dra.accelerators.plugins.module_utils.core.health import tracker as health_tracker
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Device, Finding, devices_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules, wanted_for
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.protocol import Backend
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.registry import BACKENDS, vendors_there


def argument_spec() -> dict[str, Any]:
    return {
        **INTERPRETER_OPTION,
        **STATE_DIRECTORY_OPTIONS,
        "vendor": {"type": "list", "elements": "str"},
        "match": {"type": "dict"},
        "offers": {"type": "bool", "default": False},
        "dynamic": {"type": "bool", "default": False},
        "partition_labels": {"type": "str", "default": NO_PARTITIONS, "choices": list(STRATEGIES)},
        "pci_label_fields": {"type": "list", "elements": "str", "choices": list(BUS_FIELDS), "default": []},
        "fail_without_driver": {"type": "bool", "default": False},
    }


def published_facts(backend: Backend, finding: Finding, device: Device, params: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a device, and with the option ``offers`` also its published devices with their taints."""
    if not params["offers"]:
        return device_facts(device)
    offers = backend.offers(device, dynamic=params["dynamic"])
    health = health_tracker.faults_of_single_scan([finding])
    tainted = health_tracker.tainted(backend.driver_name, offers, {device.uuid: device}, health)
    return {**device_facts(device), "offers": [offer_facts(offer) for offer in tainted]}


def query_driver(backend: Backend, params: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the facts of one vendor's driver, and of its matching devices."""
    rules = parse_rules([{"match": params["match"] or {}, "mode": "dynamic"}])
    backend.use_number_file(state_directory_of(params, backend.driver_name))
    backend.open()
    try:
        findings = backend.discover()
        devices = [
            published_facts(backend, finding, finding.device, params)
            for finding in findings
            if finding.device is not None and wanted_for(finding.device, rules) is not None
        ]
        unanswered = [finding.describe() for finding in findings if finding.device is None]
    finally:
        backend.close()
    # Node labels describe all devices of the node, also those that the options exclude.
    labeled_devices = devices_of(findings) if not unanswered else ()
    machine = read_machine(System(), labeled_devices)
    driver = {
        "vendor": backend.vendor,
        "driver_name": backend.driver_name,
        "available": True,
        "reason": "",
        "labels": dict(backend.labels(labeled_devices, machine, params["partition_labels"])),
        "pci_labels": bus_labels(labeled_devices, machine, params["pci_label_fields"]),
        "unanswered": unanswered,
    }
    return driver, devices


def work(module: AnsibleModule) -> dict[str, Any]:
    drivers: list[dict[str, Any]] = []
    devices: list[dict[str, Any]] = []
    requested = module.params["vendor"] or vendors_there()
    vendors = requested or sorted(BACKENDS)
    check_known_vendors(vendors)
    check_one_vendor(module.params, requested)
    if "nvidia" in vendors:
        # A missing binding is reported as an unavailable driver when the backend opens.
        find_binding("pynvml", module.params["interpreter"])
    unavailable: list[tuple[Backend, BackendUnavailable]] = []
    for vendor in dict.fromkeys(vendors):
        backend = BACKENDS[vendor](System())
        try:
            driver, found = query_driver(backend, module.params)
        except BackendUnavailable as error:
            unavailable.append((backend, error))
            continue
        for text in driver["unanswered"]:
            module.warn(f"One device of {vendor} is not in the result: {text}")
        drivers.append(driver)
        devices.extend(found)
    if drivers and not requested:
        unavailable.clear()  # the node has no device of these vendors, but devices of another one
    for backend, reason in unavailable:
        if module.params["fail_without_driver"]:
            fail(module, reason)
        module.warn(f"No devices of {backend.vendor}: {reason}")
        drivers.append(
            {
                "vendor": backend.vendor,
                "driver_name": backend.driver_name,
                "available": False,
                "reason": str(reason),
                "labels": {},
                "pci_labels": {},
                "unanswered": [],
            }
        )
    drivers.sort(key=lambda driver: str(driver["vendor"]))
    return {"changed": False, "devices": devices, "drivers": drivers}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True), work)


if __name__ == "__main__":
    main()
