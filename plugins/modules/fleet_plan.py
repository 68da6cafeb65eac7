#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_plan
version_added: 0.1.0
short_description: Plan device layouts that satisfy the most requests with the fewest changes
description:
  - Finds a layout for each device of a fleet that serves the most requested claims, higher priorities first, with the fewest changes to the current
    layouts. Returns the requests that cannot be served with the reasons, and a bound for how much better another plan can be.
  - Requests are counts in O(wanted), manifests in O(src), or pods that are pending in the cluster for the time in O(pending_for). The module adds
    up the requests of several sources.
  - By default, the plan keeps the devices and partitions that claims hold. It does not change devices that a claim can use if the device
    or the partition of the claim is unknown. O(most_moves) allows a number of claims to move to other devices. The plan contains their pods.
  - The module does not change devices. With O(dest), it writes the layouts to a variables file for the playbooks C(dra.accelerators.site) and
    C(dra.accelerators.repartition).
notes:
  - The module runs where the inventory and the API server are available, usually on the controller node. It does not query device drivers.
  - O(src) and O(pending_for) require the Python package C(cel-expr-python), with Python 3.11 or newer. Selectors with C(find) or C(findAll)
    also require C(google-re2).
  - Requires the permissions to list C(nodes) and C(pods), and C(resourceslices), C(resourceclaims), C(resourceclaimtemplates), C(deviceclasses), and
    C(devicetaintrules) in the API group C(resource.k8s.io). With O(cluster_src) or O(cluster=false), the module does not query a cluster.
  - The module ignores constraints of claims. It determines the nodes for a pod from the pod's node selector and node affinity and from the nodes'
    taints. It ignores conditions between pods.
  - The module evaluates a selector for one device of each kind. A request whose selector matches a single device by its UUID is not planned.
requirements:
  - The Python package C(highspy) on the host where the module runs, tested with version 1.16. It contains the solver HiGHS.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
  - dra.accelerators._kubernetes
attributes:
  check_mode:
    support: full
    details: The module does not write O(dest).
  diff_mode:
    support: full
    details: The diff shows the changes of O(dest).
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  nodes:
    description: The results of M(dra.accelerators.accelerator_report) on the nodes, by the name of the node in the cluster. Empty results are ignored.
    type: dict
  nodes_src:
    description: A YAML or JSON file with the content of O(nodes), at the top level or under the key C(nodes).
    type: path
  wanted:
    description: The requests, as counts of claims.
    type: list
    elements: dict
    suboptions:
      name:
        description: The name of the request in the plan, which must be unique. The default is a description of the request.
        type: str
      count:
        description: The number of claims.
        type: int
        default: 1
      priority:
        description: The priority of the request. Requests with a higher priority are served first.
        type: int
        default: 0
      devices:
        description: The number of devices of one claim. All of them are on the same node.
        type: int
      type:
        description: The kind of device, V(whole), V(partition), or V(any) for both. The default is V(partition) if O(wanted[].profile) is set,
          V(any) if O(wanted[].memory) is set, and otherwise V(whole).
        type: str
        choices: [any, whole, partition]
      profile:
        description: The profile of the partition, or a list of alternative profiles.
        type: raw
      memory:
        description: The minimum memory of a device, for example V(20Gi).
        type: str
      vendor:
        description: The vendor of the device.
        type: str
      product:
        description: A shell pattern for the product, or a list of alternative patterns.
        type: raw
      parts:
        description: For a claim with devices of several kinds, one entry for each kind. An entry has the keys C(devices), C(type), C(profile), C(memory),
          C(vendor), and C(product).
        type: list
        elements: dict
  src:
    description:
      - Manifest files in YAML or JSON, and directories of such files. The module counts the claims of pods, of the pods of Deployments, ReplicaSets,
        StatefulSets, ReplicationControllers, and Jobs, and claims without a pod. If the manifests have no such object, each
        ResourceClaimTemplate counts as one claim.
      - The priority is that of the pod, or of its PriorityClass in the manifests.
    type: list
    elements: path
    default: []
  pending_for:
    description: Plan for pods with claims that have been pending for at least this time, for example V(1d), V(90m), or V(0s).
    type: str
  namespace:
    description: The namespace of manifests without a namespace. With O(pending_for), the module counts only pods in this namespace.
    type: str
  cluster:
    description: Whether to query the cluster for allocated devices, DeviceClasses, ResourceClaimTemplates, and pending pods.
    type: bool
    default: true
  cluster_src:
    description: YAML or JSON files with the cluster's objects, as C(kubectl get -o yaml) writes them. The module then does not query the API server.
    type: list
    elements: path
    default: []
  most_moves:
    description: The maximum number of claims that can move to another device. Only claims with a single device can move.
    type: int
    default: 0
  time_limit:
    description:
      - The maximum duration of the search, in seconds. After that, the module returns the best plan so far, and fails without a plan.
      - RV(plan.solver) contains how much better another plan can be.
    type: int
    default: 60
  hosts:
    description: The names of nodes in the inventory, by their names in the cluster, if they differ.
    type: dict
    default: {}
  dest:
    description:
      - The path of the variables file to write.
      - An existing file of this module keeps the entries of hosts without an answer in this run. All other entries are replaced.
      - The module rejects an existing file with other content.
      - An existing file keeps its owner if the module runs as root. Otherwise it belongs to the user of the module.
    type: path
seealso:
  - module: dra.accelerators.claim_explanation_info
  - module: dra.accelerators.accelerator_report
  - module: dra.accelerators.repartition_plan
"""

EXAMPLES = r"""
- name: Plan layouts for counts of claims
  dra.accelerators.fleet_plan:
    nodes_src: fleet.json
    wanted:
      - {name: notebooks, profile: 1g.10gb, count: 40}
      - {name: training, devices: 8, count: 1, priority: 10}
    dest: layouts.yml
  delegate_to: localhost

- name: Plan layouts for manifests
  dra.accelerators.fleet_plan:
    nodes_src: fleet.json
    src: [manifests]
  register: planned
  delegate_to: localhost

- name: Show the plan
  ansible.builtin.debug:
    msg: "{{ planned.table }}"

- name: Plan layouts for pods that have been pending for a day, and move up to four claims
  dra.accelerators.fleet_plan:
    nodes_src: fleet.json
    pending_for: 1d
    most_moves: 4
    dest: layouts.yml
  delegate_to: localhost
"""

RETURN = r"""
table:
  description: The plan as lines of text.
  returned: success
  type: list
  elements: str
  sample:
    - node   device  mode            goes  comes        stays  for
    - gpu-1  0       whole → static  -     7 x 1g.10gb  -      7 x notebooks
plan:
  description: The plan as data.
  returned: success
  type: dict
  contains:
    devices:
      description:
        - The devices, each with C(node), C(index), C(uuid), C(vendor), C(product), and C(changed). C(fixed) is the reason why the plan must not change
          the device, or empty. C(mode_today) is the current mode, and C(mode) the planned mode.
        - C(goes), C(comes), and C(stays) are the numbers of deleted, created, and kept partitions of each profile. C(claims_that_leave) are the
          claims that move to another device. C(given) is the number of devices for each request.
      type: list
      elements: dict
      returned: success
      sample: []
    wanted:
      description: The requests, each with C(name), C(priority), a description (C(wants)), the C(count) of claims, and the number of C(served) claims.
      type: list
      elements: dict
      returned: success
      sample: [{name: notebooks, priority: 0, wants: 1g.10gb, count: 40, served: 38}]
    moves:
      description: The claims that move to another device, each with C(claim), its C(pods), the kind of its device (C(item)), C(from), and C(to).
      type: list
      elements: dict
      returned: success
      sample: []
    pods:
      description: The pods of the claims that move, as C(namespace/name).
      type: list
      elements: str
      returned: success
      sample: []
    unplaceable:
      description:
        - The requests that the plan does not serve, each with C(name), C(count), C(code), and C(message). For a pending pod of the cluster, C(why) is
          its current explanation, as in M(dra.accelerators.claim_explanation_info).
        - The codes are V(no-such-device), V(taken-by-others), V(held), V(too-few-devices), and V(not-planned).
      type: list
      elements: dict
      returned: success
      sample: [{name: notebooks, count: 2, code: too-few-devices, message: "The fleet has room for 38 of them, and for no more.", why: ""}]
    solver:
      description:
        - The quality of the plan. C(most_served) is true if no plan serves more claims. C(least_changed) is true if no plan serves as many claims with
          fewer changes. If one of them is not proven, C(remark) is the reason.
        - C(bounds) contains for each priority the number of C(served) claims, the upper limit for every plan (C(at_most)), and the difference (C(gap)).
      type: dict
      returned: success
      sample: {most_served: true, least_changed: true, remark: "", bounds: [{priority: 0, served: 38, at_most: 38, gap: 0}]}
    destroyed:
      description: The number of deleted partitions that no claim holds.
      type: int
      returned: success
      sample: 0
    touched:
      description: The number of changed devices.
      type: int
      returned: success
      sample: 6
    layouts:
      description: The rules of the devices of each host, in the format of the playbook variable C(accelerator_layouts).
      type: list
      elements: dict
      returned: success
      sample: []
remarks:
  description: Notes on the plan, such as ignored requirements and missing objects, as sentences.
  returned: success
  type: list
  elements: str
  sample: []
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: invalid-wish
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

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible.module_utils.common.yaml import HAS_YAML, yaml_dump
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.manifest_files import (
    documents_of,
    objects_of,
    read,
    read_all,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import end, run
from ansible_collections.dra.accelerators.plugins.module_utils._planner.optimization import (
    HAS_HIGHS,
    HIGHS_IMPORT_ERROR,
    PACKAGE,
    solve,
)
from ansible_collections.dra.accelerators.plugins.module_utils._planner.render import (
    duration,
    other_layouts,
    plan_facts,
    table,
    variables_text,
)
from ansible_collections.dra.accelerators.plugins.module_utils._scheduling.cel import CelJudge
from ansible_collections.dra.accelerators.plugins.module_utils._scheduling.explain_sources import (
    LISTS,
    MOST_EXPLAINED,
    Objects,
    answers_in,
    ask,
    explainer_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.allocation.text import text
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System, path_exists
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.claims import (
    Read,
    Wish,
    demands_of,
    holdings,
    published_kinds,
    users_of,
    waiting_since,
    wishes_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.demands import TYPES, read_demands
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.fleet import Fleet, InvalidFleet, read_fleet
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.plan import Plan, make_plan
from ansible_collections.dra.accelerators.plugins.module_utils.core.planner.problem import build
from ansible_collections.dra.accelerators.plugins.module_utils.core.times import seconds_of
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.registry import BACKENDS, create

CONSTRAINTS: dict[str, Any] = {
    "required_together": API_REQUIRED_TOGETHER,
    "mutually_exclusive": [("nodes", "nodes_src")],
    "required_one_of": [("nodes", "nodes_src"), ("wanted", "src", "pending_for")],
}
WANTED: dict[str, Any] = {
    "name": {"type": "str"},
    "count": {"type": "int", "default": 1},
    "priority": {"type": "int", "default": 0},
    "devices": {"type": "int"},
    "type": {"type": "str", "choices": list(TYPES)},
    "profile": {"type": "raw"},
    "memory": {"type": "str"},
    "vendor": {"type": "str"},
    "product": {"type": "raw"},
    "parts": {"type": "list", "elements": "dict"},
}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "nodes": {"type": "dict"},
        "nodes_src": {"type": "path"},
        "wanted": {"type": "list", "elements": "dict", "options": WANTED},
        "src": {"type": "list", "elements": "path", "default": []},
        "pending_for": {"type": "str"},
        "namespace": {"type": "str"},
        "cluster": {"type": "bool", "default": True},
        "cluster_src": {"type": "list", "elements": "path", "default": []},
        "most_moves": {"type": "int", "default": 0},
        "time_limit": {"type": "int", "default": 60},
        "hosts": {"type": "dict", "default": {}},
        "dest": {"type": "path"},
    }


def node_reports(params: dict[str, Any]) -> dict[str, Any]:
    """Return the node reports by node name. Raises AcceleratorError."""
    if params["nodes"] is not None:
        return dict(params["nodes"])
    return answers_in(params["nodes_src"])


def cluster_of(module: AnsibleModule) -> Objects:
    """Return the cluster's objects from files or from its API server; empty if neither is requested. Raises AcceleratorError."""
    objects = Objects()
    if module.params["cluster_src"]:
        for each in objects_of(read_all(module.params["cluster_src"], module.warn), "default"):
            if each["kind"] in LISTS:
                objects.add(each["kind"], each, "default")
    elif module.params["cluster"]:
        ask(connect(module), objects)
    return objects


def referenced_objects(objects: Objects) -> dict[str, Any]:
    """Return the cluster's objects that pods refer to."""
    cluster = objects.cluster()
    return {"claims": cluster.claims, "templates": cluster.templates, "classes": cluster.classes}


def read_wishes(params: dict[str, Any], objects: Objects) -> tuple[list[Wish], list[str], dict[str, Any]]:
    """Return the requests of manifests and of pending pods, their problems, and the pending pods by name. Raises AcceleratorError."""
    requests: list[Wish] = []
    problems: list[str] = []
    pods: dict[str, Any] = {}
    if params["pending_for"] is not None:
        limit = time.time() - duration(params["pending_for"])
        waiting = []
        for each in objects.cluster().pods:
            since = seconds_of(waiting_since(each, objects.cluster().classes))
            if since is not None and since <= limit and params["namespace"] in (None, each["metadata"]["namespace"]):
                waiting.append({**each, "kind": "Pod"})
                pods[f"Pod {each['metadata']['namespace']}/{each['metadata']['name']}"] = each
        more = wishes_of(waiting, alone=False, **referenced_objects(objects))
        requests, problems = requests + more[0], problems + more[1]
    if params["src"]:
        documents = list(objects_of(read_all(params["src"]), params["namespace"] or "default"))
        for each in documents:
            if each["kind"] == "DeviceClass":
                objects.add(each["kind"], each, "")
        more = wishes_of(documents, **referenced_objects(objects))
        requests, problems = requests + more[0], problems + more[1]
    return requests, problems, pods


def read_claims(nodes: dict[str, Any], requests: list[Wish], objects: Objects) -> Read:
    """Return the demands of the requests on these nodes. Raises AcceleratorError."""
    if not requests:
        return Read()
    kinds = published_kinds(nodes)
    if not kinds:
        raise InvalidFleet(
            "The reports of the nodes do not contain the published form of their devices, which the selectors of claims need",
            hint="Query the nodes with the module accelerator_report of this release, or run the playbook dra.accelerators.plan.",
        )
    cluster = objects.cluster()
    reported = [each for each in cluster.nodes if nodes.get(each["metadata"]["name"])]
    return demands_of(requests, cluster.classes, kinds, CelJudge(), reported)


def explain_unplaceable(plan: Plan, pods: dict[str, Any], objects: Objects, nodes: dict[str, Any]) -> dict[str, str]:
    """Return why pods of the cluster that the plan does not serve cannot be scheduled now."""
    names = {each.demand.name: pods.get(each.demand.name.partition(" and ")[0]) for each in plan.unplaceable}
    to_explain = [(name, pod) for name, pod in names.items() if pod is not None][:MOST_EXPLAINED]
    if not to_explain:
        return {}
    explainer = explainer_of(objects, nodes)
    return {name: text([explainer.pod(pod)]) for name, pod in to_explain}


def drivers_of(fleet: Fleet) -> set[str]:
    """Return the names of the DRA drivers of a fleet's vendors."""
    vendors = {each.device.vendor for each in fleet.devices}
    return {create(each).driver_name for each in vendors if each in BACKENDS}


def layouts_of_other_hosts(path: str, planned: Collection[str]) -> list[dict[str, Any]]:
    """Return the entries of an existing file for hosts that are not in the plan. Raises AcceleratorError."""
    text = read(path) if path_exists(Path(path)) else ""
    return other_layouts(documents_of(text, path), planned, path) if text.strip() else []


def write_dest(module: AnsibleModule, path: str, after: str) -> dict[str, Any]:
    """Write a file if it differs, except in check mode. Return whether it changes, and the diff. Raises AcceleratorError."""
    file = Path(path)
    if not file.parent.is_dir():
        raise AcceleratorError(
            f"dest {path} cannot be written: the directory {file.parent} does not exist",
            hint="Create the directory, or set another file.",
            code="file-unwritable",
        )
    try:
        before = file.read_text(encoding="utf-8") if path_exists(file) else ""
        if before != after and not module.check_mode:
            # Only root can keep another owner. For other users the new file belongs to the user of this run.
            mode = file.stat().st_mode & 0o7777 if path_exists(file) else None
            like = str(file) if path_exists(file) and os.geteuid() == 0 else ""
            System().write_atomic(str(file.resolve()), after.encode(), mode, like=like)
    except (OSError, UnicodeDecodeError) as error:
        raise AcceleratorError(
            f"dest {path} cannot be written: {error}",
            hint="Set another file.",
            code="file-unwritable",
        ) from error
    return {
        "changed": before != after,
        "diff": {"before": before, "after": after, "before_header": path, "after_header": path},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    if not HAS_HIGHS:
        text = missing_required_lib(PACKAGE, reason="to find a plan")
        end(module, msg=text, error_code="missing-package", exception=HIGHS_IMPORT_ERROR)
    if params["pending_for"] is not None and not (params["cluster"] or params["cluster_src"]):
        raise AcceleratorError(
            "The option pending_for needs the pending pods of the cluster, and cluster=false prevents the query",
            hint="Set cluster_src, or do not set cluster.",
            code="no-cluster",
        )
    nodes, objects = node_reports(params), cluster_of(module)
    claims = objects.cluster().claims
    fleet = read_fleet(nodes)
    fleet = read_fleet(nodes, holdings(claims, objects.cluster().slices, drivers_of(fleet)))
    requests, remarks, pods = read_wishes(params, objects)
    claim_demands = read_claims(nodes, requests, objects)
    demands = [*read_demands(params["wanted"] or []), *claim_demands.demands]
    problem = build(fleet, demands, most_moves=params["most_moves"])
    solved = solve(problem, params["time_limit"])
    plan = make_plan(problem, solved.solution)
    facts = plan_facts(
        problem,
        solved,
        plan,
        hosts=params["hosts"],
        users=users_of(claims),
        refused=claim_demands.refused,
        why=explain_unplaceable(plan, pods, objects, nodes),
    )
    result: dict[str, Any] = {
        "changed": False,
        "plan": facts,
        "table": table(facts),
        "remarks": [*remarks, *claim_demands.remarks],
    }
    if params["dest"]:
        planned = {params["hosts"].get(node, node) for node, answer in nodes.items() if answer}
        others = layouts_of_other_hosts(params["dest"], planned)
        if others:
            names = ", ".join(sorted({each["hosts"] for each in others}))
            result["remarks"].append(f"{params['dest']} keeps the layouts of hosts that are not in this plan: {names}.")
        layouts = sorted([*facts["layouts"], *others], key=lambda each: str(each["hosts"]))
        result.update(write_dest(module, params["dest"], variables_text(layouts, yaml_dump if HAS_YAML else None)))
    return result


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
