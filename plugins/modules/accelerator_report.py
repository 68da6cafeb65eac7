#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: accelerator_report
version_added: 0.1.0
short_description: Answer for a node or a fleet how its accelerators are
description:
  - Without O(nodes) it looks at the node that it runs on. The devices with their partitions and whose these are, how they differ from the node's
    layout and what of that layout would be refused, their health, the claims that the node has prepared, and versions.
  - With O(nodes), which are such answers of many nodes, it asks the cluster what is published and who has claims, and joins both. No device is
    looked at then, and it runs where the API server can be reached.
  - Everything that somebody should look at is listed once more in C(attention), with a stable word for what it is.
  - With O(nodes) there is also C(picture), the same as data to draw, with each device to scale and who has what of it, who waits and why, and what
    still fits.
  - The playbook C(dra.accelerators.report) asks all nodes of a fleet so, and writes what they answer as a page of HTML, as JSON and as Markdown.
notes:
  - On a node it needs root, and not the Python package C(kubernetes). With O(nodes) it needs that alone.
  - With O(nodes) it needs the permissions to list C(resourceclaims) and C(resourceslices) in the API group C(resource.k8s.io), and with O(health) to
    list C(pods) of all namespaces. C(devicetaintrules) are looked at where the cluster has them and they may be listed.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._attributes.facts
  - dra.accelerators._attributes.info_module
  - dra.accelerators._kubernetes
  - dra.accelerators._nvml
attributes:
  platform:
    support: full
    platforms: linux
options:
  vendor:
    description:
      - The vendors whose drivers are queried. By default, all vendors that have devices on the machine.
    type: list
    elements: str
  layout:
    description:
      - The rules for the layout of the node's devices. By default, those in O(layout_file).
    type: list
    elements: dict
  layout_file:
    description:
      - The file with the rules that are applied at boot. Where it is not there the node has no layout, and nothing is compared.
    type: path
    default: /etc/dra-accelerators/layout.json
  kubelet_root:
    description: The kubelet's folder, below which the node drivers keep the claims that they have prepared.
    type: path
    default: /var/lib/kubelet
  root:
    description: The folder of the collection's programs on the node.
    type: path
    default: /opt/dra-accelerators
  nodes:
    description:
      - By the name that a node has in the cluster, what this module has answered there. Where a node did not answer, an empty dictionary.
    type: dict
  not_asked:
    description:
      - With O(nodes), the names of nodes that this run did not query, for example because of C(--limit). The report lists them as not asked instead of
        silent, and shows their data from their slices and from O(former).
    type: list
    elements: str
    default: []
  run:
    description:
      - A string that identifies the run. On a node, the answer contains this value. With O(nodes), answers of other runs, for example from a fact cache,
        count as missing. An empty string accepts the answers of all runs.
    type: str
    default: ""
  cluster:
    description: With O(nodes), whether to read the cluster. If it is V(false), the report contains only the results of the nodes.
    type: bool
    default: true
  health:
    description: With O(nodes), whether the pods are asked what the kubelet says of the health of their devices, and why they wait.
    type: bool
    default: true
  reasons:
    description:
      - With O(nodes), why claims wait, where somebody knows better than the scheduler, by C(namespace/name) of the claim. Each has a C(message), and may
        have a C(code) and a C(remedy).
    type: dict
    default: {}
  explain:
    description:
      - With O(nodes) and O(health), whether to explain why claims that are not in O(reasons) are pending, and the nearest change, as
        M(dra.accelerators.claim_explanation_info) does. Limits are twenty different pods, the longest pending ones first, one minute, and twelve
        nodes.
      - Needs the Python package C(cel-expr-python), with Python 3.11 or newer, and the permissions to list C(nodes), and C(deviceclasses) and
        C(resourceclaimtemplates) in C(resource.k8s.io). If these are missing, the report contains the scheduler's message, and C(attention) names
        what to install or permit.
    type: bool
    default: true
  former:
    description:
      - With O(nodes), a file with the C(picture) of a former run as JSON. Health, and what differs from the layout, of devices whose node or driver does not
        answer now are taken from it, marked with their age (C(as_of)). Where the file is not there, nothing is known from before.
    type: path
seealso:
  - module: dra.accelerators.accelerator_info
  - module: dra.accelerators.claim_info
"""

EXAMPLES = r"""
- name: Ask a node
  dra.accelerators.accelerator_report:

- name: Say what somebody should look at
  ansible.builtin.debug:
    msg: "{{ ansible_facts.accelerator_report.attention | map(attribute='message') }}"

- name: Ask a node how far it is from a layout that it does not have yet
  dra.accelerators.accelerator_report:
    layout:
      - match: {}
        mode: static
        partitions:
          1g.10gb: 7

- name: Ask the cluster, and join what the nodes have answered
  dra.accelerators.accelerator_report:
    nodes:
      gpu-node-1: "{{ hostvars['gpu-node-1'].ansible_facts.accelerator_report }}"
      gpu-node-2: "{{ hostvars['gpu-node-2'].ansible_facts.accelerator_report }}"
  delegate_to: localhost

- name: Say why a claim waits in words of one's own
  dra.accelerators.accelerator_report:
    nodes:
      gpu-node-1: "{{ hostvars['gpu-node-1'].ansible_facts.accelerator_report }}"
    reasons:
      research/training:
        message: Its team has used up what it has booked.
        remedy: Book more, or wait until Monday.
  delegate_to: localhost

- name: Know of nodes that do not answer what they have said before
  dra.accelerators.accelerator_report:
    nodes:
      gpu-node-1: "{{ hostvars['gpu-node-1'].ansible_facts.accelerator_report }}"
      gpu-node-2: {}
    former: accelerators.json
  delegate_to: localhost

- name: Join what the nodes have answered, without a cluster
  dra.accelerators.accelerator_report:
    nodes:
      gpu-node-1: "{{ hostvars['gpu-node-1'].ansible_facts.accelerator_report }}"
      gpu-node-2: {}
    cluster: false
  delegate_to: localhost
"""

RETURN = r"""
ansible_facts:
  description: The answer, for later tasks, plays and templates.
  returned: success
  type: dict
  contains:
    accelerator_report:
      description: The answer of a node, or with O(nodes) of the fleet.
      returned: success
      type: dict
      contains:
        devices:
          description:
            - The devices, with C(vendor), C(index), C(uuid), C(product), C(pci_address), C(pcie_root), C(numa_node), C(memory_bytes), C(memory_slices),
              C(partitioning), C(processes) and C(health) as M(dra.accelerators.accelerator_info) has them, the C(claims) that the node has prepared, and
              C(groups), the groups of devices with direct links between them that it belongs to, by what people call such a group (C(NVLink), by the
              indices of those that links or the switches of their machine connect; C(fabric), C(HCCS ring), C(card), C(super-pod)).
            - Its C(kind) is one of RV(ansible_facts.accelerator_report.kinds), its C(rule) what the layout says of it without C(match), nothing where no
              rule is for it.
            - Each of its C(partitions) has C(profile), C(profile_id), C(placement), C(uuid), C(memory_bytes), C(claims) and C(owner), which is V(claim)
              where the node driver has made it for one, V(administrator) where somebody else has, and V(foreign) where it was made by hand in a form
              that no profile has.
          returned: without O(nodes)
          type: list
          elements: dict
          sample:
            - index: 0
              uuid: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
              product: NVIDIA H100 80GB HBM3
              partitions: []
              claims: []
        kinds:
          description:
            - What is the same for all devices of a kind, by the kind's name. The C(profiles) into which such a device can be cut, as
              M(dra.accelerators.accelerator_info) has them, C(memory_slices) and C(capacities), and how the whole device and its partitions would be
              C(published). M(dra.accelerators.fleet_plan) plans by that.
          returned: without O(nodes)
          type: dict
          sample: {}
        unread:
          description: The devices that are there and could not be read, each with the reason.
          returned: without O(nodes)
          type: list
          elements: str
          sample: []
        drivers:
          description: The vendors that were asked, whether their driver answered (C(available)), and why not (C(reason)).
          returned: without O(nodes)
          type: list
          elements: dict
          sample:
            - {vendor: nvidia, driver_name: gpu.nvidia.com, available: true, reason: ""}
        layout:
          description:
            - Whether a layout is C(known) and from where (C(source)), whether everything C(matches) it, and the C(differences), as
              M(dra.accelerators.nvidia_mig) has them with O(dra.accelerators.nvidia_mig#module:state=asserted).
            - Further what would be C(refused) if it were applied now, each with C(code), C(message) and C(hint), and the UUIDs of the devices that would
              need C(resets).
          returned: without O(nodes)
          type: dict
          sample: {known: true, source: /etc/dra-accelerators/layout.json, matches: true, differences: [], refused: [], resets: []}
        claims:
          description:
            - Of a node, the claims that it has prepared, with C(namespace), C(name), C(uid), C(state), C(driver) and the names of their C(devices).
            - Of a fleet, all claims of the cluster as M(dra.accelerators.claim_info) has them.
          returned: success
          type: list
          elements: dict
          sample: []
        versions:
          description:
            - Of a node, the versions of the C(kernel), of the C(release) and C(environment) of the collection's programs, and of the vendors' C(drivers).
            - Of a fleet, by what has a version and by version, the nodes that have it.
          returned: success
          type: dict
          sample: {kernel: 6.1.0-37-amd64, release: 0.1.0-1a2b3c4d, environment: 0123456789ab, drivers: {nvidia: 580.95.5}}
        attention:
          description:
            - What somebody should look at, each with a C(code), a C(message), a C(remedy) and, where it is of one, the UUID of the C(device). Of a fleet
              also with the C(node), which is empty for what is of no one node.
            - The codes of a node are V(driver-unavailable), V(device-unread), V(device-unhealthy), V(mode-pending), V(no-partitions), V(made-by-hand),
              V(layout-differs) and V(layout-refused); of a fleet also V(node-silent), V(nodes-not-asked), V(node-unknown), V(not-published),
              V(published-and-gone), V(tainted), V(claim-waits), V(claim-unhealthy), V(claim-of-the-past), V(versions-differ),
              V(duplicate-extended-resource) and V(not-explained).
          returned: success
          type: list
          elements: dict
          sample:
            - code: device-unhealthy
              device: GPU-5a1c3f1e-90c6-4a1c-a4b1-2d3c4e5f6071
              message: It asks for a reset.
              remedy: The GPU has to be reset (nvidia-smi --gpu-reset) once nothing uses it.
        nodes:
          description:
            - By name, what each node has answered. With C(cluster_claims), the claims with a device of it; with C(published), how many C(devices) of it
              are published, C(available) and C(held), and which are C(tainted); with C(unpublished), its devices that nobody publishes, and with
              C(vanished), what is published and not there.
          returned: with O(nodes)
          type: dict
          sample: {}
        answered_at:
          description: The time of the answer, RFC 3339.
          returned: without O(nodes)
          type: str
          sample: "2026-11-23T12:00:00Z"
        run:
          description: The value of O(run).
          returned: without O(nodes)
          type: str
          sample: ""
        not_asked:
          description: The nodes that were not asked.
          returned: with O(nodes)
          type: list
          elements: str
          sample: []
        silent:
          description: The nodes that have not answered.
          returned: with O(nodes)
          type: list
          elements: str
          sample: []
        totals:
          description: How many there are of everything in the fleet.
          returned: with O(nodes)
          type: dict
          sample:
            nodes: 2
            devices: 16
            unhealthy: 0
            unread: 0
            partitions: 40
            made_by_hand: 0
            memory_bytes: 1368332943360
            drifting: 0
            published: 120
            available: 90
            claims: 12
            waiting: 1
        products:
          description: By product, how many of it the fleet has.
          returned: with O(nodes)
          type: dict
          sample: {"NVIDIA H100 80GB HBM3": 16}
        picture:
          description:
            - The fleet as data to draw. C(docs/report.schema.json) of the collection describes it, and the playbook writes it as JSON.
            - It has C(totals); C(nodes) with their C(devices), each in one C(state) (V(sick), V(withheld), V(full), V(partly) or V(free)), with
              C(partitions) where they lie and the C(claims) that have them, and what still C(fits); C(room), how many claims of each kind can still be served;
              C(claims); and who is C(waiting), since when and for what reason.
          returned: with O(nodes)
          type: dict
          sample: {}
        cluster:
          description: Whether the cluster was asked.
          returned: with O(nodes)
          type: bool
          sample: true
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: layout-unreadable
"""

import json
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._claim_explanations import why_pods_wait
from ansible_collections.dra.accelerators.plugins.module_utils._claims_ask import (
    list_claims,
    pending_pods,
    pods_by_name,
)
from ansible_collections.dra.accelerators.plugins.module_utils._device_classes import VERSIONS as CLASS_VERSIONS
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    ApiError,
    connect,
    served_version,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout_module import look_at
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils._node import ask_root
from ansible_collections.dra.accelerators.plugins.module_utils._report import Answer, node_report
from ansible_collections.dra.accelerators.plugins.module_utils._taint_rules import GROUP, PLURAL, served_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend import BACKENDS, vendors_there
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.claims import facts_by
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import devices
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError, NotFound
from ansible_collections.dra.accelerators.plugins.module_utils.core.layout_differences import told_by_slices
from ansible_collections.dra.accelerators.plugins.module_utils.core.layout_rules import Rule, parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.answers import (
    duplicate_class_notes,
    fleet_report,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.fleet import VERSION, picture
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.former import remember
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.waiting import unexplained
from ansible_collections.dra.accelerators.plugins.module_utils.core.prepared import (
    ClaimFiles,
    PreparedClaim,
    prepared_claims,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.times import now_text

FACT = "accelerator_report"
CONSTRAINTS: dict[str, Any] = {
    "mutually_exclusive": [("nodes", "layout"), ("nodes", "vendor")],
    "required_together": API_REQUIRED_TOGETHER,
}


def argument_spec() -> dict[str, Any]:
    return {
        **INTERPRETER_OPTION,
        **API_OPTIONS,
        "vendor": {"type": "list", "elements": "str"},
        "layout": {"type": "list", "elements": "dict"},
        "layout_file": {"type": "path", "default": "/etc/dra-accelerators/layout.json"},
        "kubelet_root": {"type": "path", "default": "/var/lib/kubelet"},
        "root": {"type": "path", "default": "/opt/dra-accelerators"},
        "nodes": {"type": "dict"},
        "not_asked": {"type": "list", "elements": "str", "default": []},
        "run": {"type": "str", "default": ""},
        "cluster": {"type": "bool", "default": True},
        "health": {"type": "bool", "default": True},
        "reasons": {"type": "dict", "default": {}},
        "explain": {"type": "bool", "default": True},
        "former": {"type": "path"},
    }


def read_layout(system: System, params: dict[str, Any]) -> tuple[tuple[Rule, ...] | None, str]:
    """Return the rules of the node's layout, None where it has none, and where they are from. Raises AcceleratorError."""
    if params["layout"] is not None:
        return parse_rules(params["layout"]), "the option layout"
    path = params["layout_file"]
    if not system.exists(path):
        return None, ""
    try:
        document = json.loads(system.read_text(path))
    except (OSError, ValueError) as error:
        raise AcceleratorError(
            f"layout_file {path} cannot be read: {error}",
            hint="Expected a JSON list of rules. The roles nvidia_mig and ascend_vnpu write it.",
            code="layout-unreadable",
        ) from error
    return parse_rules(document.get("layout") if isinstance(document, dict) else document), path


def ask(vendor: str, system: System, kubelet_root: str) -> Answer:
    """Ask one vendor's driver for its devices, and the node driver's store for their claims; why there is no answer is one."""
    backend = BACKENDS[vendor](system)
    state_path = f"{kubelet_root}/plugins/{backend.driver_name}/state.db"
    claims: tuple[PreparedClaim, ...] = ()
    try:
        claims = prepared_claims(state_path, ClaimFiles(kind=backend.cdi_kind))
        backend.open()
        try:
            return Answer(vendor, backend.driver_name, look_at(backend, state_path), claims)
        finally:
            backend.close()
    except AcceleratorError as error:
        return Answer(vendor, backend.driver_name, None, claims, str(error))


def of_node(params: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the node that this runs on. Raises AcceleratorError."""
    system = System()
    unknown = sorted(set(params["vendor"] or ()) - set(BACKENDS))
    if unknown:
        raise NotFound(
            f"There is no vendor {', '.join(unknown)}",
            hint=f"The vendors known are {', '.join(sorted(BACKENDS))}.",
            code="unknown-vendor",
        )
    rules, source = read_layout(system, params)
    vendors = tuple(dict.fromkeys(params["vendor"] or vendors_there(system)))
    if "nvidia" in vendors:
        # A binding that is nowhere to be found is a driver that is not there: the backend says so when it is opened.
        find_binding("pynvml", params["interpreter"])
    programs = ask_root(system, params["root"])
    versions = {
        "kernel": os.uname().release,
        "release": programs["release"],
        "environment": programs["environment"],
    }
    report = node_report([ask(each, system, params["kubelet_root"]) for each in vendors], rules, source, versions)
    return {**report, "answered_at": now_text(), "run": params["run"]}


def of_fleet(module: AnsibleModule) -> dict[str, Any]:
    """Return the answer of a fleet, of what its nodes have answered. Raises AcceleratorError."""
    nodes, reasons = of_run(module.params["nodes"], module.params["run"]), checked_reasons(module.params["reasons"])
    generated, former = now_text(), read_former(module.params["former"])
    not_asked = module.params["not_asked"]
    if not module.params["cluster"]:
        report = fleet_report(nodes, None, [], not_asked)
        return {**report, "picture": picture(report, None, generated=generated, former=former)}
    api = connect(module)
    drivers = {each["driver_name"] for report in nodes.values() for each in (report or {}).get("drivers", ())}
    found, slices = list_claims(api, drivers)
    pods = pods_by_name(api, found) if module.params["health"] else {}
    pending = pending_pods(api) if module.params["health"] else None
    published = devices(slices, found)
    report = fleet_report(nodes, published, facts_by(found, published, pods), not_asked)
    report["attention"] += duplicate_classes(api)
    rules = rules_there(api)
    explained: dict[str, Any] = {}
    waiting = unexplained(pending or (), reasons)
    if waiting and module.params["explain"]:
        explained, note = why_pods_wait(
            api, nodes, waiting, {"ResourceClaim": found, "ResourceSlice": slices, "DeviceTaintRule": rules}
        )
        report["attention"] += [{"node": "", **note}] if note else []
    drawn = picture(
        report,
        published,
        pending=pending,
        rules=rules,
        reasons=reasons,
        explained=explained,
        generated=generated,
        former=former,
        differing=told_by_slices(slices),
    )
    return {**report, "picture": drawn}


def of_run(nodes: dict[str, Any], run: str) -> dict[str, Any]:
    """Return the answers of nodes. An answer of a different run becomes an empty one."""
    return {name: each if each and run in ("", each.get("run")) else {} for name, each in nodes.items()}


def read_former(path: str | None) -> dict[str, Any] | None:
    """Return the picture of a former run, None where there is none. Raises AcceleratorError for what is no picture."""
    system = System()
    if not path or not system.exists(path):
        return None
    try:
        found = json.loads(system.read_text(path))
        if found["version"] != VERSION:
            raise ValueError(f"its version is {found['version']}")
        remember(found, "")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise AcceleratorError(
            f"former {path} is no picture of a former run: {error!r}",
            hint=f"Expected the JSON that the playbook dra.accelerators.report writes, version {VERSION}. Remove the file, or name another one.",
            code="former-unreadable",
        ) from error
    return dict(found)


def checked_reasons(reasons: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return why claims wait as it was given. Raises AcceleratorError for what says nothing."""
    for name, each in reasons.items():
        if not isinstance(each, dict) or not each.get("message"):
            raise AcceleratorError(
                f"reasons has {each!r} for {name}",
                hint="Expected a dictionary with a message, and where wanted a code and a remedy.",
                code="invalid-reason",
            )
    return reasons


def rules_there(api: Api) -> list[dict[str, Any]]:
    """Return the DeviceTaintRules, none where the cluster has no such objects or they may not be seen. Raises ApiError."""
    try:
        version = served_rules(api)
        return api.list_all(f"/apis/{GROUP}/{version}/{PLURAL}", {})
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise


def duplicate_classes(api: Api) -> list[dict[str, Any]]:
    """Return a warning for each extended resource of several DeviceClasses; none without the right to list these. Raises ApiError."""
    try:
        version = served_version(api, GROUP, CLASS_VERSIONS)
        classes = api.list_all(f"/apis/{GROUP}/{version}/deviceclasses", {})
    except ApiError as error:
        if error.status in (403, 404):
            return []
        raise
    return duplicate_class_notes(classes)


def work(module: AnsibleModule) -> dict[str, Any]:
    report = of_node(module.params) if module.params["nodes"] is None else of_fleet(module)
    return {"changed": False, "ansible_facts": {FACT: report}}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
