#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: device_taint
version_added: 0.1.0
short_description: Take devices out of service and return them to service with a DeviceTaintRule
description:
  - Creates, updates, and deletes a DeviceTaintRule of the C(resource.k8s.io) API, which adds a taint to published devices independent of their
    driver. Claims that do not tolerate the taint are not allocated such devices. With O(effect=NoExecute), pods with such devices are evicted.
  - Returns the claims that hold the devices, with their pods, in check mode too, and can wait until the claims have released the devices.
  - Rejects a rule that this module did not create. It recognizes its rules by the label C(app.kubernetes.io/managed-by=dra-accelerators) and its
    field manager.
notes:
  - The API server serves DeviceTaintRules by default since Kubernetes 1.37. Earlier versions need the feature gates C(DRADeviceTaints) and, since
    1.35, C(DRADeviceTaintRules), and the API version C(resource.k8s.io/v1beta2) (1.36) or C(resource.k8s.io/v1alpha3) (1.33 to 1.35).
  - Requires the permissions to get, create, update, and delete C(devicetaintrules), and to get and list C(resourceclaims) in all namespaces, in the
    API group C(resource.k8s.io). No default role has these permissions. A rule can evict pods in every namespace.
  - The scheduler and the controller manager evaluate these rules. Other programs that respect device taints, such as the node driver, do not.
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
      - V(present) creates or updates the rule. V(absent) deletes it and returns the devices to service.
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
      - The devices. All given keys must match. Required for O(state=present), with at least one key.
    type: dict
    suboptions:
      node:
        description:
          - The name of the Node with the devices. The module uses it as the name of their pool. The node driver of this collection and the
            drivers of the vendors use the same name for both.
          - The rule gets the label C(dra.accelerators/node). The controller of this collection deletes rules with this label after the Node is
            permanently removed. To keep the rule, use O(match.pool).
        type: str
      pool:
        description: The name of the pool with the devices.
        type: str
      driver:
        description: The name of the driver that publishes the devices.
        type: str
      device:
        description: The name of the device, as in its ResourceSlice.
        type: str
      all:
        description: Whether the rule applies to all devices of the cluster. It cannot be combined with other keys.
        type: bool
        default: false
  key:
    description:
      - The key of the taint. Claims use it to tolerate the taint.
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
      - The reason, as free text. It is stored in the rule's annotation C(dra.accelerators/reason).
    type: str
    default: ""
  wait:
    description:
      - Whether to wait, with O(state=present), until no claim holds one of the devices for a pod. Claims that tolerate the taint are ignored.
      - After a write the module waits for at least 4 seconds, because the scheduler can allocate devices by its previous state for this time.
    type: bool
    default: false
  wait_timeout:
    description:
      - The maximum wait, in seconds. After that, the module fails and returns the claims. The rule stays.
    type: int
    default: 600
  force:
    description:
      - Whether to update or delete a rule that this module did not create. After an update, the module manages the rule.
    type: bool
    default: false
seealso:
  - module: dra.accelerators.claim_info
  - name: Device taints and tolerations
    description: The Kubernetes documentation of device taints.
    link: https://kubernetes.io/docs/concepts/scheduling-eviction/dynamic-resource-allocation/#device-taints-and-tolerations
"""

EXAMPLES = r"""
- name: Prevent new allocations of a node's devices before an upgrade
  dra.accelerators.device_taint:
    name: maintenance-gpu-node-1
    match:
      node: gpu-node-1
    reason: The driver is upgraded on Thursday.
  delegate_to: localhost

- name: List the claims and pods that use a device
  dra.accelerators.device_taint:
    name: worn-out
    match:
      driver: gpu.nvidia.com
      node: gpu-node-1
      device: gpu-3
    effect: NoExecute
  check_mode: true
  register: who

- name: Evict the pods that use a GPU, and wait until they have ended
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

- name: Return the node's devices to service
  dra.accelerators.device_taint:
    name: maintenance-gpu-node-1
    state: absent
"""

RETURN = r"""
steps:
  description: The performed writes. In check mode, the expected writes.
  returned: success, and on failure with RV(error_code=still-held)
  type: list
  elements: dict
  contains:
    verb:
      description: The operation, V(create), V(update), or V(delete).
      type: str
      returned: success
      sample: create
    name:
      description: The name of the rule.
      type: str
      returned: success
      sample: worn-out
rule:
  description: The rule after the run. In check mode, the expected rule.
  returned: success, and on failure with RV(error_code=still-held)
  type: dict
  contains:
    exists:
      description: Whether the rule exists.
      type: bool
      returned: success
      sample: true
    name:
      description: The name of the rule.
      type: str
      returned: success
      sample: worn-out
    api_version:
      description: The API version that the module uses for the rule.
      type: str
      returned: success
      sample: resource.k8s.io/v1
    match:
      description: The selected C(driver), C(pool), and C(device), or empty for all devices.
      type: dict
      returned: success
      sample: {driver: gpu.nvidia.com, pool: gpu-node-1, device: gpu-3}
    taint:
      description: The taint, with C(key), C(value), and C(effect).
      type: dict
      returned: success
      sample: {key: example.com/worn-out, value: "yes", effect: NoExecute}
    reason:
      description: The reason.
      type: str
      returned: success
      sample: Two rows of its memory could not be remapped.
    conditions:
      description: The conditions that the controller manager reports for the rule, in the format of the API.
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
      description: The namespace of the claim.
      type: str
      returned: success
      sample: default
    name:
      description: The name of the claim.
      type: str
      returned: success
      sample: training
    devices:
      description: The devices of the claim that the rule selects, as driver, pool, and name.
      type: list
      elements: str
      returned: success
      sample: [gpu.nvidia.com/gpu-node-1/gpu-3]
    pods:
      description: The pods for which the claim is reserved.
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
      description: Whether the claim tolerates the taint on all these devices, without a time limit.
      type: bool
      returned: success
      sample: false
waited:
  description: How long the module waited for claims, in seconds.
  returned: success with O(state=present), and on failure with RV(error_code=still-held)
  type: float
  sample: 12.0
error_code:
  description: A stable error code, such as V(foreign-rule), V(still-held), V(invalid-match), or V(api-version).
  returned: failure
  type: str
  sample: foreign-rule
claims:
  description: The claims, as C(namespace/name), that still held devices when O(wait_timeout) expired.
  returned: failure with RV(error_code=still-held)
  type: list
  elements: str
  sample: [default/training]
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

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    SETTLE_SECONDS,
    Api,
    connect,
    served_version,
    was_just_written,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.cluster_facts import found_or_none
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.taint_rules import (
    GROUP,
    MANAGER,
    DesiredRule,
    RuleResult,
    Rules,
    selector_of,
    served_rules,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import fail, run
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.claims import holders
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import InUse
from ansible_collections.dra.accelerators.plugins.module_utils.core.times import now_text

#: The supported API versions of ResourceClaim, in order of preference.
CLAIM_VERSIONS = ("v1", "v1beta2", "v1beta1")
POLL_SECONDS = 2.0
#: The number of claims read per second while the module waits.
CLAIMS_PER_SECOND = 10
#: The maximum number of claims that are read by name. If there are more, the module lists all claims.
MOST_NAMED = 100
EXTENDED_HINT = (
    "Kubernetes does not evict pods that have devices by extended resources in their limits (kubernetes/kubernetes#141290). "
    "Use the module device_drain, which evicts them, or delete them."
)

CONSTRAINTS: dict[str, Any] = {
    "required_together": API_REQUIRED_TOGETHER,
    "required_if": [("state", "present", ["match"])],
}


class StillHeld(InUse):
    """Claims still held devices at the end of the timeout."""

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


def requested_rule(params: dict[str, Any]) -> DesiredRule | None:
    """Return the requested rule, or None. No side effects. Raises AcceleratorError with code invalid-match."""
    if params["state"] == "absent":
        return None
    return DesiredRule(
        name=params["name"],
        selector=selector_of(params["match"]),
        taint={key: params[key] for key in ("key", "value", "effect")},
        reason=params["reason"],
        node=params["match"].get("node") or "",
    )


def held_by(api: Api, base: str, wanted: DesiredRule, named: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return the claims that hold the devices of a rule, among ``named`` (with namespace and name) or among all. Raises ApiError."""

    def holder(claim: dict[str, Any]) -> dict[str, Any] | None:
        return next(iter(holders([claim], wanted.selector, wanted.taint)), None)

    if not named:
        return sorted(api.list_all(f"{base}/resourceclaims", {}, holder), key=_name_of)
    paths = (f"{base}/namespaces/{quote(one['namespace'])}/resourceclaims/{quote(one['name'])}" for one in named)
    read = (found_or_none(api, path) for path in paths)
    return holders((one for one in read if one is not None), wanted.selector, wanted.taint)


def wait_until_free(
    read: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
    found: list[dict[str, Any]],
    seconds: float,
    *,
    settle: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[dict[str, Any]], float]:
    """Wait until only claims that tolerate the taint have pods, or until the timeout. Return the last claims and the seconds.

    ``read`` reads the given claims by name. For an empty list it lists all claims. ``found`` are the claims of the last
    list. When these have no pods, all claims are listed again to find new ones, but not earlier than ``settle`` seconds
    after the rule was written.
    """
    begin = clock()
    while True:
        remaining = in_use(found)
        if not remaining:
            sleep(max(begin + settle - clock(), 0.0))
        read_at = clock()
        if 0 < len(remaining) <= MOST_NAMED:
            found = sorted([*(one for one in found if one not in remaining), *read(remaining)], key=_name_of)
            is_complete = False
        else:
            found = read([])
            is_complete = read_at >= begin + settle
        number, waited = len(in_use(found)), clock() - begin
        is_over = waited >= seconds if number else is_complete
        if is_over:
            return found, waited
        if number:
            sleep(min(max(POLL_SECONDS, number / CLAIMS_PER_SECOND), seconds - waited))


def _name_of(one: Mapping[str, Any]) -> tuple[str, str]:
    return str(one["namespace"]), str(one["name"])


def in_use(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the claims that have pods and do not tolerate the taint."""
    return [one for one in found if one["pods"] and not one["tolerates"]]


def still_held(rest: list[dict[str, Any]], seconds: int) -> StillHeld:
    """Return the error for claims that still have pods."""
    return StillHeld(
        f"After {seconds} s these claims still hold devices: "
        + "; ".join(f"claim {one['namespace']}/{one['name']} for pod {', '.join(one['pods'])}" for one in rest),
        hint="Check why these pods do not end. The rule stays, and the next run continues to wait. With the effect NoSchedule no pod is "
        "evicted. " + (EXTENDED_HINT if any(one["extended_resource"] for one in rest) else ""),
        claims=[f"{one['namespace']}/{one['name']}" for one in rest],
    )


def not_evicted(found: list[dict[str, Any]], effect: str) -> str:
    """Return a warning if Kubernetes does not evict some pods for a rule with this effect."""
    names = [f"{one['namespace']}/{one['name']}" for one in in_use(found) if one["extended_resource"]]
    if effect != "NoExecute" or not names:
        return ""
    return f"NoExecute does not evict the pods of the claims {', '.join(names)}. {EXTENDED_HINT}"


def result(name: str, version: str, done: RuleResult, wanted: DesiredRule | None) -> dict[str, Any]:
    """Return the module's result. No side effects."""
    after = done.after or {"name": name, "match": {}, "taint": {}, "reason": ""}
    return {
        "changed": bool(done.verb),
        "steps": [{"verb": done.verb, "name": name}] if done.verb else [],
        "rule": {
            "exists": wanted is not None,
            "name": after["name"],
            "api_version": f"{GROUP}/{version}",
            "match": after["match"],
            "taint": after["taint"],
            "reason": after["reason"],
            "conditions": list(((done.rule or {}).get("status") or {}).get("conditions") or ()),
        },
        "waited": 0.0,
        "diff": {"before": dict(done.before), "after": dict(done.after)},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    wanted = requested_rule(params)
    api = connect(module)
    rules = Rules(api, served_rules(api))
    base = f"/apis/{GROUP}/{served_version(api, GROUP, CLAIM_VERSIONS)}" if wanted else ""
    holders_before = held_by(api, base, wanted) if wanted else []
    done = rules.apply(params["name"], wanted, force=params["force"], dry=module.check_mode)
    facts = result(params["name"], rules.version, done, wanted)
    if wanted is not None:
        facts["held_by"] = holders_before
        warning = not_evicted(holders_before, params["effect"])
        if warning:
            module.warn(warning)
        if params["wait"] and not module.check_mode:
            is_new = done.rule is not None and was_just_written(done.rule, MANAGER, now_text())
            found, waited = wait_until_free(
                lambda named: held_by(api, base, wanted, named),
                holders_before,
                params["wait_timeout"],
                settle=SETTLE_SECONDS if done.verb or is_new else 0.0,
            )
            facts["held_by"], facts["waited"] = found, round(waited, 1)
            if in_use(found):
                fail(module, still_held(in_use(found), params["wait_timeout"]), **facts)
    return facts


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
