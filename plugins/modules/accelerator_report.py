#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: accelerator_report
version_added: 0.1.0
short_description: Report the state of the accelerators of a node or a fleet
description:
  - Without O(nodes), the module reports the state of the node on which it runs. The report contains the devices, their partitions and the owners of the
    partitions, differences from the node's layout, rules of the layout that would be refused, health, prepared claims, and versions.
  - With O(nodes), the module merges the reports of many nodes with the published devices and the claims of the cluster. It accesses no device, and
    runs on any host with access to the API server.
  - C(attention) lists all problems that need attention, each with a stable code.
  - With O(nodes), C(picture) contains the same data for display. It describes each device with the positions of its partitions and its claims, the
    waiting claims with the reasons, and the free capacity.
  - The playbook C(dra.accelerators.report) runs this module on all nodes of a fleet, and writes the result as an HTML page, as JSON, and as Markdown.
notes:
  - Without O(nodes), the module needs root, and does not need the Python package C(kubernetes). With O(nodes), it needs this package, but not root.
  - With O(nodes), the module needs the permissions to list C(resourceclaims) and C(resourceslices) in the API group C(resource.k8s.io), and with
    O(health) to list C(pods) in all namespaces. It reads C(devicetaintrules) if the cluster serves them and the permissions allow it.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
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
      - The vendors whose drivers are queried. By default, all vendors that have devices on the node.
    type: list
    elements: str
  layout:
    description:
      - The rules for the layout of the node's devices. By default, the module reads the rules from O(layout_file).
    type: list
    elements: dict
  layout_file:
    description:
      - The file with the rules that are applied at boot. If the file does not exist, the node has no layout, and the module compares nothing.
    type: path
    default: /etc/dra-accelerators/layout.json
  kubelet_root:
    description: The kubelet's root directory, its option C(--root-dir). The node drivers keep the records of prepared claims below it.
    type: path
    default: /var/lib/kubelet
  root:
    description: The directory of the collection's programs on the node.
    type: path
    default: /opt/dra-accelerators
  nodes:
    description:
      - The reports that this module returned on the nodes, by the name of the node in the cluster. Use an empty dictionary for a node that did not
        respond.
    type: dict
  not_asked:
    description:
      - With O(nodes), the names of nodes that this run did not query, for example because of C(--limit). The report lists them in C(not_asked) instead of
        C(silent), and shows their data from their ResourceSlices and from O(previous).
    type: list
    elements: str
    default: []
  run:
    description:
      - A string that identifies the run. On a node, the report contains this value. With O(nodes), the module treats reports of other runs, for example
        from a fact cache, as missing. An empty string accepts the reports of all runs.
    type: str
    default: ""
  cluster:
    description: With O(nodes), whether to read the cluster. If V(false), the report contains only the reports of the nodes.
    type: bool
    default: true
  health:
    description: With O(nodes), whether to read the pods for the health of their devices, as reported by the kubelet, and for the reasons why they wait.
    type: bool
    default: true
  reasons:
    description:
      - With O(nodes), custom reasons why claims wait, by C(namespace/name) of the claim. They replace the explanation of O(explain) and the message of
        the scheduler. Each reason has a C(message), and optionally a C(code) and a C(remedy).
    type: dict
    default: {}
  explain:
    description:
      - With O(nodes) and O(health), whether to explain why claims that are not in O(reasons) are pending, and the nearest change, as
        M(dra.accelerators.claim_explanation_info) does. Limits are twenty different pods, the longest pending ones first, one minute, and twelve
        nodes.
      - Needs the Python package C(cel-expr-python), with Python 3.11 or newer, and the permissions to list C(nodes), and C(deviceclasses) and
        C(resourceclaimtemplates) in C(resource.k8s.io). If one of them is missing, the report contains the scheduler's message, and C(attention)
        lists the missing package or permission.
    type: bool
    default: true
  previous:
    description:
      - With O(nodes), a JSON file with the C(picture) of a previous run. If the node or the driver of a device does not respond, the module takes the
        device's health and its differences from the layout from this file, and marks them with their age (C(as_of)).
      - If the file does not exist, the report contains no earlier data.
    type: path
seealso:
  - module: dra.accelerators.accelerator_info
  - module: dra.accelerators.claim_info
"""

EXAMPLES = r"""
- name: Report the state of a node
  dra.accelerators.accelerator_report:

- name: Show the problems that need attention
  ansible.builtin.debug:
    msg: "{{ ansible_facts.accelerator_report.attention | map(attribute='message') }}"

- name: Compare a node with a layout that is not applied yet
  dra.accelerators.accelerator_report:
    layout:
      - match: {}
        mode: static
        partitions:
          1g.10gb: 7

- name: Read the cluster and merge it with the reports of the nodes
  dra.accelerators.accelerator_report:
    nodes:
      gpu-node-1: "{{ hostvars['gpu-node-1'].ansible_facts.accelerator_report }}"
      gpu-node-2: "{{ hostvars['gpu-node-2'].ansible_facts.accelerator_report }}"
  delegate_to: localhost

- name: Set a custom reason why a claim waits
  dra.accelerators.accelerator_report:
    nodes:
      gpu-node-1: "{{ hostvars['gpu-node-1'].ansible_facts.accelerator_report }}"
    reasons:
      research/training:
        message: The team has used its whole quota.
        remedy: Increase the quota, or wait until Monday.
  delegate_to: localhost

- name: Show the previous state of nodes that do not respond
  dra.accelerators.accelerator_report:
    nodes:
      gpu-node-1: "{{ hostvars['gpu-node-1'].ansible_facts.accelerator_report }}"
      gpu-node-2: {}
    previous: accelerators.json
  delegate_to: localhost

- name: Merge the reports of the nodes without a cluster
  dra.accelerators.accelerator_report:
    nodes:
      gpu-node-1: "{{ hostvars['gpu-node-1'].ansible_facts.accelerator_report }}"
      gpu-node-2: {}
    cluster: false
  delegate_to: localhost
"""

RETURN = r"""
ansible_facts:
  description: The report, for later tasks, plays, and templates.
  returned: success
  type: dict
  contains:
    accelerator_report:
      description: The report of the node, or with O(nodes) the report of the fleet.
      returned: success
      type: dict
      contains:
        devices:
          description:
            - The devices. C(vendor), C(index), C(uuid), C(product), C(pci_address), C(pcie_root), C(numa_node), C(memory_bytes), C(memory_slices),
              C(partitioning), C(processes), and C(health) are the same as in M(dra.accelerators.accelerator_info). C(claims) are the claims that
              the node has prepared.
            - C(groups) are the groups of directly linked devices to which the device belongs, by the kind of group (C(NVLink), C(fabric),
              C(HCCS ring), C(card), or C(super-pod)). An NVLink group is named by the indices of its devices, which links or the switches of the
              host connect.
            - C(kind) is one of RV(ansible_facts.accelerator_report.kinds). C(rule) is the layout rule of the device without C(match). It is null if no
              rule matches.
            - Each of the C(partitions) has C(profile), C(profile_id), C(placement), C(uuid), C(memory_bytes), C(claims), and C(owner). The owner is
              V(claim) if the node driver created the partition for a claim, V(administrator) if another program or user created it, and V(foreign) if
              it was created manually in a form that no profile has.
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
            - The properties that all devices of a kind share, by the name of the kind. They are the partition C(profiles), as in
              M(dra.accelerators.accelerator_info), C(memory_slices), C(capacities), and C(published), which describes how the node driver would publish
              the whole device and its partitions. M(dra.accelerators.fleet_plan) uses these properties.
          returned: without O(nodes)
          type: dict
          sample: {}
        unread:
          description: The devices that exist but could not be read, each with the reason.
          returned: without O(nodes)
          type: list
          elements: str
          sample: []
        drivers:
          description: The queried vendors, whether their driver responded (C(available)), and the reason if it did not (C(reason)).
          returned: without O(nodes)
          type: list
          elements: dict
          sample:
            - {vendor: nvidia, driver_name: gpu.nvidia.com, available: true, reason: ""}
        layout:
          description:
            - Whether a layout is C(known), its origin (C(source)), whether all devices match it (C(matches)), and the C(differences), as
              M(dra.accelerators.nvidia_mig_info) returns them.
            - C(refused) lists the errors that would occur if the layout was applied now, each with C(code), C(message), and C(hint).
              C(resets) are the UUIDs of the devices that would need a reset.
          returned: without O(nodes)
          type: dict
          sample: {known: true, source: /etc/dra-accelerators/layout.json, matches: true, differences: [], refused: [], resets: []}
        claims:
          description:
            - For a node, the claims that it has prepared, with C(namespace), C(name), C(uid), C(state), C(driver), and the names of their C(devices).
            - For a fleet, all claims of the cluster, as M(dra.accelerators.claim_info) returns them.
          returned: success
          type: list
          elements: dict
          sample: []
        versions:
          description:
            - For a node, the versions of the C(kernel), of the C(release) and C(environment) of the collection's programs, and of the vendors' C(drivers).
            - For a fleet, the names of the nodes, by component and version.
          returned: success
          type: dict
          sample: {kernel: 6.1.0-37-amd64, release: 0.1.0-1a2b3c4d, environment: 0123456789ab, drivers: {nvidia: 580.95.5}}
        attention:
          description:
            - The problems that need attention, each with a C(code), a C(message), a C(remedy), and the UUID of the C(device), if the problem concerns
              one device. For a fleet, each problem also has the C(node), which is empty if the problem does not concern a single node.
            - The codes of a node are V(driver-unavailable), V(device-unread), V(device-unhealthy), V(mode-pending), V(no-partitions), V(made-by-hand),
              V(layout-differs), and V(layout-refused).
            - The additional codes of a fleet are V(node-silent), V(nodes-not-asked), V(node-unknown), V(not-published), V(published-and-gone), V(tainted),
              V(claim-waits), V(claim-unhealthy), V(claim-of-the-past), V(versions-differ), V(duplicate-extended-resource), and V(not-explained).
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
            - The reports of the nodes, by node name, with data from the cluster. C(cluster_claims) are the claims that hold a device of the node.
            - C(published) contains the numbers of published C(devices), of C(available) devices, and of C(held) devices, and the list of C(tainted)
              devices. C(unpublished) lists the devices that no driver publishes. C(vanished) lists published devices that do not exist.
          returned: with O(nodes)
          type: dict
          sample: {}
        answered_at:
          description: The time of the report, in RFC 3339 format.
          returned: without O(nodes)
          type: str
          sample: "2026-11-23T12:00:00Z"
        run:
          description: The value of O(run).
          returned: without O(nodes)
          type: str
          sample: ""
        not_asked:
          description: The nodes that this run did not query.
          returned: with O(nodes)
          type: list
          elements: str
          sample: []
        silent:
          description: The nodes that did not respond.
          returned: with O(nodes)
          type: list
          elements: str
          sample: []
        totals:
          description: The total numbers for the fleet.
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
          description: The number of devices in the fleet, by product.
          returned: with O(nodes)
          type: dict
          sample: {"NVIDIA H100 80GB HBM3": 16}
        picture:
          description:
            - The data of the fleet for display. C(docs/report.schema.json) of the collection is its schema. The playbook writes it as JSON.
            - C(nodes) contains the nodes with their C(devices). Each device has a C(state) (V(sick), V(withheld), V(full), V(partly), or V(free)), its
              C(partitions) with their placements and the C(claims) that hold them, and the number of additional claims by profile (C(fits)).
            - C(totals) contains the total numbers, C(room) the number of additional claims of each kind that the fleet can serve, and C(claims) the
              claims. C(waiting) lists the waiting claims, with the time since when they wait and the reason.
          returned: with O(nodes)
          type: dict
          sample: {}
        cluster:
          description: Whether the module read the cluster.
          returned: with O(nodes)
          type: bool
          sample: true
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: layout-unreadable
"""

import json
import os
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._host.node_facts import read_program_facts
from ansible_collections.dra.accelerators.plugins.module_utils._host.state_directory import check_known_vendors
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.claim_reader import (
    list_claims,
    pending_pods,
    pods_by_name,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    Api,
    ApiError,
    connect,
    served_version,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.managed_classes import (
    VERSIONS as CLASS_VERSIONS,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.taint_rules import (
    GROUP,
    PLURAL,
    served_rules,
)
from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import scan_node
from ansible_collections.dra.accelerators.plugins.module_utils._module import INTERPRETER_OPTION, find_binding, run
from ansible_collections.dra.accelerators.plugins.module_utils._report.node_report import Answer, node_report
from ansible_collections.dra.accelerators.plugins.module_utils._scheduling.explain_sources import why_pods_wait
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.claims import facts_by
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import devices
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.layout_differences import (
    differences_in_slices,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import Rule, parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.answers import (
    duplicate_class_notes,
    fleet_report,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.fleet import VERSION, picture
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.former import read_former_devices
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.waiting import unexplained
from ansible_collections.dra.accelerators.plugins.module_utils.core.store.prepared_claims import (
    ClaimFiles,
    PreparedClaim,
    prepared_claims,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.times import now_text
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.registry import BACKENDS, vendors_there

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
        "previous": {"type": "path"},
    }


def read_layout(system: System, params: dict[str, Any]) -> tuple[tuple[Rule, ...] | None, str]:
    """Return the rules of the node's layout (None without a layout) and their origin. Raises AcceleratorError."""
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


def query_driver(vendor: str, system: System, kubelet_root: str) -> Answer:
    """Return the devices and the prepared claims of one vendor's driver, or the reason why they are unavailable."""
    backend = BACKENDS[vendor](system)
    state_path = f"{kubelet_root}/plugins/{backend.driver_name}/state.db"
    claims: tuple[PreparedClaim, ...] = ()
    try:
        claims = prepared_claims(state_path, ClaimFiles(kind=backend.cdi_kind))
        backend.open()
        try:
            return Answer(vendor, backend.driver_name, scan_node(backend, state_path), claims)
        finally:
            backend.close()
    except AcceleratorError as error:
        return Answer(vendor, backend.driver_name, None, claims, str(error))


def report_node(params: dict[str, Any]) -> dict[str, Any]:
    """Return the report of this node. Raises AcceleratorError."""
    system = System()
    check_known_vendors(params["vendor"] or ())
    rules, source = read_layout(system, params)
    vendors = tuple(dict.fromkeys(params["vendor"] or vendors_there(system)))
    if "nvidia" in vendors:
        # A missing binding is reported as an unavailable driver when the backend opens.
        find_binding("pynvml", params["interpreter"])
    programs = read_program_facts(system, params["root"])
    versions = {
        "kernel": os.uname().release,
        "release": programs["release"],
        "environment": programs["environment"],
    }
    report = node_report(
        [query_driver(each, system, params["kubelet_root"]) for each in vendors], rules, source, versions
    )
    return {**report, "answered_at": now_text(), "run": params["run"]}


def report_fleet(module: AnsibleModule) -> dict[str, Any]:
    """Return the report of a fleet from the reports of its nodes. Raises AcceleratorError."""
    nodes, reasons = (
        reports_of_run(module.params["nodes"], module.params["run"]),
        checked_reasons(module.params["reasons"]),
    )
    generated, previous = now_text(), read_previous(module.params["previous"])
    not_asked = module.params["not_asked"]
    if not module.params["cluster"]:
        report = fleet_report(nodes, None, [], not_asked)
        return {**report, "picture": picture(report, None, generated=generated, former=previous)}
    api = connect(module)
    drivers = {each["driver_name"] for report in nodes.values() for each in (report or {}).get("drivers", ())}
    found, slices = list_claims(api, drivers)
    pods = pods_by_name(api, found) if module.params["health"] else {}
    pending = pending_pods(api) if module.params["health"] else None
    published = devices(slices, found)
    report = fleet_report(nodes, published, facts_by(found, published, pods), not_asked)
    report["attention"] += duplicate_classes(api)
    rules = list_taint_rules(api)
    explained: dict[str, Any] = {}
    waiting = unexplained(pending or (), reasons)
    if waiting and module.params["explain"]:
        explained, note = why_pods_wait(
            api, nodes, waiting, {"ResourceClaim": found, "ResourceSlice": slices, "DeviceTaintRule": rules}
        )
        report["attention"] += [{"node": "", **note}] if note else []
    fleet_picture = picture(
        report,
        published,
        pending=pending,
        rules=rules,
        reasons=reasons,
        explained=explained,
        generated=generated,
        former=previous,
        differing=differences_in_slices(slices),
    )
    return {**report, "picture": fleet_picture}


def reports_of_run(nodes: dict[str, Any], run: str) -> dict[str, Any]:
    """Return the reports of nodes. A report of a different run is replaced by an empty one."""
    return {name: each if each and run in ("", each.get("run")) else {} for name, each in nodes.items()}


def read_previous(path: str | None) -> dict[str, Any] | None:
    """Return the picture of a previous run, or None if the file does not exist. Raises AcceleratorError for an invalid file."""
    system = System()
    if not path or not system.exists(path):
        return None
    try:
        found = json.loads(system.read_text(path))
        if found["version"] != VERSION:
            raise ValueError(f"its version is {found['version']}")
        read_former_devices(found, "")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise AcceleratorError(
            f"{path} (option previous) is not the picture of a previous run: {error!r}",
            hint=f"Expected the JSON that the playbook dra.accelerators.report writes, version {VERSION}. Remove the file, or set another one.",
            code="previous-unreadable",
        ) from error
    return dict(found)


def checked_reasons(reasons: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the given reasons unchanged. Raises AcceleratorError for a reason without a message."""
    for name, each in reasons.items():
        if not isinstance(each, dict) or not each.get("message"):
            raise AcceleratorError(
                f"reasons has {each!r} for {name}",
                hint="Expected a dictionary with a message, and optionally a code and a remedy.",
                code="invalid-reason",
            )
    return reasons


def list_taint_rules(api: Api) -> list[dict[str, Any]]:
    """Return the DeviceTaintRules, or an empty list if the API server does not serve or does not allow them. Raises ApiError."""
    try:
        version = served_rules(api)
        return api.list_all(f"/apis/{GROUP}/{version}/{PLURAL}", {})
    except ApiError as error:
        if error.status == 403 or error.code == "api-version":
            return []
        raise


def duplicate_classes(api: Api) -> list[dict[str, Any]]:
    """Return a warning for each extended resource of several DeviceClasses, or none if listing is not allowed. Raises ApiError."""
    try:
        version = served_version(api, GROUP, CLASS_VERSIONS)
        classes = api.list_all(f"/apis/{GROUP}/{version}/deviceclasses", {})
    except ApiError as error:
        if error.status == 403 or error.code == "api-version":
            return []
        raise
    return duplicate_class_notes(classes)


def work(module: AnsibleModule) -> dict[str, Any]:
    report = report_node(module.params) if module.params["nodes"] is None else report_fleet(module)
    return {"changed": False, "ansible_facts": {FACT: report}}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
