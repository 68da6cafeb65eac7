#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_info
version_added: 0.1.0
short_description: Gather facts about a cluster and its accelerator nodes
description:
  - Returns the facts about a cluster that the roles of this collection need. They include whether the API server serves
    Dynamic Resource Allocation and stores the counters of partitions, the properties and published devices of the given
    nodes, and the existing objects of the collection.
  - If the API server does not respond, the module does not fail. It sets RV(reached) to V(false).
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
  nodes:
    description: The names of the Node objects.
    type: list
    elements: str
    required: true
  namespace:
    description: The namespace of the node drivers' service accounts.
    type: str
    default: dra-accelerators
  counters:
    description:
      - Whether to check, by a dry run that stores nothing, if the API server stores the counters of a ResourceSlice.
        Only this check shows whether the feature gate C(DRAPartitionableDevices) is enabled.
    type: bool
    default: true
  claims:
    description: Whether to return RV(claims), which contains all ResourceClaims that hold a device of the nodes.
    type: bool
    default: false
  held_claims:
    description:
      - With O(claims), namespaces and names of claims, such as V(default/training-0). The module reads these claims by name. It lists all claims of the
        cluster only if none of these claims holds a device of the nodes. Use this option to wait until claims are released.
      - If one of these claims holds a device of the nodes, the module returns only these claims.
    type: list
    elements: str
    default: []
  drivers:
    description: With O(claims), the drivers of the devices to consider.
    type: list
    elements: str
    default: [gpu.nvidia.com]
  own:
    description:
      - Whether to return the objects of the collection. If V(false), RV(own) and RV(accounts) are empty, and the module sends fewer requests.
      - With O(needs) or O(orphans), the module always returns the objects.
    type: bool
    default: true
  node_facts:
    description:
      - Whether to return RV(nodes). If V(false), it is empty, and the module reads no Nodes and ResourceSlices for it.
      - With O(claims), the module always returns it.
    type: bool
    default: true
  devices:
    description:
      - Whether to return the devices of each slice in RV(nodes). If V(false), C(devices) of each slice is empty, so that the result for many nodes is
        small. RV(nodes) then still has the numbers in C(published).
    type: bool
    default: true
  needs:
    description:
      - Whether to return RV(needs). It contains the requirements of nodes other than O(nodes) for the objects that all nodes share.
    type: bool
    default: false
  orphans:
    description: Whether to return RV(orphans). If V(true), the module lists all Nodes of the cluster.
    type: bool
    default: false
  driver_pods:
    description: Whether to return RV(driver_pods). If V(false), it is empty.
    type: bool
    default: false
  controller:
    description: Whether to return RV(controller). If V(false), it is null.
    type: bool
    default: false
  lists:
    description: The lists of objects to read. If set, the module reads only these lists, and returns RV(objects).
    type: list
    elements: dict
    default: []
    suboptions:
      api_version:
        description: The API group and version, for example V(apps/v1).
        type: str
        required: true
      kind:
        description:
          - The kind of the objects. Its plural is part of the API path. It must be regular, as in C(pods), C(deviceclasses), and C(networkpolicies).
        type: str
        required: true
      namespace:
        description: The namespace of the objects. If empty, the module returns objects of all namespaces.
        type: str
        default: ''
      label_selector:
        description: The label selector.
        type: str
        default: ''
      field_selector:
        description: The field selector.
        type: str
        default: ''
notes:
  - With more than ten O(nodes), the module lists all Nodes and ResourceSlices of the cluster, if the cluster has at most ten times as many Nodes.
seealso:
  - module: dra.accelerators.node_info
"""

EXAMPLES = r"""
- name: Gather facts about the cluster
  dra.accelerators.cluster_info:
    nodes: [gpu-node-1, gpu-node-2]
  register: cluster
  delegate_to: localhost

- name: Show the ResourceSlices of a node
  ansible.builtin.debug:
    msg: "{{ cluster.nodes['gpu-node-1'].slices }}"
"""

RETURN = r"""
reached:
  description: Whether the API server responded.
  returned: success
  type: bool
  sample: true
problem:
  description: The reason why the API server did not respond. It is empty if the server responded.
  returned: success
  type: str
  sample: ""
versions:
  description: The versions of the API group C(resource.k8s.io) that the API server serves.
  returned: success
  type: list
  elements: str
  sample: [v1, v1beta2]
counters:
  description:
    - Whether the API server stores the counters of a ResourceSlice (C(kept)).
    - C(kept) is null if the module did not send the dry run, or if the server rejected it for another reason, such as missing permissions.
      C(problem) then contains the response of the server.
  returned: success
  type: dict
  sample: {kept: true, problem: ""}
namespace:
  description: Whether the namespace C(exists).
  returned: success
  type: dict
  sample: {exists: true}
classes:
  description: Whether each DeviceClass has the label of the collection, by class name.
  returned: success
  type: dict
  sample: {gpu.nvidia.com: true}
duplicates:
  description: A warning for each extended resource that several DeviceClasses serve. The scheduler then uses the newest of them.
  returned: success
  type: list
  elements: str
  sample: []
own:
  description:
    - All objects with the collection's label C(app.kubernetes.io/managed-by), in an order in which they can be deleted.
  returned: success
  type: list
  elements: dict
  sample:
    - {apiVersion: v1, kind: ServiceAccount, metadata: {name: driver-gpu-node-1, namespace: dra-accelerators}}
accounts:
  description: The names of the node drivers' service accounts.
  returned: success
  type: list
  elements: str
  sample: [driver-gpu-node-1]
controller:
  description: >-
    With O(controller), whether a controller has written the ConfigMap C(waiting-claims) in the namespace O(namespace). Such a controller lists
    the claims that nodes prepare before pods are bound (C(prepared_before_binding) in a layout).
  returned: success
  type: bool
  sample: true
nodes:
  description:
    - The facts about each node, by node name. They are C(exists), C(uid), C(ready) (V(True), V(False), or V(Unknown)), C(kubelet)
      and C(runtime) (versions), C(unschedulable), C(annotations), C(labels), C(allocatable), C(published), and C(slices).
    - C(published) has the number of whole C(devices), their C(products), and in C(partitions) the number of existing partitions of each profile.
    - A slice has C(name), C(driver), C(pool), C(generation), C(expected) (the number of slices in its pool), C(managed) (whether a driver
      of this collection wrote it), and C(devices). Each device has C(name), C(type), C(product), C(profile) (the template of a vNPU),
      and C(uuid).
  returned: success
  type: dict
  sample:
    gpu-node-1:
      exists: true
      uid: 3f0c9f0e-6a0e-4a39-9d55-1b1b7f0c2f10
      ready: "True"
      kubelet: v1.37.0
      runtime: containerd://2.3.7
      unschedulable: false
      published: {devices: 8, products: [NVIDIA H100 80GB HBM3], partitions: {1g.10gb: 4}}
      slices: []
claims:
  description:
    - With O(claims), every ResourceClaim that holds a device of one of the nodes, with the pods for which it is reserved.
    - C(drivers) has the drivers of these devices by node. C(consumers) has the pods with their UIDs.
  returned: success
  type: list
  elements: dict
  sample:
    - namespace: default
      name: partition
      nodes: [gpu-node-1]
      drivers: {gpu-node-1: [gpu.nvidia.com]}
      pods: [worker]
      consumers: [{namespace: default, name: worker, uid: 0f2b1c7e-6a0d-4f5b-9d55-0c2d8a6f3b11}]
needs:
  description:
    - With O(needs), the merged needs of all nodes with a driver of this collection other than O(nodes). The module reads them from the records that
      the role C(dra_driver) writes. For nodes without a record, it derives them from the existing objects.
  returned: success
  type: dict
  sample: {names: [npu.huawei.com], read_pods: false, token_lifetime: 2592000, token_audiences: ["https://kubernetes.default.svc"]}
namespaces:
  description:
    - With O(needs), the namespaces of the drivers of nodes other than O(nodes), as in the admission policies of the cluster.
    - C(services) is the namespace of drivers that run as systemd services, and C(pods) the namespace of drivers that run as pods. Each is empty if no
      other node has such a driver.
  returned: success
  type: dict
  sample: {services: dra-accelerators, pods: dra-accelerators-driver}
orphans:
  description:
    - With O(orphans), the names of nodes that have a service account or a ClusterRoleBinding of a node driver and no Node object.
    - ClusterRoleBindings also show drivers whose service accounts are in another namespace.
  returned: success
  type: list
  elements: str
  sample: [gpu-node-9]
driver_pods:
  description:
    - With O(driver_pods), the Nodes on which a DaemonSet runs the node driver, with the labels that select its pods.
    - If a load balancer responds with status 404, RV(reached) is V(false). C(kubernetes.core.k8s_info) returns an empty list in this case.
  returned: success
  type: dict
  sample: {gpu-node-1: [dra-accelerators/driver, dra-accelerators/driver-0a1b2c3d4e]}
objects:
  description:
    - With O(lists), the objects of all lists without their managed fields, in the order of O(lists).
    - If a load balancer responds with status 404, RV(reached) is V(false). C(kubernetes.core.k8s_info) returns an empty list in this case.
  returned: success
  type: list
  elements: dict
  sample: [{apiVersion: v1, kind: Pod, metadata: {name: driver-0, namespace: dra-accelerators-driver}}]
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    ApiError,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.cluster_facts import read_cluster_facts
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

CONSTRAINTS: dict[str, Any] = {"required_together": API_REQUIRED_TOGETHER}


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "nodes": {"type": "list", "elements": "str", "required": True},
        "namespace": {"type": "str", "default": "dra-accelerators"},
        "counters": {"type": "bool", "default": True},
        "claims": {"type": "bool", "default": False},
        "held_claims": {"type": "list", "elements": "str", "default": []},
        "drivers": {"type": "list", "elements": "str", "default": ["gpu.nvidia.com"]},
        "own": {"type": "bool", "default": True},
        "node_facts": {"type": "bool", "default": True},
        "devices": {"type": "bool", "default": True},
        "needs": {"type": "bool", "default": False},
        "orphans": {"type": "bool", "default": False},
        "driver_pods": {"type": "bool", "default": False},
        "controller": {"type": "bool", "default": False},
        "lists": {
            "type": "list",
            "elements": "dict",
            "default": [],
            "options": {
                "api_version": {"type": "str", "required": True},
                "kind": {"type": "str", "required": True},
                "namespace": {"type": "str", "default": ""},
                "label_selector": {"type": "str", "default": ""},
                "field_selector": {"type": "str", "default": ""},
            },
        },
        **API_OPTIONS,
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    """Read the cluster's facts, and return the module's result."""
    params = module.params
    api, problem = None, ""
    try:
        api = connect(module)
    except ApiError as error:
        problem = str(error)
    facts = read_cluster_facts(
        api,
        problem,
        nodes=params["nodes"],
        namespace=params["namespace"],
        counters=params["counters"],
        drivers=params["drivers"] if params["claims"] else (),
        held=params["held_claims"],
        # The needs and the orphans are determined from the collection's objects.
        own=params["own"] or params["needs"] or params["orphans"],
        needs=params["needs"],
        orphans=params["orphans"],
        driver_pods=params["driver_pods"],
        controller=params["controller"],
        nodes_facts=params["node_facts"],
        devices=params["devices"],
        lists=params["lists"],
    )
    return {"changed": False, **facts}


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
