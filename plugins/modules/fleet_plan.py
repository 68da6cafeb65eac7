#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: fleet_plan
version_added: 0.1.0
short_description: Plan the layouts of a fleet for the claims that are wanted
description:
  - Finds a layout for each device of a fleet under which the most of the wanted claims find devices, the higher priorities first, with the fewest
    moves from what is there today. It says what finds no place and why, and how far the plan may be from the best one.
  - What is wanted is given as counts with O(wanted), as manifests with O(src), or as what has been waiting in the cluster with O(pending_for);
    several of these are added up.
  - What claims have today stays, and so does the device of a claim whose place cannot be told. With O(most_moves) so many claims may get another
    place, and the plan names their pods.
  - Nothing is done to any device. With O(dest) the layouts are written to a file of variables that the playbooks
    C(dra.accelerators.site) and C(dra.accelerators.repartition) take.
notes:
  - It runs where the inventory and the API server are, mostly on the controller. No accelerator's driver is asked.
  - With O(src) and O(pending_for) it needs the Python package C(cel-expr-python), with Python 3.11 or newer. Selectors with C(find) or C(findAll)
    need C(google-re2) as well.
  - The exact solver needs the Python package C(highspy), tested with 1.16. If it is missing, a heuristic search computes the plan and its bound.
  - Needs the permissions to list C(nodes) and C(pods), and C(resourceslices), C(resourceclaims), C(resourceclaimtemplates), C(deviceclasses) and
    C(devicetaintrules) in the API group C(resource.k8s.io). With O(cluster_src), or O(cluster=false), it asks no cluster.
  - Constraints of claims are not looked at. Which nodes a pod may go to is seen by its node selector and node affinity and by the nodes' taints;
    what lies between pods is not. A selector is asked of one device of each kind, so one that names a single device by its UUID is not planned for.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._kubernetes
attributes:
  check_mode:
    support: full
    details: O(dest) is not written.
  diff_mode:
    support: full
    details: The diff is of O(dest).
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  nodes:
    description: By the name that a node has in the cluster, what M(dra.accelerators.accelerator_report) has answered there. An empty answer is left out.
    type: dict
  nodes_src:
    description: A file with the same in YAML or JSON, by itself or under the key C(nodes).
    type: path
  wanted:
    description: What is wanted, as counts.
    type: list
    elements: dict
    suboptions:
      name:
        description: The name of the request in the plan, which must be unique. The default is a description of the request.
        type: str
      count:
        description: How many such claims.
        type: int
        default: 1
      priority:
        description: The higher, the earlier it is served.
        type: int
        default: 0
      devices:
        description: How many devices one claim has, all of them on one node.
        type: int
      type:
        description: The kind of device, V(whole), V(partition), or V(any) of the two. The default is V(partition) if O(wanted[].profile) is set,
          V(any) if O(wanted[].memory) is set, and otherwise V(whole).
        type: str
        choices: [any, whole, partition]
      profile:
        description: A profile of partitions, or a list of those of which any will do.
        type: raw
      memory:
        description: The memory that a device has at least, as V(20Gi).
        type: str
      vendor:
        description: The vendor of the device.
        type: str
      product:
        description: A shell pattern for the product, or a list of those.
        type: raw
      parts:
        description: Of a claim for devices of several kinds, one entry for each kind, with the keys from O(wanted[].devices) on.
        type: list
        elements: dict
  src:
    description:
      - Files of manifests in YAML or JSON, and folders of these. Counted are pods, the pods of Deployments, ReplicaSets, StatefulSets,
        ReplicationControllers and Jobs, and claims that no pod names; where there is none of these, each ResourceClaimTemplate once.
      - Their priority is that of the pod, or of a PriorityClass among the manifests.
    type: list
    elements: path
    default: []
  pending_for:
    description: Plan for the pods that have been waiting for a node, with claims, for at least so long, as V(1d), V(90m) or V(0s).
    type: str
  namespace:
    description: The namespace of manifests that do not say one; with O(pending_for), the only one whose pods are counted.
    type: str
  cluster:
    description: Whether the cluster is asked for what claims have, for classes and templates, and for who waits.
    type: bool
    default: true
  cluster_src:
    description: Files that hold the cluster's objects in YAML or JSON, as C(kubectl get -o yaml) writes them. No API server is asked then.
    type: list
    elements: path
    default: []
  most_moves:
    description: How many claims may lose their device and get another one. Only claims for a single device are moved.
    type: int
    default: 0
  solver:
    description:
      - V(exact) finds the best plan, V(heuristic) searches for a good one and says how many more claims any plan could serve.
      - V(auto) searches, and takes the exact solver where the search may have missed something, the package is there and the fleet is not too large.
    type: str
    choices: [auto, exact, heuristic]
    default: auto
  solver_seconds:
    description: How long the exact solver has. When that is over, the best plan known counts.
    type: int
    default: 60
  hosts:
    description: By the name of a node in the cluster, its name in the inventory, where that is another one.
    type: dict
    default: {}
  dest:
    description: The file of variables to write.
    type: path
seealso:
  - module: dra.accelerators.claim_explanation_info
  - module: dra.accelerators.accelerator_report
  - module: dra.accelerators.repartition_plan
"""

EXAMPLES = r"""
- name: Plan for counts
  dra.accelerators.fleet_plan:
    nodes_src: fleet.json
    wanted:
      - {name: notebooks, profile: 1g.10gb, count: 40}
      - {name: training, devices: 8, count: 1, priority: 10}
    dest: layouts.yml
  delegate_to: localhost

- name: Plan for what is to be deployed
  dra.accelerators.fleet_plan:
    nodes_src: fleet.json
    src: [manifests]
  register: planned
  delegate_to: localhost

- name: Show it
  ansible.builtin.debug:
    msg: "{{ planned.table }}"

- name: Plan for what has been waiting for a day, and let four claims move
  dra.accelerators.fleet_plan:
    nodes_src: fleet.json
    pending_for: 1d
    most_moves: 4
    dest: layouts.yml
  delegate_to: localhost
"""

RETURN = r"""
table:
  description: The plan for people, as lines.
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
        - By device C(node), C(index), C(uuid), C(vendor), C(product), whether it is C(changed), why it is left alone (C(fixed)), its C(mode_today) and
          C(mode), how many partitions of each profile C(goes), C(comes) and C(stays), C(claims_that_leave), and how many devices of it are C(given)
          to claims of what is wanted.
      type: list
      elements: dict
      returned: success
      sample: []
    wanted:
      description: What is wanted, each with C(name), C(priority), what it C(wants) in words, C(count), and how many claims are C(served).
      type: list
      elements: dict
      returned: success
      sample: [{name: notebooks, priority: 0, wants: 1g.10gb, count: 40, served: 38}]
    moves:
      description: The claims that get another place, each with C(claim), its C(pods), the C(item) it has, C(from) and C(to).
      type: list
      elements: dict
      returned: success
      sample: []
    pods:
      description: The pods that have to move, as C(namespace/name).
      type: list
      elements: str
      returned: success
      sample: []
    unplaceable:
      description:
        - What finds no place, each with C(name), C(count), C(code), C(message), and for a pod or claim of the cluster C(why), which is what
          M(dra.accelerators.claim_explanation_info) says of it today.
        - The codes are V(no-such-device), V(taken-by-others), V(held), V(too-few-devices) and V(not-planned).
      type: list
      elements: dict
      returned: success
      sample: [{name: notebooks, count: 2, code: too-few-devices, message: "The fleet has room for 38 of them, and for no more.", why: ""}]
    solver:
      description:
        - Which solver was C(used), whether no plan serves more (C(most_served)) and none that serves as many changes less (C(least_changed)), a C(remark),
          and by priority in C(bounds) how many claims are C(served), how many any plan serves C(at_most), and the C(gap) between them.
      type: dict
      returned: success
      sample: {used: exact, most_served: true, least_changed: true, remark: "", bounds: [{priority: 0, served: 38, at_most: 38, gap: 0}]}
    destroyed:
      description: How many partitions go that no claim has.
      type: int
      returned: success
      sample: 0
    touched:
      description: How many devices are changed.
      type: int
      returned: success
      sample: 6
    layouts:
      description: By host, the rules of its devices, as the variable C(accelerator_layouts) of the playbooks has them.
      type: list
      elements: dict
      returned: success
      sample: []
remarks:
  description: What was not looked at, and what lacks something, as sentences.
  returned: success
  type: list
  elements: str
  sample: []
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: invalid-wish
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
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.yaml import HAS_YAML, yaml_dump
from ansible_collections.dra.accelerators.plugins.module_utils._cel import CelJudge
from ansible_collections.dra.accelerators.plugins.module_utils._claim_explanations import (
    LISTS,
    MOST_EXPLAINED,
    Objects,
    answers_in,
    ask,
    explainer_of,
)
from ansible_collections.dra.accelerators.plugins.module_utils._fleet_plan import (
    duration,
    plan_facts,
    table,
    variables_text,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._manifests import (
    objects_of,
    read_all,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._plan_exact import AUTO, SOLVERS, solve
from ansible_collections.dra.accelerators.plugins.module_utils.core.allocation.text import text
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend import BACKENDS, create
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
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
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.times import seconds_of

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
        "solver": {"type": "str", "choices": list(SOLVERS), "default": AUTO},
        "solver_seconds": {"type": "int", "default": 60},
        "hosts": {"type": "dict", "default": {}},
        "dest": {"type": "path"},
    }


def inventory(params: dict[str, Any]) -> dict[str, Any]:
    """Return the nodes' answers by their names. Raises AcceleratorError."""
    if params["nodes"] is not None:
        return dict(params["nodes"])
    return answers_in(params["nodes_src"])


def cluster_of(module: AnsibleModule) -> Objects:
    """Return what the cluster has, from files or from its API server; nothing where it is not to be asked. Raises AcceleratorError."""
    objects = Objects()
    if module.params["cluster_src"]:
        for each in objects_of(read_all(module.params["cluster_src"], module.warn), "default"):
            if each["kind"] in LISTS:
                objects.add(each["kind"], each, "default")
    elif module.params["cluster"]:
        ask(connect(module), objects)
    return objects


def known_of(objects: Objects) -> dict[str, Any]:
    """Return what the cluster has that pods refer to."""
    cluster = objects.cluster()
    return {"claims": cluster.claims, "templates": cluster.templates, "classes": cluster.classes}


def wishes(params: dict[str, Any], objects: Objects) -> tuple[list[Wish], list[str], dict[str, Any]]:
    """Return what manifests and those who wait want, what they lack, and by name the pods of the cluster among them. Raises AcceleratorError."""
    found: list[Wish] = []
    lacks: list[str] = []
    pods: dict[str, Any] = {}
    if params["pending_for"] is not None:
        limit = time.time() - duration(params["pending_for"])
        waiting = []
        for each in objects.cluster().pods:
            since = seconds_of(waiting_since(each, objects.cluster().classes))
            if since is not None and since <= limit and params["namespace"] in (None, each["metadata"]["namespace"]):
                waiting.append({**each, "kind": "Pod"})
                pods[f"Pod {each['metadata']['namespace']}/{each['metadata']['name']}"] = each
        more = wishes_of(waiting, alone=False, **known_of(objects))
        found, lacks = found + more[0], lacks + more[1]
    if params["src"]:
        documents = list(objects_of(read_all(params["src"]), params["namespace"] or "default"))
        for each in documents:
            if each["kind"] == "DeviceClass":
                objects.add(each["kind"], each, "")
        more = wishes_of(documents, **known_of(objects))
        found, lacks = found + more[0], lacks + more[1]
    return found, lacks, pods


def read_claims(nodes: dict[str, Any], found: list[Wish], objects: Objects) -> Read:
    """Return what wishes come to on these nodes. Raises AcceleratorError."""
    if not found:
        return Read()
    kinds = published_kinds(nodes)
    if not kinds:
        raise InvalidFleet(
            "The nodes' answers do not tell how their devices would be published, which is what selectors of claims are asked of",
            hint="Ask the nodes with the module accelerator_report of this release; the playbook dra.accelerators.plan does.",
        )
    cluster = objects.cluster()
    there = [each for each in cluster.nodes if nodes.get(each["metadata"]["name"])]
    return demands_of(found, cluster.classes, kinds, CelJudge(), there)


def why_not(plan: Plan, pods: dict[str, Any], objects: Objects, nodes: dict[str, Any]) -> dict[str, str]:
    """Return, of the pods of the cluster without a place in the plan, what stands in their way today."""
    names = {each.demand.name: pods.get(each.demand.name.partition(" and ")[0]) for each in plan.unplaceable}
    asked = [(name, pod) for name, pod in names.items() if pod is not None][:MOST_EXPLAINED]
    if not asked:
        return {}
    explainer = explainer_of(objects, nodes)
    return {name: text([explainer.pod(pod)]) for name, pod in asked}


def drivers_of(fleet: Fleet) -> set[str]:
    """Return the names of the DRA drivers of a fleet's vendors."""
    vendors = {each.device.vendor for each in fleet.devices}
    return {create(each).driver_name for each in vendors if each in BACKENDS}


def write(module: AnsibleModule, path: str, after: str) -> dict[str, Any]:
    """Write a file if it is not so already, not in check mode; return whether it changes, and the diff. Raises AcceleratorError."""
    place = Path(path)
    if not place.parent.is_dir():
        raise AcceleratorError(
            f"dest {path} cannot be written: there is no folder {place.parent}",
            hint="Make the folder, or give another file.",
            code="file-unwritable",
        )
    try:
        before = place.read_text(encoding="utf-8") if place.exists() else ""
        if before != after and not module.check_mode:
            mode = place.stat().st_mode & 0o7777 if place.exists() else None
            System().write_atomic(str(place.resolve()), after.encode(), mode)
    except (OSError, UnicodeDecodeError) as error:
        raise AcceleratorError(
            f"dest {path} cannot be written: {error}",
            hint="Give another file.",
            code="file-unwritable",
        ) from error
    return {
        "changed": before != after,
        "diff": {"before": before, "after": after, "before_header": path, "after_header": path},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    if params["pending_for"] is not None and not (params["cluster"] or params["cluster_src"]):
        raise AcceleratorError(
            "pending_for asks who waits in the cluster, and cluster=false says that none is asked",
            hint="Give cluster_src, or leave cluster out.",
            code="no-cluster",
        )
    nodes, objects = inventory(params), cluster_of(module)
    claims = objects.cluster().claims
    fleet = read_fleet(nodes)
    fleet = read_fleet(nodes, holdings(claims, objects.cluster().slices, drivers_of(fleet)))
    found, remarks, pods = wishes(params, objects)
    said = read_claims(nodes, found, objects)
    demands = [*read_demands(params["wanted"] or []), *said.demands]
    problem = build(fleet, demands, most_moves=params["most_moves"])
    solved = solve(problem, params["solver"], params["solver_seconds"])
    plan = make_plan(problem, solved.solution)
    facts = plan_facts(
        problem,
        solved,
        plan,
        hosts=params["hosts"],
        users=users_of(claims),
        refused=said.refused,
        why=why_not(plan, pods, objects, nodes),
    )
    result: dict[str, Any] = {
        "changed": False,
        "plan": facts,
        "table": table(facts),
        "remarks": [*remarks, *said.remarks],
    }
    if params["dest"]:
        after = variables_text(facts["layouts"], yaml_dump if HAS_YAML else None)
        result.update(write(module, params["dest"], after))
    return result


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
