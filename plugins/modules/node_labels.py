#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_labels
version_added: 0.1.0
short_description: Manage the accelerator labels of a Node
description:
  - Sets the labels of this collection on a Node by server-side apply with the field manager C(dra-accelerators-node-features). The module removes
    labels that it wrote earlier and that are not listed any more.
  - Writes only labels that this collection defines for the devices of O(vendors). Other labels are rejected, and a warning names them. A node reports
    its labels and the operator's permissions write them. Without this restriction, a node could assign itself any label.
  - Does not change a label of the same name that another program wrote, whatever its value, and reports it.
  - If Node Feature Discovery (NFD) runs on the node, NFD reads the labels from a file. The module selects the method, returns the content of the
    file, and records on the Node that the file exists. The role P(dra.accelerators.node_features#role) writes the file on the node.
notes:
  - Requires the permissions to get and patch the Node. With O(way=auto), and if the API group C(nfd.k8s-sigs.io) is served, it also requires the
    permissions to list C(nodefeatures) and C(daemonsets).
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
      - The API server validates the changes in a dry run, which requires the same permissions.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  node:
    description: Name of the Node. If it does not exist, the module reports this in RV(exists) and does not fail.
    type: str
    required: true
  state:
    description:
      - Whether the Node has the labels. V(absent) removes all labels that this module wrote, and does not need O(labels).
    type: str
    default: present
    choices:
      - present
      - absent
  labels:
    description:
      - The labels and their values. A value can be empty. The module removes labels that it wrote earlier and that are not in this list.
      - The filter P(dra.accelerators.vendor_facts#filter) lists the allowed names.
    type: dict
    default: {}
  labels_without_nfd:
    description: Labels that NFD writes itself. The module writes them only if NFD does not run.
    type: dict
    default: {}
  vendors:
    description: Vendors whose labels the module can write.
    type: list
    elements: str
    default: [ascend, nvidia]
    choices: [ascend, nvidia]
  way:
    description:
      - How the labels are written. V(auto) is V(file) if a DaemonSet of NFD has pods and NFD reports the node, and V(api) otherwise.
      - With V(file), the module still writes labels below C(kubernetes.io) through the API if NFD does not accept them from a file.
    type: str
    default: auto
    choices:
      - auto
      - api
      - file
  file_gone:
    description: Whether the feature file no longer exists. If V(true), the module removes the record of the file from the Node.
    type: bool
    default: false
seealso:
  - module: dra.accelerators.accelerator_info
  - name: Node Feature Discovery
    description: How NFD reads labels from a feature file.
    link: https://kubernetes-sigs.github.io/node-feature-discovery/stable/usage/customization-guide.html
"""

EXAMPLES = r"""
- name: Set two labels on a Node through the API
  dra.accelerators.node_labels:
    node: gpu-node-1
    labels:
      nvidia.com/gpu.count: "8"
      nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3
    way: api
  delegate_to: localhost

- name: Remove the labels
  dra.accelerators.node_labels:
    node: gpu-node-1
    state: absent
  delegate_to: localhost
"""

RETURN = r"""
exists:
  description: Whether the Node exists.
  returned: success
  type: bool
  sample: true
way:
  description: How the labels are written, V(api) or V(file). Empty if the Node does not exist.
  returned: success
  type: str
  sample: api
labels:
  description: The labels that this module manages on the Node through the API. In check mode, the labels that it would manage.
  returned: success
  type: dict
  sample: {"nvidia.com/gpu.count": "8"}
file_labels:
  description: The labels for the feature file.
  returned: success
  type: dict
  sample: {}
file_content:
  description: The content of the feature file with these labels.
  returned: success
  type: str
  sample: ""
had_file:
  description: Whether a feature file was recorded on the Node before the run. The file can exist on the node.
  returned: success
  type: bool
  sample: false
coming:
  description: New labels of the Node, from the API or the feature file. In check mode, the labels that it would get.
  returned: success
  type: dict
  sample: {"nvidia.com/gpu.count": "8"}
changing:
  description: Labels of this module on the Node whose value changes, with the new value. The module does not read the values in the feature file.
  returned: success
  type: dict
  sample: {}
going:
  description: Labels of this module that are removed from the Node or from the feature file.
  returned: success
  type: list
  elements: str
  sample: ["nvidia.com/mig-1g.10gb.count"]
up_to_date:
  description: Whether the module has nothing to change. If V(true) in check mode, a run without check mode is not needed.
  returned: success
  type: bool
  sample: true
unmanaged:
  description: Labels of other programs that the module did not change, each with its field managers. A warning also names them.
  returned: success
  type: dict
  sample: {"nvidia.com/gpu.product": ["nfd-master"]}
rejected:
  description: Labels that the module did not write because this collection does not define them or because their value is invalid, each with the
    reason. A warning also names them.
  returned: success
  type: dict
  sample: {"node-role.kubernetes.io/control-plane": "it is not a label of nvidia devices"}
nfd:
  description: The state of Node Feature Discovery. C(served) reports whether its API is served, C(daemons) lists its DaemonSets with pods, and
    C(knows_node) is whether it reports the node. Empty if the module did not query it.
  returned: success
  type: dict
  sample: {"served": false, "daemons": [], "knows_node": false}
error_code:
  description: A stable code for the type of the error.
  returned: failure
  type: str
  sample: api-error
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

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.managed_labels import (
    AUTO,
    WAYS,
    DesiredLabels,
    NodeLabels,
    file_content,
    split_allowed,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.registry import BACKENDS

CONSTRAINTS: dict[str, Any] = {"required_together": API_REQUIRED_TOGETHER}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "node": {"type": "str", "required": True},
        "state": {"type": "str", "default": "present", "choices": ["present", "absent"]},
        "labels": {"type": "dict", "default": {}},
        "labels_without_nfd": {"type": "dict", "default": {}},
        "vendors": {"type": "list", "elements": "str", "default": sorted(BACKENDS), "choices": sorted(BACKENDS)},
        "way": {"type": "str", "default": AUTO, "choices": list(WAYS)},
        "file_gone": {"type": "bool", "default": False},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    wanted = DesiredLabels({})
    rejected: dict[str, str] = {}
    if params["state"] == "present":
        labels, refused = split_allowed(string_values(params["labels"]), params["vendors"])
        without_nfd, refused_without_nfd = split_allowed(string_values(params["labels_without_nfd"]), params["vendors"])
        wanted, rejected = DesiredLabels(labels, without_nfd), {**refused, **refused_without_nfd}
    for name, reason in rejected.items():
        module.warn(
            f"The label {name[:200]!r} is not written on {params['node']}: {reason}. Examine the node, because it reported this label."
        )
    node_labels = NodeLabels(connect(module), params["node"])
    done = node_labels.apply(wanted, write_method(params), file_gone=params["file_gone"], dry=module.check_mode)
    plan = done.plan  # None if the Node does not exist
    if plan is None:
        module.warn(f"The Node {params['node']} does not exist, so no labels were set.")
    left = dict(plan.left) if plan is not None else {}
    for name, managers in left.items():
        module.warn(
            f"The label {name} of {params['node']} was not changed: {', '.join(managers) or 'an unknown field manager'} owns it."
        )
    return {
        "changed": done.changed,
        "up_to_date": not done.changed,
        "exists": plan is not None,
        "way": plan.way if plan is not None else "",
        "labels": dict(plan.labels) if plan is not None else {},
        "file_labels": dict(plan.in_file) if plan is not None else {},
        "file_content": file_content(plan.in_file) if plan is not None else "",
        "had_file": done.had_file,
        "coming": done.added(),
        "changing": {name: value for name, value in done.after.items() if done.before.get(name, value) != value},
        "going": done.removed_names(),
        "unmanaged": {name: list(managers) for name, managers in left.items()},
        "rejected": rejected,
        "nfd": asdict(node_labels.discovery) if node_labels.discovery is not None else {},
        "diff": {"before": dict(done.before), "after": dict(done.after)},
    }


def write_method(params: dict[str, Any]) -> str:
    # Labels are removed from the Node. No feature file is written, so the option is irrelevant.
    return "api" if params["state"] == "absent" else str(params["way"])


def string_values(labels: dict[str, Any]) -> dict[str, str]:
    """Return label values that YAML has read as numbers and booleans as strings again."""
    empty = sorted(str(name) for name, value in labels.items() if value is None)
    if empty:
        raise AcceleratorError(
            f"The labels {', '.join(empty)} have no value (null)",
            hint='Set "" for a label with an empty value, or leave the label out to remove it.',
            code="invalid-label",
        )
    return {str(name): str(value).lower() if isinstance(value, bool) else str(value) for name, value in labels.items()}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
