#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_plugin_migration_info
version_added: 0.1.0
short_description: Show what a move from device plugins to claims means for a cluster
description:
  - Finds pods, workloads, quotas and limit ranges that ask for accelerators by the resources of device plugins (C(nvidia.com/gpu),
    C(nvidia.com/mig-1g.10gb), C(huawei.com/Ascend910) and so on), and says what becomes of each.
  - Finds the device plugins themselves, by what they are. They are DaemonSets whose pods have the kubelet's folder C(device-plugins).
  - For each node, says which steps are left to move it, which pods would be evicted, and what is in the way.
  - Names of a vendor's domain that are none of its device plugin's, such as those of network adapters, are not looked at.
notes:
  - Needs the permissions to list nodes, pods, resourcequotas, limitranges, replicationcontrollers, deployments, statefulsets, daemonsets,
    replicasets, jobs, cronjobs, deviceclasses, resourceslices and resourceclaims in all namespaces. To learn whether the API server keeps
    the extended resource of a class, it needs to create deviceclasses; that is a dry run, and nothing is stored.
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
    description: Names of the nodes for which there are to be plans. Without any, all that have something to do with it.
    type: list
    elements: str
    default: []
  direction:
    description: V(forward) is from device plugins to claims, V(back) the other way.
    type: str
    default: forward
    choices:
      - forward
      - back
  plugins:
    description:
      - DaemonSets, as namespace and name, that may be kept off nodes. V(*) is for all that are found.
    type: list
    elements: str
    default: []
  evict:
    description: Whether pods that have devices in the former way may be evicted.
    type: bool
    default: false
  evict_unmanaged:
    description: Whether that holds for pods without a controller too, of which nobody makes another one.
    type: bool
    default: false
  accept:
    description: Codes of problems that are accepted; see RV(nodes).
    type: list
    elements: str
    default: []
  back_to:
    description:
      - With O(direction=back), what nodes go back to. V(own) is the device plugin of this collection's node driver, V(foreign) the one that was
        there. V(auto) is what the Node says that it had, and V(own) where it says nothing.
    type: str
    default: auto
    choices:
      - auto
      - own
      - foreign
  kubelet_root:
    description: The kubelets' root folder.
    type: path
    default: /var/lib/kubelet
seealso:
  - module: dra.accelerators.device_plugin_migration
  - module: dra.accelerators.claim_info
"""

EXAMPLES = r"""
- name: See what a move to claims means
  dra.accelerators.device_plugin_migration_info:
  delegate_to: localhost

- name: See what is in the way of two nodes whose device plugin may go, and whose pods may be evicted
  dra.accelerators.device_plugin_migration_info:
    nodes: [gpu-node-1, gpu-node-2]
    plugins: [gpu-operator/nvidia-device-plugin-daemonset]
    evict: true
  register: move

- name: See who would have to go if a node went back
  dra.accelerators.device_plugin_migration_info:
    nodes: [gpu-node-1]
    direction: back
"""

RETURN = r"""
pods:
  description: The pods that ask for resources of device plugins, each once.
  returned: success
  type: list
  elements: dict
  contains:
    namespace:
      description: Its namespace.
      type: str
      returned: success
      sample: default
    name:
      description: Its name.
      type: str
      returned: success
      sample: training-0
    node:
      description: The node that it is on; empty while it is on none.
      type: str
      returned: success
      sample: gpu-node-1
    way:
      description: How it has them. V(plugin), V(claims), V(waits) for a node, or V(done).
      type: str
      returned: success
      sample: plugin
    owner:
      description: Who makes another one when it goes; empty where nobody does.
      type: str
      returned: success
      sample: Deployment/training
    resources:
      description: What it asks for.
      type: dict
      returned: success
      sample: {"nvidia.com/gpu": 2}
    becomes:
      description: What becomes of each resource.
      type: dict
      returned: success
      sample: {"nvidia.com/gpu": "the same name in the pod; the DeviceClass gpu.nvidia.com serves it, which is there"}
    problems:
      description: What a person should know, each with C(code), C(text), C(remedy) and C(blocks).
      type: list
      elements: dict
      returned: success
      sample: []
workloads:
  description: Deployments, StatefulSets, DaemonSets, ReplicaSets, ReplicationControllers, Jobs and CronJobs whose pods ask for such resources.
  returned: success
  type: list
  elements: dict
  sample:
    - {kind: Deployment, namespace: default, name: training, replicas: 2, resources: {"nvidia.com/gpu": 1}, becomes: {}, problems: []}
quotas:
  description: ResourceQuotas that count devices or claims, entry by entry, with what each counts from then on.
  returned: success
  type: list
  elements: dict
  sample:
    - {namespace: default, name: gpus, entries: [{entry: requests.nvidia.com/gpu, hard: "4", used: "2", becomes: stays}], problems: []}
limit_ranges:
  description: LimitRanges that limit such resources.
  returned: success
  type: list
  elements: dict
  sample: []
resources:
  description: What serves each resource by claims, the C(device_class), whether that C(exists), and the same in words (C(becomes)).
  returned: success
  type: dict
  sample: {"nvidia.com/mig-1g.10gb": {"device_class": "mig-1g.10gb.nvidia.com", "exists": false, "becomes": "a class is written"}}
plugins:
  description:
    - DaemonSets that serve device plugins, with the C(nodes) where they have a pod, whether they are C(ours), and the C(way) they are kept off
      a node (C(affinity), a C(label) that their operator knows, or none because their C(owner) would undo it).
  returned: success
  type: list
  elements: dict
  sample:
    - {namespace: kube-system, name: nvidia-device-plugin, ours: false, nodes: [gpu-node-1], way: affinity, label: "", owner: "", kept_off: false}
nodes:
  description:
    - By node, what it is (C(kind), C(own) or C(foreign) for whose device plugin it has), whether it is C(done), the C(steps) that are left, with
      their C(pods), and the C(problems), of which those that C(blocks) have to be done away with or accepted by their C(code).
  returned: success
  type: dict
  sample: {"gpu-node-1": {"kind": "foreign", "done": false, "steps": [], "problems": []}}
blocked:
  description: Everything that is in the way, a line each.
  returned: success
  type: list
  elements: str
  sample: []
leftovers:
  description: What runs have left that were cut short.
  returned: success
  type: list
  elements: str
  sample: []
gate:
  description: Whether the API server keeps the extended resource of a class (C(kept)), and why not (C(problem)).
  returned: success
  type: dict
  sample: {"kept": true, "problem": ""}
counts:
  description: How many pods ask for such resources, and how many have them by a plugin and by claims.
  returned: success
  type: dict
  sample: {"pods": 3, "by_plugin": 2, "by_claims": 0}
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: api-error
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
from ansible_collections.dra.accelerators.plugins.module_utils import _migration_ask as asking
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._migration_inventory import Inventory
from ansible_collections.dra.accelerators.plugins.module_utils._migration_nodes import (
    AUTO,
    BACK,
    FOREIGN,
    FORWARD,
    OWN,
    Plan,
    Wishes,
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


def plans_of(found: asking.Cluster, params: dict[str, Any]) -> tuple[Inventory, dict[str, Plan]]:
    """Return what there is, and a plan for each node that is asked for; pure."""
    root, direction = params["kubelet_root"], params["direction"]
    stock = asking.take_stock(found, direction=direction, kubelet_root=root)
    wishes = Wishes(
        plugins=tuple(params["plugins"]),
        evict=params["evict"],
        evict_unmanaged=params["evict_unmanaged"],
        accept=frozenset(params["accept"]),
        back_to=params["back_to"],
    )
    names = params["nodes"] or [str(each["metadata"]["name"]) for each in found.nodes]
    known = [
        f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found.workloads.get("DaemonSet", ())
    ]
    made = {
        name: plan(view, direction, wishes, stock.services, known)
        for name, view in asking.views(found, stock, names, root).items()
    }
    if not params["nodes"]:
        made = {name: each for name, each in made.items() if each.steps or each.kind != "none"}
    return stock, made


def work(module: AnsibleModule) -> dict[str, Any]:
    api = connect(module)
    found = asking.ask(api)
    stock, made = plans_of(found, module.params)
    gate = asking.gate_is_on(api)
    blocked = [f"{name}: {each.text} {each.remedy}".strip() for name, one in made.items() for each in one.blocks]
    forward = module.params["direction"] == FORWARD
    if forward and any(one.steps for one in made.values()):
        blocked += [] if gate["kept"] else [gate["problem"]]
        for quota in stock.quotas:
            accepted = module.params["accept"]
            full = [each for each in quota["problems"] if each["code"] not in accepted]
            blocked += [
                f"ResourceQuota {quota['namespace']}/{quota['name']}: {each['text']} {each['remedy']}" for each in full
            ]
    return {"changed": False, "gate": gate, **asking.report(found, stock, made, blocked)}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
