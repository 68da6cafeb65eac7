#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_plugin_migration
version_added: 0.1.0
short_description: Move a node from a device plugin to claims, or back
description:
  - Does what a move needs of the cluster. Between O(state=closed) and O(state=open) the node's own driver is changed, which the role
    P(dra.accelerators.device_plugin_migration#role) and its playbook do.
  - V(closed) gives the Node a taint, evicts the pods that have devices in the former way, and no others, by the Eviction API, which keeps to
    PodDisruptionBudgets, and keeps the DaemonSets of device plugins off the node that are named in O(plugins).
  - V(open) waits until the node gives its devices away in the new way, and takes the taint away.
  - A node that is there already is left as it is. A run that was cut short is gone on with by the same call.
notes:
  - Needs the permissions to get and patch nodes and their status; to list pods, resourceslices, resourceclaims and deviceclasses; to create
    C(pods/eviction); to list, get and update daemonsets; and with O(state=prepared) and O(state=absent) to create, update and delete
    deviceclasses.
  - Taint, labels and annotation bear names of this collection's own, and are written by the field manager C(dra-accelerators-migration).
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._kubernetes
attributes:
  check_mode:
    support: full
    details:
      - Says which steps are left of the state that is asked for, which pods are in the way and which of them would be evicted. Nothing is waited for.
  diff_mode:
    support: none
    details:
      - The steps say what changes.
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  state:
    description:
      - V(prepared) has a DeviceClass with the name of each resource in C(extendedResourceName) for which there is none, of those that nodes offer
        and pods ask for. Whole GPUs are served by the class C(gpu.nvidia.com), partitions by one for each profile.
      - V(closed) and V(open) are the two halves of a node's move.
      - V(absent) takes away what a move has left for all nodes, where no node is on claims or marked any more.
    type: str
    required: true
    choices:
      - prepared
      - closed
      - open
      - absent
  node:
    description: Name of the Node. Needed for V(closed) and V(open).
    type: str
  direction:
    description: V(forward) is from device plugins to claims, V(back) the other way.
    type: str
    default: forward
    choices:
      - forward
      - back
  plugins:
    description:
      - DaemonSets, as namespace and name, that may be kept off the node. V(*) is for all that serve device plugins there.
      - A DaemonSet that nobody controls gets a requirement in its node affinity by which its pods stay off nodes with the label
        C(dra.accelerators/device-plugin=off). If its update strategy is C(RollingUpdate), its pods on other nodes start again, one after another; pods
        that have devices keep them.
      - One that has a label of its operator's in its node selector (C(nvidia.com/gpu.deploy.device-plugin)) is kept off by that.
    type: list
    elements: str
    default: []
  evict:
    description:
      - Whether pods that have devices in the former way may be evicted. Otherwise the module refuses a node with such pods, and with
        V(no-consent) in O(accept) waits until they have ended.
    type: bool
    default: false
  evict_unmanaged:
    description: Whether that holds for pods without a controller too, of which nobody makes another one.
    type: bool
    default: false
  accept:
    description: Codes of problems that are accepted. M(dra.accelerators.device_plugin_migration_info) has them.
    type: list
    elements: str
    default: []
  back_to:
    description:
      - With O(direction=back), what the node goes back to. V(own) is the device plugin of this collection's node driver, V(foreign) the one that was
        there. V(auto) is what the Node says that it had, and V(own) where it says nothing.
    type: str
    default: auto
    choices:
      - auto
      - own
      - foreign
  timeout:
    description: How long each thing is waited for (pods that go, a plugin that goes or comes, devices that are published), in seconds.
    type: int
    default: 900
  kubelet_root:
    description: The kubelet's root folder.
    type: path
    default: /var/lib/kubelet
seealso:
  - module: dra.accelerators.device_plugin_migration_info
  - module: dra.accelerators.device_class
"""

EXAMPLES = r"""
- name: Have classes for everything that pods ask for
  dra.accelerators.device_plugin_migration:
    state: prepared
  delegate_to: localhost

- name: Take a node out of its device plugin's hands
  dra.accelerators.device_plugin_migration:
    state: closed
    node: gpu-node-1
    plugins: [kube-system/nvidia-device-plugin-daemonset]
    evict: true
    timeout: 1800

- name: Let pods come when its devices are published
  dra.accelerators.device_plugin_migration:
    state: open
    node: gpu-node-1

- name: Say who would have to go if it went back
  dra.accelerators.device_plugin_migration:
    state: closed
    node: gpu-node-1
    direction: back
    evict: true
  check_mode: true
"""

RETURN = r"""
steps:
  description: What was done, or would be in check mode, a line each. What is between the two halves of a move is in neither.
  returned: success
  type: list
  elements: str
  sample: ["gave Node gpu-node-1 the taint dra.accelerators/migration=forward", "evicted default/training-0"]
evicted:
  description: The pods that were evicted, or would be.
  returned: success
  type: list
  elements: str
  sample: [default/training-0]
in_the_way:
  description: The pods that had devices in the former way at the beginning, also those that are not evicted but waited for.
  returned: success
  type: list
  elements: str
  sample: [default/training-0]
settled:
  description: Whether there was nothing to do for this module, so that after a look in check mode no real run is needed.
  returned: success
  type: bool
  sample: false
kind:
  description: Whose device plugin the node has or had, V(own), V(foreign), V(unknown) or V(none).
  returned: success with O(state=closed) and O(state=open)
  type: str
  sample: foreign
problems:
  description: What is in the way, each with C(code), C(text), C(remedy) and C(blocks).
  returned: failure with RV(error_code=blocked)
  type: list
  elements: dict
  sample:
    - {code: plugin-not-named, text: "The DaemonSet a/b serves device plugins on this node.", remedy: Name it in plugins., blocks: true}
pods:
  description: The pods that still had devices when the time was over.
  returned: failure with RV(error_code=time-is-up)
  type: list
  elements: str
  sample: [default/training-0]
error_code:
  description: A stable word for the kind of the error, such as C(blocked), C(time-is-up), C(gate-off) or C(foreign-class).
  returned: failure
  type: str
  sample: blocked
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
from ansible_collections.dra.accelerators.plugins.module_utils import _migration_run as running
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._migration_nodes import (
    AUTO,
    BACK,
    FOREIGN,
    FORWARD,
    OWN,
    Wishes,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run

CONSTRAINTS: dict[str, Any] = {
    "required_together": API_REQUIRED_TOGETHER,
    "required_if": [("state", "closed", ["node"]), ("state", "open", ["node"])],
}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "state": {"type": "str", "required": True, "choices": ["prepared", "closed", "open", "absent"]},
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
        return _result(running.forget(api, dry=module.check_mode))
    if params["state"] == "prepared":
        stock = asking.take_stock(asking.ask(api), direction=params["direction"], kubelet_root=params["kubelet_root"])
        return _result(running.prepare(api, stock.services, dry=module.check_mode))
    wishes = Wishes(
        plugins=tuple(params["plugins"]),
        evict=params["evict"],
        evict_unmanaged=params["evict_unmanaged"],
        accept=frozenset(params["accept"]),
        back_to=params["back_to"],
    )
    mover = running.Mover(
        api,
        params["node"],
        params["direction"],
        wishes,
        kubelet_root=params["kubelet_root"],
        timeout=params["timeout"],
        dry=module.check_mode,
    )
    done = mover.close() if params["state"] == "closed" else mover.open()
    told = {"evicted": done.evicted, "in_the_way": done.in_the_way, "settled": done.settled}
    return {**_result(done.steps), **told, "kind": done.plan.kind if done.plan else ""}


def _result(steps: list[str]) -> dict[str, Any]:
    return {"changed": bool(steps), "steps": steps, "evicted": [], "in_the_way": [], "settled": not steps}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
