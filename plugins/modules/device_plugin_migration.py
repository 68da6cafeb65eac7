#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_plugin_migration
version_added: 0.1.0
short_description: Migrate a node from a device plugin to claims, or back
description:
  - Makes the changes to the cluster for a migration. The role P(dra.accelerators.device_plugin_migration#role) and its playbook change the node's
    driver between O(state=drained) and O(state=in_service).
  - V(drained) adds a taint to the Node, evicts only the pods that use devices in the previous way, and keeps the DaemonSets of device plugins in
    O(plugins) off the node. Evictions use the Eviction API, which respects PodDisruptionBudgets.
  - V(in_service) waits until the node offers its devices in the new way, and removes the taint.
  - The module does not change a node that is already migrated. The same call resumes an interrupted run.
notes:
  - Requires the permissions to get and patch C(nodes) and C(nodes/status), to list C(pods), C(resourceslices), C(resourceclaims), and
    C(deviceclasses), to create C(pods/eviction), and to list, get, and update C(daemonsets). O(state=prepared) and O(state=absent) also require
    the permissions to create, update, and delete C(deviceclasses).
  - The taint, the labels, and the annotation have names of this collection. The field manager is C(dra-accelerators-migration).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
  - dra.accelerators._kubernetes
attributes:
  check_mode:
    support: full
    details:
      - The module returns the remaining steps of O(state), the pods that use devices in the previous way, and the pods to evict. It does not wait.
  diff_mode:
    support: none
    details:
      - RV(steps) contains the changes.
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  state:
    description:
      - V(prepared) creates a DeviceClass for each device plugin resource that nodes offer or pods request, unless a class already has the resource
        in C(extendedResourceName). The class C(gpu.nvidia.com) serves whole GPUs. Partitions have one class for each profile.
      - V(drained) prepares a node for the change of its driver. V(in_service) completes the migration after this change.
      - V(absent) removes the migration's changes to the DaemonSets and its DeviceClasses. It does not remove the DaemonSet changes while a node
        has the label C(dra.accelerators/device-plugin=off), and the classes while a node publishes devices for claims.
    type: str
    required: true
    choices:
      - prepared
      - drained
      - in_service
      - absent
  node:
    description: The name of the Node. Required for O(state=drained) and O(state=in_service).
    type: str
  direction:
    description: V(forward) migrates from a device plugin to claims. V(back) migrates from claims to a device plugin.
    type: str
    default: forward
    choices:
      - forward
      - back
  plugins:
    description:
      - The DaemonSets, as C(namespace/name), that the module can keep off the node. V(*) allows all DaemonSets that serve device plugins there.
      - If a DaemonSet has no owner, the module adds a requirement to its node affinity that excludes nodes with the label
        C(dra.accelerators/device-plugin=off). With the update strategy C(RollingUpdate), its pods on other nodes restart one after another. Pods
        with devices keep them.
      - If a DaemonSet has a label of its operator in its node selector (C(nvidia.com/gpu.deploy.device-plugin)), the module sets this label on
        the Node instead.
    type: list
    elements: str
    default: []
  evict:
    description:
      - Whether to evict pods that use devices in the previous way. With V(false), the module rejects a node with such pods. With
        V(no-consent) in O(accept), it waits until these pods have ended.
    type: bool
    default: false
  evict_unmanaged:
    description: Whether O(evict=true) also evicts pods without a controller. No controller creates replacements for them.
    type: bool
    default: false
  accept:
    description: The codes of problems to accept. M(dra.accelerators.device_plugin_migration_info) returns the problems.
    type: list
    elements: str
    default: []
  back_to:
    description:
      - With O(direction=back), the device plugin for the node. V(own) is the device plugin of this collection's node driver. V(foreign) is the
        device plugin that the node had before. V(auto) selects V(foreign) if the Node has or had another device plugin, otherwise V(own).
    type: str
    default: auto
    choices:
      - auto
      - own
      - foreign
  timeout:
    description: The maximum wait for each state, in seconds. States are the end of pods, the stop or the start of a plugin, and the publication of devices.
    type: int
    default: 900
  kubelet_root:
    description: The kubelet's root directory.
    type: path
    default: /var/lib/kubelet
seealso:
  - module: dra.accelerators.device_plugin_migration_info
  - module: dra.accelerators.device_class
"""

EXAMPLES = r"""
- name: Create DeviceClasses for the requested resources
  dra.accelerators.device_plugin_migration:
    state: prepared
  delegate_to: localhost

- name: Evict pods with devices and keep the device plugin off the node
  dra.accelerators.device_plugin_migration:
    state: drained
    node: gpu-node-1
    plugins: [kube-system/nvidia-device-plugin-daemonset]
    evict: true
    timeout: 1800

- name: Allow pods on the node when its devices are published for claims
  dra.accelerators.device_plugin_migration:
    state: in_service
    node: gpu-node-1

- name: List the pods to evict before the node migrates back
  dra.accelerators.device_plugin_migration:
    state: drained
    node: gpu-node-1
    direction: back
    evict: true
  check_mode: true
"""

RETURN = r"""
steps:
  description: The performed changes, one line each. In check mode, the expected changes. The change of the node's driver is not included.
  returned: success
  type: list
  elements: str
  sample: ["added the taint dra.accelerators/migration=forward to Node gpu-node-1", "evicted default/training-0"]
evicted:
  description: The evicted pods. In check mode, the pods to evict.
  returned: success
  type: list
  elements: str
  sample: [default/training-0]
blocked_by:
  description: The pods that used devices in the previous way at the start of the run, including pods that the module does not evict.
  returned: success
  type: list
  elements: str
  sample: [default/training-0]
up_to_date:
  description: Whether the module had nothing to change and nothing to wait for. If it is true in check mode, a run without check mode is not necessary.
  returned: success
  type: bool
  sample: false
kind:
  description: The device plugin that the node has or had, V(own), V(foreign), V(unknown), or V(none).
  returned: success with O(state=drained) and O(state=in_service)
  type: str
  sample: foreign
problems:
  description: The problems that prevent the migration, each with C(code), C(text), C(remedy), and C(blocks).
  returned: failure with RV(error_code=blocked)
  type: list
  elements: dict
  sample:
    - {code: plugin-not-named, text: "The DaemonSet a/b serves device plugins on this node.", remedy: Add it to plugins., blocks: true}
pods:
  description: The pods that still had devices when O(timeout) expired.
  returned: failure with RV(error_code=time-is-up)
  type: list
  elements: str
  sample: [default/training-0]
error_code:
  description: A stable error code, such as V(blocked), V(time-is-up), V(gate-off), or V(foreign-class).
  returned: failure
  type: str
  sample: blocked
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
from ansible_collections.dra.accelerators.plugins.module_utils._migration import node_run, queries
from ansible_collections.dra.accelerators.plugins.module_utils._migration.node_plan import (
    AUTO,
    BACK,
    FOREIGN,
    FORWARD,
    OWN,
    MigrationOptions,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

CONSTRAINTS: dict[str, Any] = {
    "required_together": API_REQUIRED_TOGETHER,
    "required_if": [("state", "drained", ["node"]), ("state", "in_service", ["node"])],
}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "state": {"type": "str", "required": True, "choices": ["prepared", "drained", "in_service", "absent"]},
        "node": {"type": "str"},
        "direction": {"type": "str", "default": FORWARD, "choices": [FORWARD, BACK]},
        "plugins": {"type": "list", "elements": "str", "default": []},
        "evict": {"type": "bool", "default": False},
        "evict_unmanaged": {"type": "bool", "default": False},
        "accept": {"type": "list", "elements": "str", "default": []},
        "back_to": {"type": "str", "default": AUTO, "choices": [AUTO, OWN, FOREIGN]},
        "timeout": {"type": "int", "default": 900},
        "kubelet_root": {"type": "path", "default": "/var/lib/kubelet"},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    api = connect(module, retry_seconds=params["timeout"])
    if params["state"] == "absent":
        return _result(node_run.remove_shared_objects(api, dry=module.check_mode))
    if params["state"] == "prepared":
        cluster = queries.read_cluster(api)
        inventory = queries.build_inventory(cluster, direction=params["direction"], kubelet_root=params["kubelet_root"])
        return _result(node_run.prepare(api, inventory.services, dry=module.check_mode))
    options = MigrationOptions(
        plugins=tuple(params["plugins"]),
        evict=params["evict"],
        evict_unmanaged=params["evict_unmanaged"],
        accept=frozenset(params["accept"]),
        back_to=params["back_to"],
    )
    migration = node_run.NodeMigration(
        api,
        params["node"],
        params["direction"],
        options,
        kubelet_root=params["kubelet_root"],
        timeout=params["timeout"],
        dry=module.check_mode,
    )
    done = migration.drain() if params["state"] == "drained" else migration.return_to_service()
    outcome = {"evicted": done.evicted, "blocked_by": done.blocked_by, "up_to_date": done.up_to_date}
    return {**_result(done.steps), **outcome, "kind": done.plan.kind if done.plan else ""}


def _result(steps: list[str]) -> dict[str, Any]:
    return {"changed": bool(steps), "steps": steps, "evicted": [], "blocked_by": [], "up_to_date": not steps}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
