#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_drain
version_added: 0.1.0
short_description: Drain devices on a node and return them to service
description:
  - Prevents new allocations of the devices with DeviceTaintRules, evicts the pods whose claims hold the devices, and waits until the claims
    have released the devices. The module does not evict other pods and does not change the Node.
  - Pods are evicted with the Eviction API, which respects PodDisruptionBudgets. If a budget does not allow an eviction, or if the API server is overloaded
    or unavailable, the module retries the eviction until O(timeout).
  - Finds the holders of the devices before any change. If a problem prevents the drain, the module fails and changes nothing.
  - The rules have a label with the name of the operation. The same call resumes an interrupted run. O(state=in_service) removes the rules.
notes:
  - The API server must serve DeviceTaintRules. See M(dra.accelerators.device_taint).
  - Requires the permissions to get, list, create, update, and delete C(devicetaintrules), to list C(resourceslices), and to get and list
    C(resourceclaims), all in the API group C(resource.k8s.io), to get C(nodes), to get and list C(pods), and to create C(pods/eviction).
  - A pod's claims are released only after the driver has unprepared them. Pods that are deleted by force are an exception. Modules that
    change devices therefore also check the prepared claims on the node.
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
      - The API server validates the rules in a dry run, which requires the same permissions. The module does not evict pods, and does not wait.
      - RV(problems) contains the problems that prevent the drain. They are an error only without check mode.
  diff_mode:
    support: full
  idempotent:
    support: full
    details:
      - If a run resumes an operation, it updates the timestamp of rules that are more than ten minutes old.
  platform:
    support: full
    platforms: posix
options:
  state:
    description:
      - V(drained) keeps new pods off the devices and waits until no claim holds them.
      - V(in_service) removes the rules of O(operation).
    type: str
    choices:
      - drained
      - in_service
    required: true
  node:
    description: The name of the Node. Required for O(state=drained). If it is not set, O(state=in_service) removes the rules of the operation on all nodes.
    type: str
  operation:
    description:
      - The name of the operation. It is the value of the taint and of the rules' label C(dra.accelerators/drain).
      - Operations with different names do not change each other's rules. A call with the same name and node removes rules for devices that are no longer
        in the request.
    type: str
    default: maintenance
  drivers:
    description: The names of the drivers of the devices. By default, all drivers.
    type: list
    elements: str
    default: []
  devices:
    description: The names of the devices, as in ResourceSlices. If neither O(devices) nor O(claims) is set, all devices of the node.
    type: list
    elements: str
    default: []
  overlapping:
    description:
      - With O(devices), whether to also drain devices that use the same counters and so cannot be allocated at the same time. For a whole GPU
        these are all its partitions.
    type: bool
    default: false
  claims:
    description:
      - Namespaces and names of claims. Only these are drained. If O(devices) is not set, the devices are those that these claims hold on the node.
    type: list
    elements: str
    default: []
  held_claims:
    description:
      - Namespaces and names of the claims that hold devices of the node, from a list of all claims, such as RV(dra.accelerators.cluster_info#module:claims).
        The module reads these by name, and does not list all claims of the cluster. In check mode this reduces the number of requests for many nodes.
      - Without check mode, the module lists all claims at the end to find new claims.
    type: list
    elements: str
  evict:
    description:
      - Whether to evict pods. V(false) waits until the pods have ended.
      - If it is not set and pods use the devices, the module fails and names the pods with their claims.
    type: bool
  evict_unmanaged:
    description: Whether O(evict=true) also evicts pods without a controller. No controller creates replacements for them.
    type: bool
    default: false
  grace_period:
    description: The grace period of evicted pods in seconds. The default is that of each pod.
    type: int
  timeout:
    description:
      - The maximum wait for the release of the devices, in seconds. After that, the module fails and returns the holders with the reasons.
        The rules stay.
    type: int
    default: 900
  published:
    description:
      - Attribute values of the published devices that O(state=in_service) waits for before it removes the rules. Attributes that a device does not have are
        ignored. Numbers in versions can have leading zeros. Requires O(node).
    type: dict
    default: {}
  older_than:
    description:
      - With O(state=in_service), remove only rules that were not created or continued in this number of seconds. This distinguishes rules of an interrupted
        run from those of a run in progress. Set it to more than the duration of a run.
    type: int
    default: 0
  reason:
    description: The reason, as free text. It is stored in the rules' annotation C(dra.accelerators/reason).
    type: str
    default: ""
seealso:
  - module: dra.accelerators.device_taint
  - module: dra.accelerators.claim_info
"""

EXAMPLES = r"""
- name: List the pods to evict before a driver upgrade
  dra.accelerators.device_drain:
    state: drained
    node: gpu-node-1
    evict: true
  check_mode: true
  delegate_to: localhost

- name: Drain all GPUs of a node
  dra.accelerators.device_drain:
    state: drained
    node: gpu-node-1
    operation: driver-580
    drivers: [gpu.nvidia.com]
    evict: true
    timeout: 1800
    reason: The driver is exchanged.
  delegate_to: localhost

- name: Return the GPUs to service when they are published with the new driver version
  dra.accelerators.device_drain:
    state: in_service
    node: gpu-node-1
    operation: driver-580
    published:
      driverVersion: 580.105.08
  delegate_to: localhost

- name: Drain one GPU and its partitions without evictions, and wait until the pods have ended
  dra.accelerators.device_drain:
    state: drained
    node: gpu-node-1
    operation: repartition
    devices: [gpu-3]
    overlapping: true
    evict: false
    timeout: 7200
"""

RETURN = r"""
steps:
  description: The performed writes, one line each. In check mode, the expected writes.
  returned: success, and on failure with RV(error_code=time-is-up)
  type: list
  elements: str
  sample: ["tainted gpu.nvidia.com/gpu-node-1/*", "evicted default/training-0"]
rules:
  description: The rules of the operation. With O(state=in_service), the removed rules.
  returned: success, and on failure with RV(error_code=time-is-up)
  type: list
  elements: dict
  contains: &rule
    name:
      description: The name of the DeviceTaintRule.
      type: str
      returned: success
      sample: dra-accelerators-drain-0f8b1c2d3e4f5a6b
    operation:
      description: The operation of the rule.
      type: str
      returned: success
      sample: driver-580
    node:
      description: The name of the Node.
      type: str
      returned: success
      sample: gpu-node-1
    driver:
      description: The name of the driver.
      type: str
      returned: success
      sample: gpu.nvidia.com
    pool:
      description: The name of the pool.
      type: str
      returned: success
      sample: gpu-node-1
    device:
      description: The name of the device, or empty for all devices of the pool.
      type: str
      returned: success
      sample: ""
    since:
      description: The creation time of the rule.
      type: str
      returned: success
      sample: "2026-11-23T12:00:00Z"
    renewed:
      description: The last time when a later run resumed the operation, or empty if no run did.
      type: str
      returned: success
      sample: ""
other_drains:
  description: The rules of other operations on this node. The module does not change them.
  returned: success, and on failure with RV(error_code=time-is-up)
  type: list
  elements: dict
  contains: *rule
claims:
  description: The claims that held the devices at the start of the run.
  returned: O(state=drained), on success and on failure with RV(error_code=blocked) and RV(error_code=time-is-up)
  type: list
  elements: dict
  contains:
    namespace:
      description: The namespace of the claim.
      type: str
      returned: success
      sample: default
    name:
      description: The name of the claim.
      type: str
      returned: success
      sample: training-0-gpu-x7k2p
    devices:
      description: The drained devices of the claim, as driver, pool, and name.
      type: list
      elements: str
      returned: success
      sample: [gpu.nvidia.com/gpu-node-1/gpu-3]
    pods:
      description: The pods for which the claim was reserved.
      type: list
      elements: str
      returned: success
      sample: [training-0]
    tolerates:
      description: Whether the claim tolerates the taint and can be allocated the devices again.
      type: bool
      returned: success
      sample: false
pods:
  description: The pods with a claim that held one of the devices at the start of the run, without ended pods.
  returned: O(state=drained), on success and on failure with RV(error_code=blocked) and RV(error_code=time-is-up)
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
    uid:
      description: The UID of the pod.
      type: str
      returned: success
      sample: 0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
    claims:
      description: The names of its claims that hold the devices.
      type: list
      elements: str
      returned: success
      sample: [training-0-gpu-x7k2p]
    owner:
      description: The kind and name of the controller that creates a replacement, or empty for a pod without a controller.
      type: str
      returned: success
      sample: StatefulSet/training
    deleting:
      description: Whether the pod was already terminating.
      type: bool
      returned: success
      sample: false
evicted:
  description: The evicted pods, including pods that started during the run. In check mode, the pods to evict.
  returned: success, and on failure with RV(error_code=time-is-up)
  type: list
  elements: str
  sample: [default/training-0]
published:
  description: The drivers and pools of the node with published devices at the last check.
  returned: success with O(state=drained)
  type: list
  elements: str
  sample: [gpu.nvidia.com/gpu-node-1]
waited:
  description: How long the module waited for the release or the publication of the devices, in seconds.
  returned: success
  type: float
  sample: 12.0
blocked:
  description: The holders of devices when O(timeout) expired.
  returned: failure with RV(error_code=time-is-up)
  type: list
  elements: dict
  contains:
    pod:
      description: The namespace and name of the pod, or empty for a claim without a running pod.
      type: str
      returned: always
      sample: default/training-0
    claims:
      description: The claims of the pod.
      type: list
      elements: str
      returned: always
      sample: [training-0-gpu-x7k2p]
    reason:
      description: The reason why the holder still has the devices, if it is known.
      type: str
      returned: always
      sample: "Cannot evict pod as it would violate the pod's disruption budget."
problems:
  description: The problems that prevent the drain, each with C(code), C(text), C(remedy), and C(blocks). Without check mode, they are an error.
  returned: success with O(state=drained), and on failure with RV(error_code=blocked)
  type: list
  elements: dict
  sample:
    - code: no-controller
      text: "These pods have no controller that creates a replacement: default/alone"
      remedy: Delete the pods that are not needed, or allow their eviction (evict_unmanaged) and keep their manifests.
      blocks: true
error_code:
  description: A stable error code, such as V(blocked), V(time-is-up), V(no-device), V(no-node), or V(api-version).
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
from ansible_collections.dra.accelerators.plugins.module_utils._drain.drain_plan import Consent, DrainRequest
from ansible_collections.dra.accelerators.plugins.module_utils._drain.drain_run import (
    Blocked,
    Drainer,
    DrainResult,
    TimeIsUp,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    ApiError,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import fail, run

CONSTRAINTS: dict[str, Any] = {
    "required_together": API_REQUIRED_TOGETHER,
    "required_if": [("state", "drained", ["node"])],
}


def argument_spec() -> dict[str, Any]:
    names: dict[str, Any] = {"type": "list", "elements": "str", "default": []}
    return {
        **API_OPTIONS,
        "state": {"type": "str", "required": True, "choices": ["drained", "in_service"]},
        "node": {"type": "str"},
        "operation": {"type": "str", "default": "maintenance"},
        "drivers": names,
        "devices": names,
        "overlapping": {"type": "bool", "default": False},
        "claims": names,
        "held_claims": {"type": "list", "elements": "str"},
        "evict": {"type": "bool"},
        "evict_unmanaged": {"type": "bool", "default": False},
        "grace_period": {"type": "int"},
        "timeout": {"type": "int", "default": 900},
        "published": {"type": "dict", "default": {}},
        "older_than": {"type": "int", "default": 0},
        "reason": {"type": "str", "default": ""},
    }


def request_of(params: dict[str, Any]) -> DrainRequest:
    """Return the requested drain. No side effects."""
    return DrainRequest(
        node=params["node"] or "",
        operation=params["operation"],
        drivers=tuple(params["drivers"]),
        devices=tuple(params["devices"]),
        overlapping=params["overlapping"],
        claims=tuple(params["claims"]),
        reason=params["reason"],
    )


def string_values(values: dict[str, Any]) -> dict[str, str]:
    """Return attributes as strings, because YAML reads some as numbers. No side effects."""
    return {str(name): str(value) for name, value in values.items()}


def result(done: DrainResult) -> dict[str, Any]:
    """Return the module's result. No side effects."""
    facts: dict[str, Any] = {
        "changed": bool(done.steps),
        "steps": done.steps,
        "rules": done.rules,
        "other_drains": done.others,
        "evicted": done.evicted,
        "waited": round(done.waited, 1),
        "diff": {"before": "", "after": "".join(f"{line}\n" for line in done.steps)},
    }
    if done.plan is not None:
        facts["published"] = done.published
        facts["claims"] = [each.document() for each in done.plan.claims]
        facts["pods"] = [each.document() for each in done.plan.pods]
        facts["problems"] = [each.document() for each in done.plan.problems]
    return facts


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    api = connect(module, retry_seconds=params["timeout"])
    try:
        drainer = Drainer(
            api,
            request_of(params),
            Consent(evict=params["evict"], evict_unmanaged=params["evict_unmanaged"]),
            timeout=params["timeout"],
            grace_period=params["grace_period"],
            dry=module.check_mode,
            held=params["held_claims"],
        )
    except ApiError as error:
        # A server without the rules' API version has no rules to remove.
        if error.code == "api-version" and params["state"] == "in_service":
            return result(DrainResult())
        raise
    try:
        done = (
            drainer.drain()
            if params["state"] == "drained"
            else drainer.return_to_service(string_values(params["published"]), params["older_than"])
        )
    except (Blocked, TimeIsUp) as error:
        fail(module, error, **result(drainer.done))
    return result(done)


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
