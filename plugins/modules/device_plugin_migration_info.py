#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_plugin_migration_info
version_added: 0.1.0
short_description: Plan the migration of a cluster from device plugins to claims
description:
  - Finds pods, workloads, quotas, and limit ranges with resources of device plugins, such as C(nvidia.com/gpu), C(nvidia.com/mig-1g.10gb),
    or C(huawei.com/Ascend910), and returns the effect of the migration on each of them.
  - Finds device plugins independent of their names. They are DaemonSets whose pods mount the kubelet's directory C(device-plugins).
  - Returns for each node the remaining steps, the pods to evict, and the problems that prevent the migration.
  - Ignores other resources in a vendor's domain, such as those of network adapters.
notes:
  - Requires the permissions to list C(nodes), C(pods), C(resourcequotas), C(limitranges), C(replicationcontrollers), C(deployments),
    C(statefulsets), C(daemonsets), C(replicasets), C(jobs), C(cronjobs), C(deviceclasses), C(resourceslices), and C(resourceclaims) in all
    namespaces.
  - Requires the permission to create C(deviceclasses) to determine whether the API server keeps the extended resource of a class. This request is
    a dry run and stores nothing.
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
    description: The names of the nodes to plan for. By default, all nodes that have or had a device plugin, and nodes with remaining steps.
    type: list
    elements: str
    default: []
  direction:
    description: V(forward) migrates from device plugins to claims. V(back) migrates from claims to device plugins.
    type: str
    default: forward
    choices:
      - forward
      - back
  plugins:
    description:
      - The DaemonSets, as C(namespace/name), that the migration can keep off nodes. V(*) allows all DaemonSets that serve device plugins.
    type: list
    elements: str
    default: []
  evict:
    description: Whether the migration can evict pods that use devices in the previous way.
    type: bool
    default: false
  evict_unmanaged:
    description: Whether O(evict=true) also applies to pods without a controller. No controller creates replacements for them.
    type: bool
    default: false
  accept:
    description: The codes of problems to accept. RV(nodes) contains the problems.
    type: list
    elements: str
    default: []
  back_to:
    description:
      - With O(direction=back), the device plugin for the nodes. V(own) is the device plugin of this collection's node driver. V(foreign) is the
        device plugin that a node had before. V(auto) selects V(foreign) if the Node has or had another device plugin, otherwise V(own).
    type: str
    default: auto
    choices:
      - auto
      - own
      - foreign
  kubelet_root:
    description: The root directory of the kubelets.
    type: path
    default: /var/lib/kubelet
seealso:
  - module: dra.accelerators.device_plugin_migration
  - module: dra.accelerators.claim_info
"""

EXAMPLES = r"""
- name: Plan the migration of all nodes to claims
  dra.accelerators.device_plugin_migration_info:
  delegate_to: localhost

- name: Plan the migration of two nodes with allowed evictions
  dra.accelerators.device_plugin_migration_info:
    nodes: [gpu-node-1, gpu-node-2]
    plugins: [gpu-operator/nvidia-device-plugin-daemonset]
    evict: true
  register: move

- name: List the pods to evict before a node migrates back
  dra.accelerators.device_plugin_migration_info:
    nodes: [gpu-node-1]
    direction: back
"""

RETURN = r"""
pods:
  description: The pods that request resources of device plugins.
  returned: success
  type: list
  elements: dict
  contains:
    namespace:
      description: The namespace of the pod.
      type: str
      returned: success
      sample: default
    name:
      description: The name of the pod.
      type: str
      returned: success
      sample: training-0
    node:
      description: The node of the pod, or empty for a pod without a node.
      type: str
      returned: success
      sample: gpu-node-1
    way:
      description: The source of the pod's devices. V(plugin) is a device plugin, and V(claims) are claims. V(waits) is a pending pod, and V(done) an ended pod.
      type: str
      returned: success
      sample: plugin
    owner:
      description: The controller that creates a replacement, or empty for a pod without a controller.
      type: str
      returned: success
      sample: Deployment/training
    resources:
      description: The requested resources with their amounts.
      type: dict
      returned: success
      sample: {"nvidia.com/gpu": 2}
    becomes:
      description: The replacement of each resource after the migration.
      type: dict
      returned: success
      sample: {"nvidia.com/gpu": "unchanged in the pod. The DeviceClass gpu.nvidia.com, which exists, provides it"}
    problems:
      description: The problems of the pod, each with C(code), C(text), C(remedy), and C(blocks).
      type: list
      elements: dict
      returned: success
      sample: []
workloads:
  description: The Deployments, StatefulSets, DaemonSets, ReplicaSets, ReplicationControllers, Jobs, and CronJobs whose pods request such resources.
  returned: success
  type: list
  elements: dict
  sample:
    - {kind: Deployment, namespace: default, name: training, replicas: 2, resources: {"nvidia.com/gpu": 1}, becomes: {}, problems: []}
quotas:
  description: The ResourceQuotas that count devices or claims. C(becomes) of each entry is its effect after the migration.
  returned: success
  type: list
  elements: dict
  sample:
    - {namespace: default, name: gpus, entries: [{entry: requests.nvidia.com/gpu, hard: "4", used: "2", becomes: still counts pods}], problems: []}
limit_ranges:
  description: The LimitRanges that limit such resources.
  returned: success
  type: list
  elements: dict
  sample: []
resources:
  description: For each resource, the C(device_class) that serves it after the migration, whether this class C(exists), and both as a sentence (C(becomes)).
  returned: success
  type: dict
  sample:
    nvidia.com/mig-1g.10gb:
      device_class: mig-1g.10gb.nvidia.com
      exists: false
      becomes: unchanged in the pod. The DeviceClass mig-1g.10gb.nvidia.com, which the migration creates, provides it
plugins:
  description:
    - The DaemonSets that serve device plugins. C(nodes) are the nodes with a pod of the DaemonSet. C(managed) is true for DaemonSets of this
      collection.
    - C(way) is the method that keeps the DaemonSet off a node, V(affinity), V(label) for a C(label) that its operator reads, or V(none) if its
      C(owner) would undo every change.
  returned: success
  type: list
  elements: dict
  sample:
    - {namespace: kube-system, name: nvidia-device-plugin, managed: false, nodes: [gpu-node-1], way: affinity, label: "", owner: "", kept_off: false}
nodes:
  description:
    - The plan of each node. C(kind) is the device plugin that the node has, such as C(own) or C(foreign). C(done) is true for a migrated node.
      C(steps) are the remaining steps with their C(pods).
    - C(problems) are the problems of the node. Problems with C(blocks) must be solved, or accepted by their C(code), before the migration.
  returned: success
  type: dict
  sample: {"gpu-node-1": {"kind": "foreign", "done": false, "steps": [], "problems": []}}
blocked:
  description: All problems that prevent the migration, one line each.
  returned: success
  type: list
  elements: str
  sample: []
leftovers:
  description: The remaining changes of interrupted runs and of deleted nodes.
  returned: success
  type: list
  elements: str
  sample: []
gate:
  description: Whether the API server keeps the extended resource of a class (C(kept)), and otherwise the reason (C(problem)).
  returned: success
  type: dict
  sample: {"kept": true, "problem": ""}
counts:
  description: The number of pods that request such resources, and how many of them use a device plugin and how many use claims.
  returned: success
  type: dict
  sample: {"pods": 3, "by_plugin": 2, "by_claims": 0}
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: api-error
status:
  description: The HTTP status of the rejected request, or 0 if the API server was not reached.
  returned: failure of a request
  type: int
  sample: 403
reason:
  description: The reason for the rejection, as the API server reports it.
  returned: failure of a request
  type: str
  sample: Forbidden
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._migration import queries
from ansible_collections.dra.accelerators.plugins.module_utils._migration.migration_inventory import Inventory
from ansible_collections.dra.accelerators.plugins.module_utils._migration.node_plan import (
    AUTO,
    BACK,
    FOREIGN,
    FORWARD,
    OWN,
    MigrationOptions,
    Plan,
    plan,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

CONSTRAINTS: dict[str, Any] = {"required_together": API_REQUIRED_TOGETHER}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "nodes": {"type": "list", "elements": "str", "default": []},
        "direction": {"type": "str", "default": FORWARD, "choices": [FORWARD, BACK]},
        "plugins": {"type": "list", "elements": "str", "default": []},
        "evict": {"type": "bool", "default": False},
        "evict_unmanaged": {"type": "bool", "default": False},
        "accept": {"type": "list", "elements": "str", "default": []},
        "back_to": {"type": "str", "default": AUTO, "choices": [AUTO, OWN, FOREIGN]},
        "kubelet_root": {"type": "path", "default": "/var/lib/kubelet"},
    }


def plans_of(cluster: queries.Cluster, params: dict[str, Any]) -> tuple[Inventory, dict[str, Plan]]:
    """Return the inventory of the cluster, and a plan for each requested node. No side effects."""
    root, direction = params["kubelet_root"], params["direction"]
    inventory = queries.build_inventory(cluster, direction=direction, kubelet_root=root)
    options = MigrationOptions(
        plugins=tuple(params["plugins"]),
        evict=params["evict"],
        evict_unmanaged=params["evict_unmanaged"],
        accept=frozenset(params["accept"]),
        back_to=params["back_to"],
    )
    names = params["nodes"] or [str(each["metadata"]["name"]) for each in cluster.nodes]
    daemon_sets = [
        f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in cluster.workloads.get("DaemonSet", ())
    ]
    plans = {
        name: plan(state, direction, options, inventory.services, daemon_sets)
        for name, state in queries.node_states(cluster, inventory, names, root).items()
    }
    if not params["nodes"]:
        plans = {name: each for name, each in plans.items() if each.steps or each.kind != "none"}
    return inventory, plans


def work(module: AnsibleModule) -> dict[str, Any]:
    api = connect(module)
    cluster = queries.read_cluster(api)
    inventory, plans = plans_of(cluster, module.params)
    gate = queries.read_gate(api)
    blocked = [f"{name}: {each.text} {each.remedy}".strip() for name, one in plans.items() for each in one.blocks]
    if module.params["direction"] == FORWARD and any(one.steps for one in plans.values()):
        blocked += [] if gate["kept"] else [gate["problem"]]
        blocked += [
            f"ResourceQuota {quota['namespace']}/{quota['name']}: {each['text']} {each['remedy']}"
            for quota in inventory.quotas
            for each in quota["problems"]
            if each["code"] not in module.params["accept"]
        ]
    return {"changed": False, "gate": gate, **queries.report(cluster, inventory, plans, blocked)}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
