#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: claim_info
version_added: 0.1.0
short_description: Show who has which device, by ResourceClaims
description:
  - Returns what a cluster knows of its ResourceClaims. The devices that each one has, on which nodes, for which pods, what share it has of a device
    that others have as well, and how well the devices are by the kubelet's and the drivers' word.
  - A claim is returned when every filter that is given fits it.
notes:
  - Needs the permissions to list C(resourceclaims) and C(resourceslices) in the API group C(resource.k8s.io), and with O(health) to list C(pods).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._attributes.info_module
  - dra.accelerators._kubernetes
attributes:
  platform:
    support: full
    platforms: posix
options:
  namespace:
    description: The namespace of the claims. By default, all namespaces.
    type: str
  names:
    description: Shell patterns for the claims' names.
    type: list
    elements: str
    default: []
  label_selectors:
    description: Label selectors that a claim has to fit, all of them.
    type: list
    elements: str
    default: []
  nodes:
    description: Names of nodes; a claim fits that has a device of one of them.
    type: list
    elements: str
    default: []
  drivers:
    description: Names of drivers; a claim fits that has a device of one of them.
    type: list
    elements: str
    default: []
  devices:
    description:
      - Patterns of shell; a claim fits that has a device with such a name (V(gpu-3)), such a pool and name (V(gpu-node-1/gpu-3)) or such a UUID.
    type: list
    elements: str
    default: []
  pods:
    description: Patterns of shell for the names of pods; a claim fits that is reserved for one of them.
    type: list
    elements: str
    default: []
  device_classes:
    description: Names of DeviceClasses; a claim fits that asks for devices of one of them.
    type: list
    elements: str
    default: []
  allocated:
    description: Whether the claims have devices. By default, claims with and without devices are returned.
    type: bool
  healthy:
    description: Whether the claims' devices are healthy, as in RV(claims[].healthy). By default, both are returned.
    type: bool
  health:
    description:
      - Whether the pods are asked what the kubelet says of the health of their devices. On large clusters this is what takes long.
      - If it is V(false), RV(claims[].health) is empty, and RV(claims[].healthy) depends on taints only.
    type: bool
    default: true
seealso:
  - module: dra.accelerators.cluster_info
  - module: dra.accelerators.device_taint
"""

EXAMPLES = r"""
- name: See who has what of two nodes
  dra.accelerators.claim_info:
    nodes: [gpu-node-1, gpu-node-2]
  register: there
  delegate_to: localhost

- name: Say it
  ansible.builtin.debug:
    msg: "{{ item.namespace }}/{{ item.name }} has {{ item.devices | map(attribute='name') | join(', ') }} for {{ item.pods | join(', ') }}"
  loop: "{{ there.claims }}"

- name: See whose devices are not well
  dra.accelerators.claim_info:
    drivers: [gpu.nvidia.com]
    healthy: false

- name: See who has a GPU or a part of it
  dra.accelerators.claim_info:
    devices: ["gpu-node-1/gpu-3*"]
    allocated: true
    health: false

- name: See which claims wait
  dra.accelerators.claim_info:
    namespace: training
    label_selectors: [team=vision]
    device_classes: [gpu.nvidia.com, mig.nvidia.com]
    allocated: false
"""

RETURN = r"""
claims:
  description: The claims, by namespace and name.
  returned: success
  type: list
  elements: dict
  contains:
    namespace:
      description: Namespace of the claim.
      type: str
      returned: success
      sample: default
    name:
      description: Name of the claim.
      type: str
      returned: success
      sample: training-0-gpu-x7k2p
    uid:
      description: Its UID, by which drivers know it.
      type: str
      returned: success
      sample: 3f0c9f0e-6a0e-4a39-9d55-1b1b7f0c2f10
    created:
      description: When it was made.
      type: str
      returned: success
      sample: "2026-11-23T12:00:00Z"
    deleting:
      description: Whether its deletion was asked for and is not done yet.
      type: bool
      returned: success
      sample: false
    template:
      description: What the pod calls it, where it was made from a template; else empty.
      type: str
      returned: success
      sample: gpu
    extended_resource:
      description: Whether the scheduler made it for a pod that asks for an extended resource.
      type: bool
      returned: success
      sample: false
    device_classes:
      description: The DeviceClasses that its requests name.
      type: list
      elements: str
      returned: success
      sample: [gpu.nvidia.com]
    allocated:
      description: Whether it has devices.
      type: bool
      returned: success
      sample: true
    nodes:
      description: The nodes that its devices are of.
      type: list
      elements: str
      returned: success
      sample: [gpu-node-1]
    reserved_for:
      description: What it is reserved for, with C(resource), C(name) and C(uid).
      type: list
      elements: dict
      returned: success
      sample: [{resource: pods, name: training-0, uid: 0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55}]
    pods:
      description: The names of those of them that are pods.
      type: list
      elements: str
      returned: success
      sample: [training-0]
    devices:
      description: The devices that it has.
      type: list
      elements: dict
      returned: success
      contains:
        request:
          description: For which request.
          type: str
          returned: success
          sample: gpu
        driver:
          description: The name of the driver.
          type: str
          returned: success
          sample: gpu.nvidia.com
        pool:
          description: The pool.
          type: str
          returned: success
          sample: gpu-node-1
        name:
          description: The name of the device.
          type: str
          returned: success
          sample: gpu-3
        node:
          description: Its node; empty for a device that several nodes reach, or that is not published any more.
          type: str
          returned: success
          sample: gpu-node-1
        published:
          description: Whether it is published at this moment.
          type: bool
          returned: success
          sample: true
        type:
          description: Its type, where the driver publishes one.
          type: str
          returned: success
          sample: gpu
        product:
          description: Its product, likewise.
          type: str
          returned: success
          sample: NVIDIA H100 80GB HBM3
        profile:
          description: The kind of partition, likewise; of a slice of an NPU its template.
          type: str
          returned: success
          sample: ""
        uuid:
          description: Its UUID, likewise.
          type: str
          returned: success
          sample: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
        taints:
          description: The taints that its driver gives it, each with C(key), C(value) and C(effect). Those of DeviceTaintRules are not among them.
          type: list
          elements: dict
          returned: success
          sample: []
        share_id:
          description: The ID of the claim's share, where several claims have the device at a time; else empty.
          type: str
          returned: success
          sample: ""
        consumed:
          description: What the claim has of the device's capacities, where several claims have it.
          type: dict
          returned: success
          sample: {memory: 20Gi}
        admin_access:
          description: Whether it only watches the device and keeps nobody from having it.
          type: bool
          returned: success
          sample: false
        conditions:
          description: What the driver says of the device in the claim, each with C(type), C(status), C(reason) and C(message).
          type: list
          elements: dict
          returned: success
          sample: [{type: Ready, status: "True", reason: Prepared, message: ""}]
        addresses:
          description: IP addresses of a network device.
          type: list
          elements: str
          returned: success
          sample: []
    health:
      description:
        - What the kubelet says of the claim's devices in each container, with C(pod), C(container), C(request), C(resource), C(health) (V(Healthy),
          V(Unhealthy) or V(Unknown)) and C(message).
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
      description: Whether everything in RV(claims[].health) is V(Healthy) and no device has a taint.
      type: bool
      returned: success
      sample: true
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: api-unreachable
status:
  description: The HTTP status with which the API server refused a request; 0 if it was not reached.
  returned: failure of a request
  type: int
  sample: 403
reason:
  description: The API server's own word for the refusal.
  returned: failure of a request
  type: str
  sample: Forbidden
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._claims_ask import facts_of, list_claims, pods_by_name
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster import claims

CONSTRAINTS: dict[str, Any] = {"required_together": API_REQUIRED_TOGETHER}


def _texts() -> dict[str, Any]:
    return {"type": "list", "elements": "str", "default": []}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "namespace": {"type": "str"},
        "names": _texts(),
        "label_selectors": _texts(),
        "nodes": _texts(),
        "drivers": _texts(),
        "devices": _texts(),
        "pods": _texts(),
        "device_classes": _texts(),
        "allocated": {"type": "bool"},
        "healthy": {"type": "bool"},
        "health": {"type": "bool", "default": True},
    }


def ask(api: Api, params: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask the cluster and return the claims that the filters leave. Raises ApiError."""
    selectors = {"labelSelector": ",".join(params["label_selectors"])} if params["label_selectors"] else {}
    found, slices = list_claims(api, namespace=params["namespace"], selectors=selectors)
    pods = pods_by_name(api, found) if params["health"] else {}
    filters = ("names", "nodes", "drivers", "devices", "pods", "device_classes", "allocated", "healthy")
    return claims.select(facts_of(found, slices, pods), **{name: params[name] for name in filters})


def work(module: AnsibleModule) -> dict[str, Any]:
    return {"changed": False, "claims": ask(connect(module), module.params)}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
