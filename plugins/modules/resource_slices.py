#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: resource_slices
version_added: 0.1.0
short_description: Publish a pool of devices to Kubernetes as ResourceSlices
description:
  - Publishes, updates, and removes whole pools of devices in the C(resource.k8s.io) API. It is for devices that no node driver publishes, such as
    devices that are connected through a network.
  - Divides a pool into as few ResourceSlices as the limits of the API allow, and writes only ResourceSlices that differ. The module increases the
    generation of the pool if the scheduler could otherwise read a mixture of the previous and the new devices.
  - Rejects a pool that another publisher owns, unless O(force=true).
notes:
  - The kubelet removes the ResourceSlices of a driver that is not registered with it from the node. Set O(node_name) only if a driver with this name
    runs on the node.
  - Requires the permissions to get, list, create, update and delete C(resourceslices) in the API group C(resource.k8s.io).
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
      - With O(validate), the API server also validates the changes in check mode, in a dry run.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  state:
    description:
      - V(present) publishes exactly the devices in the options. V(absent) removes all ResourceSlices of the pool.
    type: str
    default: present
    choices:
      - present
      - absent
  driver:
    description:
      - The name of the driver of these devices, a DNS subdomain in lower case.
    type: str
    required: true
  pool:
    description:
      - The name of the pool. The default is O(node_name).
    type: str
  node_name:
    description:
      - The node to which the devices belong. O(state=present) requires exactly one of O(node_name), O(node_selector), and O(all_nodes).
    type: str
  node_selector:
    description:
      - The nodes that can access the devices, as a Kubernetes node selector with exactly one term.
    type: dict
  all_nodes:
    description:
      - Whether all nodes can access the devices.
    type: bool
    default: false
  devices:
    description:
      - The devices, in the order in which the scheduler allocates them. An empty list publishes one empty ResourceSlice, which shows that the driver
        runs and has no devices.
      - The keys are those of the API's C(Device), in the spelling of the API or in snake case. An attribute can be a string, an integer, or a
        boolean. A capacity or a counter can be a quantity. Keys that are not listed here are passed to the API.
      - Keys that select the nodes of a device (C(nodeName), C(nodeSelector), C(allNodes)) are rejected, because the options of the module select the
        nodes for the whole pool.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: The name of the device, a DNS label. It is unique in the pool.
        type: str
        required: true
      attributes:
        description: The attributes of the device. A version is a dictionary with the key C(version).
        type: dict
      capacity:
        description: The capacities of the device, as quantities or in the form of the API.
        type: dict
      consumes_counters:
        description:
          - The counters that the device consumes, as a list of dictionaries with C(counter_set) and C(counters).
        type: list
        elements: dict
      taints:
        description: The taints of the device, in the form of the API.
        type: list
        elements: dict
      allow_multiple_allocations:
        description: Whether several claims can share the device.
        type: bool
  shared_counters:
    description:
      - The counter sets from which devices consume, each with C(name) and C(counters).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: The name of the counter set, a DNS label. It is unique in the pool.
        type: str
        required: true
      counters:
        description: The counters, as quantities or in the form of the API.
        type: dict
        required: true
  force:
    description:
      - Whether to replace or remove a pool that another publisher owns. If that publisher still runs, both overwrite the ResourceSlices of the other.
    type: bool
    default: false
  validate:
    description:
      - Whether the API server validates all changes in a dry run before the first change. If it rejects one of them, the module changes nothing.
    type: bool
    default: true
seealso:
  - name: Dynamic Resource Allocation
    description: Explains pools, ResourceSlices, and devices.
    link: https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/
"""

EXAMPLES = r"""
- name: Publish two network-attached devices for all nodes
  dra.accelerators.resource_slices:
    kubeconfig: /etc/kubernetes/admin.conf
    driver: fpga.example.com
    pool: shelf-1
    all_nodes: true
    devices:
      - name: fpga-0
        attributes:
          model: VX-2
          lanes: 8
          firmware:
            version: 2.4.1
        capacity:
          memory: 16Gi
      - name: fpga-1
        attributes:
          model: VX-2
          lanes: 8
          firmware:
            version: 2.4.1
        capacity:
          memory: 16Gi

- name: Publish devices that share a board, for the nodes of one rack
  dra.accelerators.resource_slices:
    kubeconfig: /etc/kubernetes/admin.conf
    driver: fpga.example.com
    pool: shelf-2
    node_selector:
      nodeSelectorTerms:
        - matchExpressions:
            - key: topology.example.com/rack
              operator: In
              values:
                - r7
    shared_counters:
      - name: board-0
        counters:
          regions: 4
    devices:
      - name: board-0-half-0
        consumes_counters:
          - counter_set: board-0
            counters:
              regions: 2
      - name: board-0-whole
        consumes_counters:
          - counter_set: board-0
            counters:
              regions: 4

- name: Remove a pool
  dra.accelerators.resource_slices:
    kubeconfig: /etc/kubernetes/admin.conf
    state: absent
    driver: fpga.example.com
    pool: shelf-1
"""

RETURN = r"""
steps:
  description: The completed writes in order. In check mode, the planned writes.
  returned: success, and on failure after the first write
  type: list
  elements: dict
  contains:
    verb:
      description: V(create), V(update) or V(delete).
      type: str
      returned: success
      sample: update
    name:
      description: The name of the ResourceSlice. For a ResourceSlice that does not exist yet, the beginning of the name.
      type: str
      returned: success
      sample: 00000-fpga.example.com-x7k2p
    devices:
      description: The number of devices in the ResourceSlice after the write.
      type: int
      returned: success
      sample: 2
    counter_sets:
      description: The number of counter sets in the ResourceSlice after the write.
      type: int
      returned: success
      sample: 0
pool:
  description: The pool after the run. In check mode, the expected pool.
  returned: success
  type: dict
  contains:
    driver:
      description: The name of the driver.
      type: str
      returned: success
      sample: fpga.example.com
    name:
      description: The name of the pool.
      type: str
      returned: success
      sample: shelf-1
    generation:
      description: The generation of the pool. 0 if the pool is absent.
      type: int
      returned: success
      sample: 2
    slices:
      description: The number of ResourceSlices in the pool.
      type: int
      returned: success
      sample: 1
    devices:
      description: The number of devices in the pool.
      type: int
      returned: success
      sample: 2
resource_slices:
  description: The ResourceSlices of the pool in the API server.
  returned: success, outside check mode
  type: list
  elements: dict
  sample:
    - apiVersion: resource.k8s.io/v1
      kind: ResourceSlice
      metadata: {"name": "00000-fpga.example.com-x7k2p"}
      spec: {"driver": "fpga.example.com", "allNodes": true}
dropped_fields:
  description:
    - Fields that the API server accepted but did not store because a feature gate is disabled, with the probable feature gates. A warning also lists them.
  returned: success
  type: list
  elements: str
  sample: []
error_code:
  description: A stable code for the type of the error.
  returned: failure
  type: str
  sample: foreign-pool
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

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    connect,
    served_version,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.resource_pool import (
    GROUP,
    VERSIONS,
    Pools,
    Published,
    counter_layout,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.resource_slice_spec import pool_spec
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.dra.resource_slices import SEPARATE
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError


def argument_spec() -> dict[str, Any]:
    # The keys of a device are validated later, with the device's name in the error, and then by the API server.
    return {
        **API_OPTIONS,
        "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
        "driver": {"type": "str", "required": True},
        "pool": {"type": "str"},
        "node_name": {"type": "str"},
        "node_selector": {"type": "dict"},
        "all_nodes": {"type": "bool", "default": False},
        "devices": {"type": "list", "elements": "dict", "default": []},
        "shared_counters": {"type": "list", "elements": "dict", "default": []},
        "force": {"type": "bool", "default": False},
        "validate": {"type": "bool", "default": True},
    }


CONSTRAINTS: dict[str, Any] = {
    "required_together": API_REQUIRED_TOGETHER,
    "required_one_of": [("pool", "node_name")],
}


def result(params: dict[str, Any], pool: str, published: Published) -> dict[str, Any]:
    """Return the module's result. No side effects."""
    slices = published.after["slices"]
    return {
        "changed": bool(published.steps),
        "steps": list(published.steps),
        "pool": {
            "driver": params["driver"],
            "name": pool,
            "generation": published.generation,
            "slices": len(slices),
            "devices": sum(len(each.get("devices") or ()) for each in slices),
        },
        "dropped_fields": list(published.dropped),
        "diff": {"before": published.before, "after": published.after},
    }


def apply_pool(api: Api, params: dict[str, Any], pool: str, *, check_mode: bool) -> dict[str, Any]:
    """Publish or remove the pool and return the result."""
    pools = Pools(api, served_version(api, GROUP, VERSIONS))
    flags = {"force": params["force"], "validate": params["validate"], "check_mode": check_mode}
    if params["state"] == "absent":
        published = pools.remove(params["driver"], pool, **flags)
    else:
        published = pools.publish(pool_spec(params, pool, counter_layout(api.request("GET", "/version"))), **flags)
    facts = result(params, pool, published)
    if not check_mode:
        facts["resource_slices"] = pools.find(params["driver"], pool)
    return facts


def work(module: AnsibleModule) -> dict[str, Any]:
    pool = module.params["pool"] or module.params["node_name"]
    if not pool:
        raise AcceleratorError("Neither pool nor node_name is set", hint="Set pool.", code="invalid-node-selection")
    if module.params["state"] == "present":
        # Validate the options before the first request to the API server.
        pool_spec(module.params, pool, SEPARATE)
    facts = apply_pool(connect(module), module.params, pool, check_mode=module.check_mode)
    for field in facts["dropped_fields"]:
        module.warn(f"The API server did not keep {field}.")
    return facts


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
