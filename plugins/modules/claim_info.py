#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: claim_info
version_added: 0.1.0
short_description: Gather facts about ResourceClaims and the devices that they hold
description:
  - Returns facts about the ResourceClaims of a cluster. They include the allocated devices with their nodes, the pods of the claim, its share of shared
    devices, and the health of the devices as the kubelet and the drivers report it.
  - The module returns only claims that match all given filters.
notes:
  - The module needs the permissions to list C(resourceclaims) and C(resourceslices) in the API group C(resource.k8s.io), and with O(health) to list
    C(pods).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
  - dra.accelerators._attributes.info_module
  - dra.accelerators._kubernetes
attributes:
  platform:
    support: full
    platforms: posix
options:
  namespace:
    description: The namespace of the claims. By default, the module returns claims of all namespaces.
    type: str
  names:
    description: Shell patterns for the names of the claims.
    type: list
    elements: str
    default: []
  label_selectors:
    description: Label selectors. A claim must match all of them.
    type: list
    elements: str
    default: []
  nodes:
    description: Names of nodes. A claim matches if it holds a device of one of these nodes.
    type: list
    elements: str
    default: []
  drivers:
    description: Names of drivers. A claim matches if it holds a device of one of these drivers.
    type: list
    elements: str
    default: []
  devices:
    description:
      - Shell patterns for devices. A claim matches if it holds a device with a matching name (V(gpu-3)), pool and name (V(gpu-node-1/gpu-3)), or UUID.
    type: list
    elements: str
    default: []
  pods:
    description: Shell patterns for the names of pods. A claim matches if it is reserved for one of these pods.
    type: list
    elements: str
    default: []
  device_classes:
    description: Names of DeviceClasses. A claim matches if it requests devices of one of these classes.
    type: list
    elements: str
    default: []
  allocated:
    description: Whether to return only claims with devices (V(true)) or without devices (V(false)). By default, the module returns both.
    type: bool
  healthy:
    description:
      - Whether to return only claims with healthy devices (V(true)) or with unhealthy devices (V(false)), as in RV(claims[].healthy). By default, the
        module returns both.
    type: bool
  health:
    description:
      - Whether to read the device health that the kubelet reports in the status of the pods. On large clusters, these requests take most of the time.
      - If V(false), RV(claims[].health) is empty, and RV(claims[].healthy) depends only on taints.
    type: bool
    default: true
seealso:
  - module: dra.accelerators.cluster_info
  - module: dra.accelerators.device_taint
"""

EXAMPLES = r"""
- name: Get the claims that hold devices of two nodes
  dra.accelerators.claim_info:
    nodes: [gpu-node-1, gpu-node-2]
  register: there
  delegate_to: localhost

- name: Show the devices and pods of each claim
  ansible.builtin.debug:
    msg: "{{ item.namespace }}/{{ item.name }} has {{ item.devices | map(attribute='name') | join(', ') }} for {{ item.pods | join(', ') }}"
  loop: "{{ there.claims }}"

- name: Get the claims with unhealthy devices
  dra.accelerators.claim_info:
    drivers: [gpu.nvidia.com]
    healthy: false

- name: Get the claims that hold a GPU or one of its partitions
  dra.accelerators.claim_info:
    devices: ["gpu-node-1/gpu-3*"]
    allocated: true
    health: false

- name: Get the claims without devices
  dra.accelerators.claim_info:
    namespace: training
    label_selectors: [team=vision]
    device_classes: [gpu.nvidia.com, mig.nvidia.com]
    allocated: false
"""

RETURN = r"""
claims:
  description: The claims, sorted by namespace and name.
  returned: success
  type: list
  elements: dict
  contains:
    namespace:
      description: The namespace of the claim.
      type: str
      returned: success
      sample: default
    name:
      description: The name of the claim.
      type: str
      returned: success
      sample: training-0-gpu-x7k2p
    uid:
      description: The UID of the claim, which drivers use to identify it.
      type: str
      returned: success
      sample: 3f0c9f0e-6a0e-4a39-9d55-1b1b7f0c2f10
    created:
      description: The creation time of the claim.
      type: str
      returned: success
      sample: "2026-11-23T12:00:00Z"
    deleting:
      description: Whether the deletion of the claim was requested and is not complete.
      type: bool
      returned: success
      sample: false
    template:
      description: The name of the claim in the pod, if the claim was created from a template. Otherwise it is empty.
      type: str
      returned: success
      sample: gpu
    extended_resource:
      description: Whether the scheduler created the claim for a pod that requests an extended resource.
      type: bool
      returned: success
      sample: false
    device_classes:
      description: The DeviceClasses in the requests of the claim.
      type: list
      elements: str
      returned: success
      sample: [gpu.nvidia.com]
    allocated:
      description: Whether devices are allocated to the claim.
      type: bool
      returned: success
      sample: true
    nodes:
      description: The nodes of the allocated devices.
      type: list
      elements: str
      returned: success
      sample: [gpu-node-1]
    reserved_for:
      description: The consumers for which the claim is reserved, with C(resource), C(name), and C(uid).
      type: list
      elements: dict
      returned: success
      sample: [{resource: pods, name: training-0, uid: 0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55}]
    pods:
      description: The names of the pods for which the claim is reserved.
      type: list
      elements: str
      returned: success
      sample: [training-0]
    devices:
      description: The allocated devices.
      type: list
      elements: dict
      returned: success
      contains:
        request:
          description: The name of the request.
          type: str
          returned: success
          sample: gpu
        driver:
          description: The name of the driver.
          type: str
          returned: success
          sample: gpu.nvidia.com
        pool:
          description: The name of the pool.
          type: str
          returned: success
          sample: gpu-node-1
        name:
          description: The name of the device.
          type: str
          returned: success
          sample: gpu-3
        node:
          description: The node of the device. It is empty for a device that several nodes can access, or that is no longer published.
          type: str
          returned: success
          sample: gpu-node-1
        published:
          description: Whether the device is currently published.
          type: bool
          returned: success
          sample: true
        type:
          description: The type of the device, if the driver publishes it.
          type: str
          returned: success
          sample: gpu
        product:
          description: The product name of the device, if the driver publishes it.
          type: str
          returned: success
          sample: NVIDIA H100 80GB HBM3
        profile:
          description: The profile of a partition, if the driver publishes it. For a vNPU, it is the template.
          type: str
          returned: success
          sample: ""
        uuid:
          description: The UUID of the device, if the driver publishes it.
          type: str
          returned: success
          sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
        taints:
          description: The taints that the driver publishes for the device, each with C(key), C(value), and C(effect), without those of DeviceTaintRules.
          type: list
          elements: dict
          returned: success
          sample: []
        share_id:
          description: The ID of the claim's share, if several claims can hold the device at the same time. Otherwise it is empty.
          type: str
          returned: success
          sample: ""
        consumed:
          description: The capacities of the device that the claim consumes, if several claims can hold the device.
          type: dict
          returned: success
          sample: {memory: 20Gi}
        admin_access:
          description: Whether the claim has admin access, which does not prevent other claims from holding the device.
          type: bool
          returned: success
          sample: false
        conditions:
          description: The conditions of the device that the driver reports in the claim, each with C(type), C(status), C(reason), and C(message).
          type: list
          elements: dict
          returned: success
          sample: [{type: Ready, status: "True", reason: Prepared, message: ""}]
        addresses:
          description: The IP addresses of a network device.
          type: list
          elements: str
          returned: success
          sample: []
    health:
      description:
        - The health of the claim's devices in each container, as the kubelet reports it, with C(pod), C(container), C(request), C(resource), C(health)
          (V(Healthy), V(Unhealthy), or V(Unknown)), and C(message).
      type: list
      elements: dict
      returned: success
      sample:
        - pod: training-0
          container: main
          request: gpu
          resource: k8s.gpu.nvidia.com/claim=3f0c9f0e-gpu-3
          health: Unhealthy
          message: "xid 79: it has fallen off the bus."
    healthy:
      description: Whether all entries in RV(claims[].health) are V(Healthy) and no device has a taint.
      type: bool
      returned: success
      sample: true
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: api-unreachable
status:
  description: The HTTP status with which the API server rejected a request. It is 0 if the module did not reach the API server.
  returned: failure of a request
  type: int
  sample: 403
reason:
  description: The reason that the API server returned for the rejected request.
  returned: failure of a request
  type: str
  sample: Forbidden
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.claim_reader import (
    facts_of,
    list_claims,
    pods_by_name,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster import claims

CONSTRAINTS: dict[str, Any] = {"required_together": API_REQUIRED_TOGETHER}


STRINGS: dict[str, Any] = {"type": "list", "elements": "str", "default": []}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "namespace": {"type": "str"},
        "names": STRINGS,
        "label_selectors": STRINGS,
        "nodes": STRINGS,
        "drivers": STRINGS,
        "devices": STRINGS,
        "pods": STRINGS,
        "device_classes": STRINGS,
        "allocated": {"type": "bool"},
        "healthy": {"type": "bool"},
        "health": {"type": "bool", "default": True},
    }


def read_claims(api: Api, params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cluster's claims that match the filters. Raises ApiError."""
    selectors = {"labelSelector": ",".join(params["label_selectors"])} if params["label_selectors"] else {}
    found, slices = list_claims(api, namespace=params["namespace"], selectors=selectors)
    pods = pods_by_name(api, found) if params["health"] else {}
    filters = ("names", "nodes", "drivers", "devices", "pods", "device_classes", "allocated", "healthy")
    return claims.select(facts_of(found, slices, pods), **{name: params[name] for name in filters})


def work(module: AnsibleModule) -> dict[str, Any]:
    return {"changed": False, "claims": read_claims(connect(module), module.params)}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
