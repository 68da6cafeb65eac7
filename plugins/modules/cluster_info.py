#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: cluster_info
version_added: 0.1.0
short_description: Show what a cluster knows of its accelerator nodes
description:
  - Returns in one answer what the roles of this collection have to know of a cluster. Whether its API server serves
    Dynamic Resource Allocation and keeps the counters of partitions, what each of the given nodes is, which devices are
    published of it, and which of the collection's own objects are there.
  - An API server that does not answer is part of the answer and no failure.
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
  nodes:
    description: Names of the Node objects.
    type: list
    elements: str
    required: true
  namespace:
    description: Namespace of the node drivers' service accounts.
    type: str
    default: dra-accelerators
  counters:
    description:
      - Whether the API server is asked, by a dry run that stores nothing, if it keeps the counters of a ResourceSlice.
        This is the only way to learn whether the feature gate C(DRAPartitionableDevices) is on.
    type: bool
    default: true
  claims:
    description: Whether all ResourceClaims with a device of the nodes are returned too.
    type: bool
    default: false
  drivers:
    description: With O(claims), the drivers whose devices count.
    type: list
    elements: str
    default: [gpu.nvidia.com]
  own:
    description:
      - Whether the collection's own objects are returned. If V(false), RV(own) and RV(accounts) are empty, and the module sends fewer requests.
      - With O(needs) or O(orphans), the objects are always returned.
    type: bool
    default: true
  needs:
    description:
      - Whether RV(needs) is returned. It contains the requirements of nodes other than O(nodes) for the objects that all nodes share.
    type: bool
    default: false
  orphans:
    description: Whether RV(orphans) is returned. For this the module lists all Nodes of the cluster.
    type: bool
    default: false
  claim_watchers:
    description: Whether RV(claim_watchers) is returned. If V(false), it is empty.
    type: bool
    default: false
notes:
  - With more than ten O(nodes), the module lists all Nodes and ResourceSlices of the cluster, if the cluster has at most ten times as many Nodes.
seealso:
  - module: dra.accelerators.node_info
"""

EXAMPLES = r"""
- name: Ask the cluster
  dra.accelerators.cluster_info:
    nodes: [gpu-node-1, gpu-node-2]
  register: cluster
  delegate_to: localhost

- name: Show what is published of a node
  ansible.builtin.debug:
    msg: "{{ cluster.nodes['gpu-node-1'].slices }}"
"""

RETURN = r"""
reached:
  description: Whether the API server answered.
  returned: success
  type: bool
  sample: true
problem:
  description: Why it did not; empty if it did.
  returned: success
  type: str
  sample: ""
versions:
  description: Versions of the API group C(resource.k8s.io) that it serves.
  returned: success
  type: list
  elements: str
  sample: [v1, v1beta2]
counters:
  description:
    - Whether it keeps the counters of a ResourceSlice (C(kept)). It is null where the server was not asked, or rejected the dry run for
      another reason, such as missing permissions. C(problem) then has its answer.
  returned: success
  type: dict
  sample: {kept: true, problem: ""}
namespace:
  description: Whether the namespace C(exists).
  returned: success
  type: dict
  sample: {exists: true}
classes:
  description: By name, whether a DeviceClass bears the collection's label.
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
    - All objects that bear the collection's label C(app.kubernetes.io/managed-by), in an order in which they can be removed.
  returned: success
  type: list
  elements: dict
  sample:
    - {apiVersion: v1, kind: ServiceAccount, metadata: {name: driver-gpu-node-1, namespace: dra-accelerators}}
accounts:
  description: Names of the node drivers' service accounts.
  returned: success
  type: list
  elements: str
  sample: [driver-gpu-node-1]
claim_watchers:
  description: >-
    With O(claim_watchers), the names of the nodes whose drivers are services and may watch all ResourceClaims, because their layout has
    C(prepared_before_binding).
  returned: success
  type: list
  elements: str
  sample: []
nodes:
  description:
    - By name, what the cluster knows of each node. C(exists), C(uid), C(ready) (V(True), V(False) or V(Unknown)), C(kubelet)
      and C(runtime) (versions), C(unschedulable), C(annotations), C(labels), C(allocatable), and C(slices).
    - A slice has C(name), C(driver), C(pool), C(generation), C(expected) (how many its pool has), C(ours) (whether a driver
      of this collection wrote it), and C(devices), each with C(name), C(type), C(product), C(profile) (of a slice of an NPU
      its template) and C(uuid).
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
      slices: []
claims:
  description: With O(claims), every ResourceClaim that holds a device of one of the nodes, with the pods that it is reserved for.
  returned: success
  type: list
  elements: dict
  sample:
    - {namespace: default, name: partition, nodes: [gpu-node-1], pods: [worker]}
needs:
  description:
    - With O(needs), the merged needs of all nodes with a driver of this collection other than O(nodes). The needs come from the records that the role
      C(dra_driver) writes. For nodes without a record they come from the existing objects.
  returned: success
  type: dict
  sample: {names: [npu.huawei.com], read_pods: false, token_lifetime: 2592000, token_audiences: ["https://kubernetes.default.svc"]}
orphans:
  description: With O(orphans), the names of nodes that have a service account of a node driver and no Node object.
  returned: success
  type: list
  elements: str
  sample: [gpu-node-9]
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._cluster import ask
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    ApiError,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

CONSTRAINTS: dict[str, Any] = {"required_together": API_REQUIRED_TOGETHER}


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "nodes": {"type": "list", "elements": "str", "required": True},
        "namespace": {"type": "str", "default": "dra-accelerators"},
        "counters": {"type": "bool", "default": True},
        "claims": {"type": "bool", "default": False},
        "drivers": {"type": "list", "elements": "str", "default": ["gpu.nvidia.com"]},
        "own": {"type": "bool", "default": True},
        "needs": {"type": "bool", "default": False},
        "orphans": {"type": "bool", "default": False},
        "claim_watchers": {"type": "bool", "default": False},
        **API_OPTIONS,
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    """Ask the cluster; returns the module's result."""
    params = module.params
    try:
        api = connect(module)
    except ApiError as error:
        api, problem = None, str(error)
    else:
        problem = ""
    found = ask(
        api,
        problem,
        nodes=params["nodes"],
        namespace=params["namespace"],
        counters=params["counters"],
        drivers=params["drivers"] if params["claims"] else (),
        # Both are found by the accounts of the drivers.
        own=params["own"] or params["needs"] or params["orphans"],
        needs=params["needs"],
        orphans=params["orphans"],
        claim_watchers=params["claim_watchers"],
    )
    return {"changed": False, **found}


def main() -> None:
    """Entry point."""
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
