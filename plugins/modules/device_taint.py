#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_taint
version_added: 0.1.0
short_description: Take devices out of service, and give them back, by a DeviceTaintRule
description:
  - Writes, changes and removes a DeviceTaintRule of the C(resource.k8s.io) API, which gives a taint to published devices without their driver
    having a say. No claim that does not tolerate the taint gets such a device, and with O(effect=NoExecute) pods that have one are evicted.
  - Says which claims hold the devices, with their pods, before anything is touched, and can wait until they have let go.
  - A rule that this module has not written is refused. Its own ones bear the label C(app.kubernetes.io/managed-by=dra-accelerators) and its
    field manager.
notes:
  - The API server serves DeviceTaintRules from Kubernetes 1.37 on. Before, it needs the feature gates C(DRADeviceTaints) and, from 1.35 on,
    C(DRADeviceTaintRules), and the API version C(resource.k8s.io/v1beta2) (1.36) or C(resource.k8s.io/v1alpha3) (1.33 to 1.35).
  - Needs the permissions to get, create, update and delete C(devicetaintrules), and to list C(resourceclaims) in all namespaces, in the API group
    C(resource.k8s.io). They are in no default role, and a rule can evict pods of every namespace.
  - Programs that keep to taints on their own, such as the node driver, do not look at these rules; the scheduler and the controller manager do.
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
      - The API server validates the write in a dry run, which requires the same permissions. The module does not wait.
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
      - V(present) has the rule as given. V(absent) removes it, and so gives the devices back.
    type: str
    default: present
    choices:
      - present
      - absent
  name:
    description:
      - The name of the rule, a DNS subdomain.
    type: str
    required: true
  match:
    description:
      - The devices. All that is given has to fit. Needed for O(state=present), and there it has to name something.
    type: dict
    suboptions:
      node:
        description:
          - The Node whose devices these are. It is taken for the name of their pool, which it is with the node driver of this collection and with
            those of the vendors.
          - The rule bears the label C(dra.accelerators/node), by which the controller of this collection removes it when the Node is gone for
            good. Give O(match.pool) for a rule that is to stay.
        type: str
      pool:
        description: The pool that the devices are published in.
        type: str
      driver:
        description: The name of the driver that publishes the devices.
        type: str
      device:
        description: The name of the device, as in its ResourceSlice.
        type: str
      all:
        description: Whether the rule is for every device of the cluster. Not with anything else.
        type: bool
        default: false
  key:
    description:
      - The key of the taint, by which claims tolerate it.
    type: str
    default: dra.accelerators/maintenance
  value:
    description:
      - The value of the taint.
    type: str
    default: ""
  effect:
    description:
      - V(NoSchedule) keeps new claims away. V(NoExecute) also evicts pods that have such a device, but not those
        that request it by extended resources in their limits (see RV(held_by[].extended_resource)). V(None) (Kubernetes 1.35 and later) does neither,
        and lets the controller manager write into RV(rule.conditions) what V(NoExecute) would do.
    type: str
    default: NoSchedule
    choices:
      - None
      - NoSchedule
      - NoExecute
  reason:
    description:
      - Why, for people. It is kept in the rule's annotation C(dra.accelerators/reason).
    type: str
    default: ""
  wait:
    description:
      - Whether to wait, with O(state=present), until no claim holds one of the devices for a pod, other than those that tolerate the taint.
    type: bool
    default: false
  wait_timeout:
    description:
      - How long to wait, in seconds. Then the module fails and names the claims; the rule stays.
    type: int
    default: 600
  force:
    description:
      - Whether to change or remove a rule that somebody else wrote. It is the module's own from then on.
    type: bool
    default: false
seealso:
  - module: dra.accelerators.claim_info
  - name: Device taints and tolerations
    description: What a taint of a device does.
    link: https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/#device-taints-and-tolerations
"""

EXAMPLES = r"""
- name: Give nobody the devices of a node that is to be upgraded
  dra.accelerators.device_taint:
    name: maintenance-gpu-node-1
    match:
      node: gpu-node-1
    reason: The driver is upgraded on Thursday.
  delegate_to: localhost

- name: Say who would have to go
  dra.accelerators.device_taint:
    name: worn-out
    match:
      driver: gpu.nvidia.com
      node: gpu-node-1
      device: gpu-3
    effect: NoExecute
  check_mode: true
  register: who

- name: Evict the pods that have a part of one GPU, and wait until they have gone
  dra.accelerators.device_taint:
    name: worn-out
    match:
      driver: gpu.nvidia.com
      node: gpu-node-1
      device: gpu-3
    key: example.com/worn-out
    value: "yes"
    effect: NoExecute
    reason: Two rows of its memory could not be remapped.
    wait: true
    wait_timeout: 300

- name: Give the node's devices back
  dra.accelerators.device_taint:
    name: maintenance-gpu-node-1
    state: absent
"""

RETURN = r"""
steps:
  description: The writes that were done, or would be done in check mode.
  returned: success, and on failure with RV(error_code=still-held)
  type: list
  elements: dict
  contains:
    verb:
      description: V(create), V(update) or V(delete).
      type: str
      returned: success
      sample: create
    name:
      description: The name of the rule.
      type: str
      returned: success
      sample: worn-out
rule:
  description: The rule after the run, or in check mode as it would be.
  returned: success, and on failure with RV(error_code=still-held)
  type: dict
  contains:
    exists:
      description: Whether there is such a rule.
      type: bool
      returned: success
      sample: true
    name:
      description: Its name.
      type: str
      returned: success
      sample: worn-out
    api_version:
      description: The version in which the API server serves it best.
      type: str
      returned: success
      sample: resource.k8s.io/v1
    match:
      description: What it selects, of C(driver), C(pool) and C(device); empty for everything.
      type: dict
      returned: success
      sample: {driver: gpu.nvidia.com, pool: gpu-node-1, device: gpu-3}
    taint:
      description: The taint, with C(key), C(value) and C(effect).
      type: dict
      returned: success
      sample: {key: example.com/worn-out, value: "yes", effect: NoExecute}
    reason:
      description: Why.
      type: str
      returned: success
      sample: Two rows of its memory could not be remapped.
    conditions:
      description: What the controller manager says of it, as in the API.
      type: list
      elements: dict
      returned: success
      sample:
        - {type: EvictionInProgress, status: "False", reason: NotStarted, message: ""}
held_by:
  description:
    - The claims that hold one of the devices, after the wait if there is one. Claims without pods do not keep a device in use.
  returned: success with O(state=present), and on failure with RV(error_code=still-held)
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
      sample: training
    devices:
      description: Those of its devices that the rule is for, as driver, pool and name.
      type: list
      elements: str
      returned: success
      sample: [gpu.nvidia.com/gpu-node-1/gpu-3]
    pods:
      description: The pods that it is reserved for.
      type: list
      elements: str
      returned: success
      sample: [training-0]
    extended_resource:
      description:
        - Whether the scheduler created the claim for a pod that has devices by extended resources in its limits. Kubernetes does not evict
          such a pod for a taint with the effect V(NoExecute). M(dra.accelerators.device_drain) does.
      type: bool
      returned: success
      sample: false
    tolerates:
      description: Whether it tolerates the taint for good, on all these devices.
      type: bool
      returned: success
      sample: false
waited:
  description: How long the module waited for claims, in seconds.
  returned: success with O(state=present), and on failure with RV(error_code=still-held)
  type: float
  sample: 12.0
error_code:
  description: A stable word for the kind of the error, such as C(foreign-rule), C(still-held), C(invalid-match) or C(api-version).
  returned: failure
  type: str
  sample: foreign-rule
claims:
  description: The claims, as namespace and name, that still held devices when the time was over.
  returned: failure with RV(error_code=still-held)
  type: list
  elements: str
  sample: [default/training]
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

import time
from typing import Any, Callable

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    connect,
    served_version,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import fail, run
from ansible_collections.dra.accelerators.plugins.module_utils._taint_rules import (
    GROUP,
    Done,
    Rules,
    Wanted,
    selector_of,
    served_rules,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.claims import holders
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import InUse

#: The versions whose ResourceClaim is read, best first.
CLAIM_VERSIONS = ("v1", "v1beta2", "v1beta1")
LOOK_SECONDS = 2.0
EXTENDED_HINT = (
    "Kubernetes does not evict pods that have devices by extended resources in their limits (kubernetes/kubernetes#141290). "
    "Use the module device_drain, which evicts them, or delete them."
)

CONSTRAINTS: dict[str, Any] = {
    "required_together": API_REQUIRED_TOGETHER,
    "required_if": [("state", "present", ["match"])],
}


class StillHeld(InUse):
    """Claims held devices when the time was over."""

    default_code = "still-held"


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
        "name": {"type": "str", "required": True},
        "match": {
            "type": "dict",
            "options": {
                "node": {"type": "str"},
                "pool": {"type": "str"},
                "driver": {"type": "str"},
                "device": {"type": "str"},
                "all": {"type": "bool", "default": False},
            },
            "mutually_exclusive": [("node", "pool")],
        },
        "key": {"type": "str", "default": "dra.accelerators/maintenance", "no_log": False},
        "value": {"type": "str", "default": ""},
        "effect": {"type": "str", "default": "NoSchedule", "choices": ["None", "NoSchedule", "NoExecute"]},
        "reason": {"type": "str", "default": ""},
        "wait": {"type": "bool", "default": False},
        "wait_timeout": {"type": "int", "default": 600},
        "force": {"type": "bool", "default": False},
    }


def wanted_rule(params: dict[str, Any]) -> Wanted | None:
    """Return the rule that is asked for, None for none; pure. Raises AcceleratorError with code invalid-match."""
    if params["state"] == "absent":
        return None
    return Wanted(
        name=params["name"],
        selector=selector_of(params["match"]),
        taint={key: params[key] for key in ("key", "value", "effect")},
        reason=params["reason"],
        node=params["match"].get("node") or "",
    )


def held_by(api: Api, wanted: Wanted) -> list[dict[str, Any]]:
    """Ask which claims hold the devices of a rule. Raises ApiError."""
    version = served_version(api, GROUP, CLAIM_VERSIONS)
    return holders(api.list_all(f"/apis/{GROUP}/{version}/resourceclaims", {}), wanted.selector, wanted.taint)


def wait_until_free(
    look: Callable[[], list[dict[str, Any]]],
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[dict[str, Any]], float]:
    """Read claims until none that does not tolerate the taint has a pod, or the time is over. Return the last claims and the seconds."""
    begin = clock()
    while True:
        found = look()
        waited = clock() - begin
        if not in_use(found) or waited >= seconds:
            return found, waited
        sleep(min(LOOK_SECONDS, max(seconds - waited, 0.0)))


def in_use(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims that have pods and do not tolerate the taint."""
    return [one for one in found if one["pods"] and not one["tolerates"]]


def still_held(rest: list[dict[str, Any]], seconds: int) -> StillHeld:
    """Return the error for claims that still have pods."""
    return StillHeld(
        f"After {seconds} s devices are still held by "
        + "; ".join(f"claim {one['namespace']}/{one['name']} for pod {', '.join(one['pods'])}" for one in rest),
        hint="Check why these pods do not end. The rule stays, and the next run continues to wait. With the effect NoSchedule no pod is "
        "evicted. " + (EXTENDED_HINT if any(one["extended_resource"] for one in rest) else ""),
        claims=[f"{one['namespace']}/{one['name']}" for one in rest],
    )


def not_evicted(found: list[dict[str, Any]], effect: str) -> str:
    """Return a warning if there are pods that Kubernetes does not evict for a rule with this effect."""
    names = [f"{one['namespace']}/{one['name']}" for one in in_use(found) if one["extended_resource"]]
    if effect != "NoExecute" or not names:
        return ""
    return f"NoExecute does not evict the pods of the claims {', '.join(names)}. {EXTENDED_HINT}"


def result(name: str, version: str, done: Done, wanted: Wanted | None) -> dict[str, Any]:
    """Return what the module says of the rule; pure."""
    said = done.after or {"name": name, "match": {}, "taint": {}, "reason": ""}
    return {
        "changed": bool(done.verb),
        "steps": [{"verb": done.verb, "name": name}] if done.verb else [],
        "rule": {
            "exists": wanted is not None,
            "name": said["name"],
            "api_version": f"{GROUP}/{version}",
            "match": said["match"],
            "taint": said["taint"],
            "reason": said["reason"],
            "conditions": list(((done.rule or {}).get("status") or {}).get("conditions") or ()),
        },
        "waited": 0.0,
        "diff": {"before": dict(done.before), "after": dict(done.after)},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    wanted = wanted_rule(params)
    api = connect(module)
    rules = Rules(api, served_rules(api))
    holding = held_by(api, wanted) if wanted else []
    done = rules.bring_about(params["name"], wanted, force=params["force"], dry=module.check_mode)
    answer = result(params["name"], rules.version, done, wanted)
    if wanted is not None:
        answer["held_by"] = holding
        warning = not_evicted(holding, params["effect"])
        if warning:
            module.warn(warning)
        if params["wait"] and not module.check_mode:
            found, waited = wait_until_free(lambda: held_by(api, wanted), params["wait_timeout"])
            answer["held_by"], answer["waited"] = found, round(waited, 1)
            if in_use(found):
                fail(module, still_held(in_use(found), params["wait_timeout"]), **answer)
    return answer


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
