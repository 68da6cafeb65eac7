#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: repartition_plan
version_added: 0.1.0
short_description: Plan a new device layout of a fleet, and list the affected pods and the blockers
description:
  - Combines the plans of the nodes from M(dra.accelerators.device_repartition) with the state of the cluster. For each operation, it returns the
    published devices that must not be allocated, the claims and pods that use them, and the pods to evict. All other pods continue.
  - Reports all blockers before any change. Also returns how many nodes can be processed at the same time within O(max_unavailable).
  - Changes nothing.
notes:
  - Requires the permissions to list C(resourceslices), C(resourceclaims) and C(devicetaintrules) in the API group C(resource.k8s.io), and C(pods).
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
      - The module changes nothing, with and without check mode.
  diff_mode:
    support: N/A
    details:
      - This module never changes anything. M(dra.accelerators.device_repartition) returns the diff.
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  nodes:
    description:
      - The result of M(dra.accelerators.device_repartition) with the state V(planned), by the name of each Node.
    type: dict
    required: true
  evict:
    description:
      - Whether to evict pods. V(false) waits until the pods have ended. If it is not set, a plan that needs evictions is blocked.
    type: bool
  evict_unmanaged:
    description: Whether O(evict=true) also evicts pods without a controller. No controller creates replacements for them.
    type: bool
    default: false
  max_unavailable:
    description:
      - The maximum number of unavailable physical devices of each kind in the whole cluster, as a number or a percentage of the published devices,
        rounded up. A kind is a driver and a device type, as in the DeviceClasses of this collection. A GPU with unavailable partitions counts once.
      - Devices that are already unavailable are included. Their driver reports a fault, or a DeviceTaintRule of any owner prevents their allocation.
    type: str
    default: 25%
  most_nodes:
    description: The maximum number of nodes to process at the same time.
    type: int
    default: 1
  left_after:
    description:
      - The age in seconds from which taint rules of this play on nodes that are not in O(nodes) are reported in RV(plan.strays), because an
        interrupted run has left them. No operation holds a device for longer than the default.
    type: int
    default: 21600
seealso:
  - module: dra.accelerators.device_repartition
  - module: dra.accelerators.device_drain
"""

EXAMPLES = r"""
- name: Plan the operations of each node
  dra.accelerators.device_repartition:
    layout: "{{ accelerator_node_layout }}"
  register: planned

- name: Plan the operations of the fleet
  dra.accelerators.repartition_plan:
    nodes:
      gpu-node-1: "{{ planned }}"
    evict: true
    max_unavailable: 10%
  register: fleet
  delegate_to: localhost

- name: Show the plan
  ansible.builtin.debug:
    msg: "{{ fleet.plan.table }}"
"""

RETURN = r"""
plan:
  description: The plan for all nodes.
  returned: success
  type: dict
  contains:
    nodes:
      description:
        - The plans in O(nodes), by node. Each operation also has C(published) (names of devices), C(claims), C(pods), and C(closes) (the physical
          devices, by kind). C(leftover_rules) are the taint rules that an earlier run left.
        - C(stays) describes the unchanged part of the node, with the number of unchanged C(devices), the number of unchanged C(partitions) on all
          devices, and the names of the C(claims).
      type: dict
      returned: success
      sample: {}
    evicted:
      description: The pods to evict, each with C(namespace), C(name), C(uid), C(claims), C(owner), and C(node).
      type: list
      elements: dict
      returned: success
      sample: []
    staying:
      description: All other pods that use devices, as namespace and name.
      type: list
      elements: str
      returned: success
      sample: [team-a/training-0]
    problems:
      description: The problems of the plan, each with C(code), C(text), C(remedy), and C(blocks).
      type: list
      elements: dict
      returned: success
      sample: []
    blocked:
      description: The problems that block the plan, each with its remedy.
      type: list
      elements: str
      returned: success
      sample: []
    strays:
      description: The taint rules on other nodes that an earlier run left, in the form of M(dra.accelerators.device_drain).
      type: list
      elements: dict
      returned: success
      sample: []
    at_a_time:
      description: The number of nodes that can be processed at the same time.
      type: int
      returned: success
      sample: 1
    idle:
      description: The nodes without any operation.
      type: list
      elements: str
      returned: success
      sample: [node-2]
    partitions_destroyed:
      description: The number of partitions to delete.
      type: int
      returned: success
      sample: 2
    devices_touched:
      description: The number of devices that change.
      type: int
      returned: success
      sample: 1
    table:
      description: The plan as lines of text.
      type: list
      elements: str
      returned: success
      sample: ["All devices have the desired layout: nothing to do."]
error_code:
  description: A stable code for the type of the error, such as C(api-version) or C(invalid-limit).
  returned: failure
  type: str
  sample: api-version
status:
  description: The HTTP status of a request that the API server rejected. 0 if the API server was not reached.
  returned: failure of a request
  type: int
  sample: 403
reason:
  description: The reason that the API server reports for the rejection.
  returned: failure of a request
  type: str
  sample: Forbidden
"""

from typing import Any
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._drain.drain_plan import (
    MANAGER,
    OPERATION_LABEL,
    Consent,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.claim_reader import list_claims
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    connect,
    without_managed_fields,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.taint_rules import (
    Rules,
    is_ours,
    served_rules,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.repartition_fleet import (
    Cluster,
    check_plans,
    fleet_plan,
    is_limit,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import devices
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition.record import LONGEST_SECONDS
from ansible_collections.dra.accelerators.plugins.module_utils.core.times import now_text

CONSTRAINTS: dict[str, Any] = {"required_together": API_REQUIRED_TOGETHER}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "nodes": {"type": "dict", "required": True},
        "evict": {"type": "bool"},
        "evict_unmanaged": {"type": "bool", "default": False},
        "max_unavailable": {"type": "str", "default": "25%"},
        "most_nodes": {"type": "int", "default": 1},
        "left_after": {"type": "int", "default": int(LONGEST_SECONDS)},
    }


def read_cluster(api: Api, drivers: set[str]) -> Cluster:
    """Read all objects that a plan needs from the cluster, each kind once. Raises ApiError."""
    claims, slices = list_claims(api, drivers)
    namespaces = sorted(
        {claim["metadata"]["namespace"] for claim in claims if (claim.get("status") or {}).get("reservedFor")}
    )
    pods = [
        pod
        for each in namespaces
        for pod in api.list_all(f"/api/v1/namespaces/{quote(each)}/pods", {}, without_managed_fields)
    ]
    rules = Rules(api, served_rules(api), MANAGER).labelled("")
    return Cluster(devices(slices), claims, pods, [each for each in rules if is_drain(each)], rules)


def is_drain(rule: dict[str, Any]) -> bool:
    """Return whether a rule belongs to a drain of this collection, by its field manager and label. No side effects."""
    return is_ours(rule, MANAGER) and OPERATION_LABEL in rule["metadata"].get("labels", {})


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    if not is_limit(params["max_unavailable"]):
        raise AcceleratorError(
            f"max_unavailable is {params['max_unavailable']!r}, expected a number of at least 1, or a percentage such as 25%",
            code="invalid-limit",
        )
    check_plans(params["nodes"])
    api = connect(module)
    drivers = {one["driver"] for plan in params["nodes"].values() for one in plan["operations"]}
    plan = fleet_plan(
        params["nodes"],
        read_cluster(api, drivers),
        Consent(evict=params["evict"], evict_unmanaged=params["evict_unmanaged"]),
        params["max_unavailable"],
        max(params["most_nodes"], 1),
        now=now_text(),
        left_after=params["left_after"],
    )
    return {"changed": False, "plan": plan}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
