#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_drain
version_added: 0.1.0
short_description: Have nobody on devices of a node, by the claims that hold them, and open them again
description:
  - Keeps new claims off devices by DeviceTaintRules, evicts exactly the pods whose claims hold these devices, and waits until the claims have
    given them back. A pod that holds none of them is not touched, and nor is the Node.
  - Pods are evicted with the Eviction API, which respects PodDisruptionBudgets. If a budget does not allow an eviction, or if the API server is overloaded
    or unavailable, the module retries the eviction until O(timeout).
  - Says who would have to go before anything is touched, and does nothing where something is in the way.
  - The rules bear the operation that they are of. A run that was cut short is gone on with by the same call, and O(state=open) lifts them.
notes:
  - The API server has to serve DeviceTaintRules, see M(dra.accelerators.device_taint).
  - Needs the permissions to get, list, create, update and delete C(devicetaintrules), to list C(resourceslices), and to get and list
    C(resourceclaims), all in the API group C(resource.k8s.io), to get C(nodes), to get and list C(pods), and to create C(pods/eviction).
  - A kubelet lets the claims of a pod go when the driver has unprepared them, so that a claim that is given back is unprepared. Pods that somebody
    deletes by force are the exception; modules that change devices on the node look there as well.
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
      - The API server validates the rules in a dry run, which requires the same permissions. The module does not evict pods, and does not wait.
      - What is in the way is returned and no failure. A real run refuses then.
  diff_mode:
    support: full
  idempotent:
    support: full
    details:
      - A rule whose last sign of life is more than ten minutes old gets a new one when a run goes on with it.
  platform:
    support: full
    platforms: posix
options:
  state:
    description:
      - V(drained) keeps new pods off the devices and waits until no claim holds them.
      - V(open) removes the rules of O(operation).
    type: str
    choices:
      - drained
      - open
    required: true
  node:
    description: The name of the Node. Required for O(state=drained). If it is not set, O(state=open) removes the rules of the operation on all nodes.
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
      - How long to wait for the release of the devices, in seconds. After that the module fails, and names the holders and the reasons. The rules stay.
    type: int
    default: 900
  published:
    description:
      - Attribute values of the published devices that O(state=open) waits for before it removes the rules. Attributes that a device does not have are
        ignored. Numbers in versions can have leading zeros. Requires O(node).
    type: dict
    default: {}
  older_than:
    description:
      - With O(state=open), remove only rules that were not created or continued in this number of seconds. This distinguishes rules of an interrupted
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
- name: Say who would have to go for a new driver
  dra.accelerators.device_drain:
    state: drained
    node: gpu-node-1
    evict: true
  check_mode: true
  delegate_to: localhost

- name: Have nobody on the GPUs of a node
  dra.accelerators.device_drain:
    state: drained
    node: gpu-node-1
    operation: driver-580
    drivers: [gpu.nvidia.com]
    evict: true
    timeout: 1800
    reason: The driver is exchanged.
  delegate_to: localhost

- name: Let pods come again
  dra.accelerators.device_drain:
    state: open
    node: gpu-node-1
    operation: driver-580
    published:
      driverVersion: 580.105.08
  delegate_to: localhost

- name: Have nobody on one GPU and its partitions, and wait until pods have ended by themselves
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
  description: What was done, or would be in check mode, a line for each write.
  returned: success, and on failure with RV(error_code=time-is-up)
  type: list
  elements: str
  sample: ["tainted gpu.nvidia.com/gpu-node-1/*", "evicted default/training-0"]
rules:
  description: The rules of the operation; with O(state=open) those that were lifted.
  returned: success, and on failure with RV(error_code=time-is-up)
  type: list
  elements: dict
  contains: &rule
    name:
      description: Name of the DeviceTaintRule.
      type: str
      returned: success
      sample: dra-accelerators-drain-0f8b1c2d3e4f5a6b
    operation:
      description: The operation that it is of.
      type: str
      returned: success
      sample: driver-580
    node:
      description: The Node.
      type: str
      returned: success
      sample: gpu-node-1
    driver:
      description: The driver.
      type: str
      returned: success
      sample: gpu.nvidia.com
    pool:
      description: The pool.
      type: str
      returned: success
      sample: gpu-node-1
    device:
      description: The device; empty for all of the pool.
      type: str
      returned: success
      sample: ""
    since:
      description: Since when it is there.
      type: str
      returned: success
      sample: "2026-11-23T12:00:00Z"
    renewed:
      description: When a later run has gone on with it; empty where none has.
      type: str
      returned: success
      sample: ""
other_drains:
  description: Rules of other operations on this node, which were left alone.
  returned: success, and on failure with RV(error_code=time-is-up)
  type: list
  elements: dict
  contains: *rule
claims:
  description: The claims that held the devices at the first look.
  returned: O(state=drained), on success and on failure with RV(error_code=blocked) and RV(error_code=time-is-up)
  type: list
  elements: dict
  contains:
    namespace:
      description: Namespace of the claim.
      type: str
      returned: success
      sample: default
    name:
      description: Name of the claim.
      type: str
      returned: success
      sample: training-0-gpu-x7k2p
    devices:
      description: Those of its devices that are drained, as driver, pool and name.
      type: list
      elements: str
      returned: success
      sample: [gpu.nvidia.com/gpu-node-1/gpu-3]
    pods:
      description: The pods that it was reserved for.
      type: list
      elements: str
      returned: success
      sample: [training-0]
    tolerates:
      description: Whether it tolerates the taint, so that it can get the devices again.
      type: bool
      returned: success
      sample: false
pods:
  description: The pods that had not ended at the first look, and had a claim that holds one of the devices.
  returned: O(state=drained), on success and on failure with RV(error_code=blocked) and RV(error_code=time-is-up)
  type: list
  elements: dict
  contains:
    namespace:
      description: Namespace of the pod.
      type: str
      returned: success
      sample: default
    name:
      description: Name of the pod.
      type: str
      returned: success
      sample: training-0
    uid:
      description: Its UID.
      type: str
      returned: success
      sample: 0a7f6a1e-52ae-41de-9a3b-3f2f6c1f0e55
    claims:
      description: Names of its claims that hold devices.
      type: list
      elements: str
      returned: success
      sample: [training-0-gpu-x7k2p]
    owner:
      description: Kind and name of what makes another one when it goes; empty for nothing.
      type: str
      returned: success
      sample: StatefulSet/training
    deleting:
      description: Whether it was ending already.
      type: bool
      returned: success
      sample: false
evicted:
  description: The pods that were evicted, or would be, those included that came in between.
  returned: success, and on failure with RV(error_code=time-is-up)
  type: list
  elements: str
  sample: [default/training-0]
published:
  description: The drivers and pools of the node of which devices were published at the last look.
  returned: success with O(state=drained)
  type: list
  elements: str
  sample: [gpu.nvidia.com/gpu-node-1]
waited:
  description: How long it was waited until nobody had the devices, or until they were published, in seconds.
  returned: success
  type: float
  sample: 12.0
blocked:
  description: Who still had devices when the time was over.
  returned: failure with RV(error_code=time-is-up)
  type: list
  elements: dict
  contains:
    pod:
      description: Namespace and name of the pod; empty for a claim that no pod that runs has.
      type: str
      returned: always
      sample: default/training-0
    claims:
      description: Its claims.
      type: list
      elements: str
      returned: always
      sample: [training-0-gpu-x7k2p]
    reason:
      description: Why it is still there, as far as that is known.
      type: str
      returned: always
      sample: "Cannot evict pod as it would violate the pod's disruption budget."
problems:
  description: What is in the way, each with C(code), C(text), C(remedy) and C(blocks). A real run fails then, and has changed nothing.
  returned: success with O(state=drained), and on failure with RV(error_code=blocked)
  type: list
  elements: dict
  sample:
    - {code: no-controller, text: "default/alone: no controller makes another pod.", remedy: Delete what is not needed., blocks: true}
error_code:
  description: A stable word for the kind of the error, such as C(blocked), C(time-is-up), C(no-device), C(no-node) or C(api-version).
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
from ansible_collections.dra.accelerators.plugins.module_utils._device_drain import Asked, Consent
from ansible_collections.dra.accelerators.plugins.module_utils._device_drain_run import Blocked, Done, Drainer, TimeIsUp
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
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
        "state": {"type": "str", "required": True, "choices": ["drained", "open"]},
        "node": {"type": "str"},
        "operation": {"type": "str", "default": "maintenance"},
        "drivers": names,
        "devices": names,
        "overlapping": {"type": "bool", "default": False},
        "claims": names,
        "evict": {"type": "bool"},
        "evict_unmanaged": {"type": "bool", "default": False},
        "grace_period": {"type": "int"},
        "timeout": {"type": "int", "default": 900},
        "published": {"type": "dict", "default": {}},
        "older_than": {"type": "int", "default": 0},
        "reason": {"type": "str", "default": ""},
    }


def asked_of(params: dict[str, Any]) -> Asked:
    """Return what is asked for; pure."""
    return Asked(
        node=params["node"] or "",
        operation=params["operation"],
        drivers=tuple(params["drivers"]),
        devices=tuple(params["devices"]),
        overlapping=params["overlapping"],
        claims=tuple(params["claims"]),
        reason=params["reason"],
    )


def texts(values: dict[str, Any]) -> dict[str, str]:
    """Return attributes as texts, as YAML reads some as numbers; pure."""
    return {str(name): str(value) for name, value in values.items()}


def result(done: Done) -> dict[str, Any]:
    """Return what the module says; pure."""
    answer: dict[str, Any] = {
        "changed": bool(done.steps),
        "steps": done.steps,
        "rules": done.rules,
        "other_drains": done.others,
        "evicted": done.evicted,
        "waited": round(done.waited, 1),
        "diff": {"before": "", "after": "".join(f"{line}\n" for line in done.steps)},
    }
    if done.plan is not None:
        answer["published"] = done.published
        answer["claims"] = [each.document() for each in done.plan.claims]
        answer["pods"] = [each.document() for each in done.plan.pods]
        answer["problems"] = [each.document() for each in done.plan.problems]
    return answer


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    api = connect(module, retry_seconds=params["timeout"])
    try:
        drainer = Drainer(
            api,
            asked_of(params),
            Consent(params["evict"], params["evict_unmanaged"]),
            timeout=params["timeout"],
            grace_period=params["grace_period"],
            dry=module.check_mode,
        )
    except ApiError as error:
        # Where there can be no rules, there are none to lift.
        if error.code == "api-version" and params["state"] == "open":
            return result(Done())
        raise
    try:
        done = (
            drainer.drain()
            if params["state"] == "drained"
            else drainer.open(texts(params["published"]), params["older_than"])
        )
    except (Blocked, TimeIsUp) as error:
        fail(module, error, **result(drainer.done))
    return result(done)


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
