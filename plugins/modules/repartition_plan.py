#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: repartition_plan
version_added: 0.1.0
short_description: Say what a new layout of a fleet's devices means for pods, and what is in the way
description:
  - Joins what nodes have said with M(dra.accelerators.device_repartition) with what the cluster knows, and says for each operation which published
    devices nobody may be given meanwhile, which claims and pods have them, and who has to go. All other pods stay as they are.
  - Says what is in the way before anything is touched, and how many nodes can be worked on at a time so that not too much is unavailable.
  - Changes nothing.
notes:
  - Needs the permissions to list C(resourceslices), C(resourceclaims) and C(devicetaintrules) in the API group C(resource.k8s.io), and C(pods).
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
      - This module never changes anything.
  diff_mode:
    support: N/A
    details:
      - This module never changes anything. The diff is that of M(dra.accelerators.device_repartition).
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  nodes:
    description:
      - By the name of each Node, what M(dra.accelerators.device_repartition) has returned there with its state V(planned).
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
      - How many physical devices of a kind may be unavailable at a time over the whole cluster, as a number or a percentage of those that are
        published, rounded up. A kind is a driver and a type of device, which is what the DeviceClasses of this collection tell apart. A GPU of which
        some partitions are closed is one.
      - Devices that are already unavailable are included, because their driver reports a fault, or a DeviceTaintRule of any owner keeps claims off
        them.
    type: str
    default: 25%
  most_nodes:
    description: The maximum number of nodes to process at the same time.
    type: int
    default: 1
  left_after:
    description:
      - After this number of seconds without a change, taint rules of this play on nodes that are not in O(nodes) count as left over. No operation holds
        a device for longer than the default.
    type: int
    default: 21600
seealso:
  - module: dra.accelerators.device_repartition
  - module: dra.accelerators.device_drain
"""

EXAMPLES = r"""
- name: Ask each node
  dra.accelerators.device_repartition:
    layout: "{{ accelerator_node_layout }}"
  register: planned

- name: Say what it means
  dra.accelerators.repartition_plan:
    nodes:
      gpu-node-1: "{{ planned }}"
    evict: true
    max_unavailable: 10%
  register: fleet
  delegate_to: localhost

- name: Show it
  ansible.builtin.debug:
    msg: "{{ fleet.plan.table }}"
"""

RETURN = r"""
plan:
  description: The plan of all nodes.
  returned: success
  type: dict
  contains:
    nodes:
      description:
        - By node what was given, each operation with C(published) (names of devices), C(claims), C(pods) and C(closes) (which physical devices, by kind),
          and C(leftover_rules), the rules that an earlier run has left.
        - What of it is not touched is its C(stays), the number of C(devices), of C(partitions) on these and on others, and the names of the C(claims).
      type: dict
      returned: success
      sample: {}
    evicted:
      description: The pods that have to go, each with C(namespace), C(name), C(uid), C(claims), C(owner) and C(node).
      type: list
      elements: dict
      returned: success
      sample: []
    staying:
      description: All other pods that have devices, as namespace and name.
      type: list
      elements: str
      returned: success
      sample: [team-a/training-0]
    problems:
      description: What a person should know, each with C(code), C(text), C(remedy) and C(blocks).
      type: list
      elements: dict
      returned: success
      sample: []
    blocked:
      description: Those problems that stand in the way, each with what to do about it.
      type: list
      elements: str
      returned: success
      sample: []
    strays:
      description: The rules on other nodes that an earlier run has left, as M(dra.accelerators.device_drain) returns rules.
      type: list
      elements: dict
      returned: success
      sample: []
    at_a_time:
      description: How many nodes can be worked on at a time.
      type: int
      returned: success
      sample: 1
    idle:
      description: The nodes on which there is nothing to do.
      type: list
      elements: str
      returned: success
      sample: [node-2]
    partitions_destroyed:
      description: How many partitions go.
      type: int
      returned: success
      sample: 2
    devices_touched:
      description: How many devices have anything done to them.
      type: int
      returned: success
      sample: 1
    table:
      description: All of it in lines for people.
      type: list
      elements: str
      returned: success
      sample: ["All devices have the layout that is wanted: nothing to do."]
error_code:
  description: A stable word for the kind of the error, such as C(api-version) or C(invalid-limit).
  returned: failure
  type: str
  sample: api-version
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
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._claims_ask import list_claims
from ansible_collections.dra.accelerators.plugins.module_utils._device_drain import (
    MANAGER,
    OPERATION_LABEL,
    Consent,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._repartition_plan import (
    Cluster,
    check_answers,
    is_limit,
    join,
)
from ansible_collections.dra.accelerators.plugins.module_utils._taint_rules import (
    Rules,
    is_ours,
    served_rules,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import devices
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.repartition_record import LONGEST_SECONDS
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


def ask(api: Api, drivers: set[str]) -> Cluster:
    """Ask the cluster for all that a plan needs, each kind of object once. Raises ApiError."""
    claims, slices = list_claims(api, drivers)
    namespaces = sorted(
        {claim["metadata"]["namespace"] for claim in claims if (claim.get("status") or {}).get("reservedFor")}
    )
    pods = [pod for each in namespaces for pod in api.list_all(f"/api/v1/namespaces/{quote(each)}/pods", {})]
    rules = Rules(api, served_rules(api), MANAGER).labelled("")
    return Cluster(devices(slices), claims, pods, [each for each in rules if is_drain(each)], rules)


def is_drain(rule: dict[str, Any]) -> bool:
    """Whether a rule is one of a drain of ours, by its field manager and label; pure."""
    return is_ours(rule, MANAGER) and OPERATION_LABEL in rule["metadata"].get("labels", {})


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    if not is_limit(params["max_unavailable"]):
        raise AcceleratorError(
            f"max_unavailable is {params['max_unavailable']!r}, expected a number from 1 on or a percentage such as 25%",
            code="invalid-limit",
        )
    check_answers(params["nodes"])
    api = connect(module)
    drivers = {one["driver"] for plan in params["nodes"].values() for one in plan["operations"]}
    plan = join(
        params["nodes"],
        ask(api, drivers),
        Consent(params["evict"], params["evict_unmanaged"]),
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
