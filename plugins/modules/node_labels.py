#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: node_labels
version_added: 0.1.0
short_description: Keep labels of a Node, beside those of others
description:
  - Brings the labels that this collection keeps on a Node to what is wanted, by server-side apply as the manager
    C(dra-accelerators-node-features). What it has written before and is not wanted any more is removed.
  - Only labels that this collection writes for the devices of O(vendors) are written. Others are rejected, and a warning names them. A node
    reports the labels, and the operator's rights write them, so a node could otherwise give itself any label.
  - A label of the same name that somebody else has written is left as it is, whatever its value, and named.
  - Where Node Feature Discovery (NFD) runs on the node, labels go there as a file that it reads. The module decides that, says what is to be in
    the file, and notes on the Node that there is one; the file itself is written on the node, as the role P(dra.accelerators.node_features#role) does.
notes:
  - Needs the permissions to get and patch the Node, and with O(way=auto) to list C(nodefeatures) and C(daemonsets) where the API group
    C(nfd.k8s-sigs.io) is served.
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
      - The API server validates the write in a dry run, which requires the same permissions.
  diff_mode:
    support: full
  idempotent:
    support: full
  platform:
    support: full
    platforms: posix
options:
  node:
    description: Name of the Node. That there is none is part of the answer and no failure.
    type: str
    required: true
  state:
    description:
      - Whether the labels are kept. V(absent) removes all that this module has written, and needs no O(labels).
    type: str
    default: present
    choices:
      - present
      - absent
  labels:
    description:
      - The labels, with their values; a value may be empty. All that are not among them and were written before are removed.
      - The filter P(dra.accelerators.vendor_facts#filter) lists the names that are allowed.
    type: dict
    default: {}
  labels_without_nfd:
    description: Labels that NFD writes itself where it runs, so that they are wanted only elsewhere.
    type: dict
    default: {}
  vendors:
    description: Vendors whose labels may be written.
    type: list
    elements: str
    default: [ascend, nvidia]
    choices: [ascend, nvidia]
  way:
    description:
      - Which way the labels go. V(auto) is V(file) where a DaemonSet of NFD has pods and NFD knows the node, and V(api) elsewhere.
      - With V(file), labels below C(kubernetes.io) that NFD takes from nobody go through the API.
    type: str
    default: auto
    choices:
      - auto
      - api
      - file
  file_gone:
    description: Says that the feature file is not there any more, so that the note of it is removed from the Node.
    type: bool
    default: false
seealso:
  - module: dra.accelerators.accelerator_info
  - name: Node Feature Discovery
    description: What reads the file.
    link: https://kubernetes-sigs.github.io/node-feature-discovery/stable/usage/customization-guide.html
"""

EXAMPLES = r"""
- name: Keep two labels on a Node, through the API
  dra.accelerators.node_labels:
    node: gpu-node-1
    labels:
      nvidia.com/gpu.count: "8"
      nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3
    way: api
  delegate_to: localhost

- name: Remove them
  dra.accelerators.node_labels:
    node: gpu-node-1
    state: absent
  delegate_to: localhost
"""

RETURN = r"""
exists:
  description: Whether there is such a Node.
  returned: success
  type: bool
  sample: true
way:
  description: Which way the labels go, V(api) or V(file); empty where there is no Node.
  returned: success
  type: str
  sample: api
labels:
  description: What this module keeps on the Node through the API, or in check mode would.
  returned: success
  type: dict
  sample: {"nvidia.com/gpu.count": "8"}
file_labels:
  description: What is to be in the feature file.
  returned: success
  type: dict
  sample: {}
file_content:
  description: The same as the file has it.
  returned: success
  type: str
  sample: ""
had_file:
  description: Whether a feature file was noted on the Node before the run, so that there may be one.
  returned: success
  type: bool
  sample: false
coming:
  description: Labels that the Node gets, or would in check mode, through the API or by the feature file.
  returned: success
  type: dict
  sample: {"nvidia.com/gpu.count": "8"}
changing:
  description: Labels of ours on the Node that get another value, with that value. What is in the feature file is not known here.
  returned: success
  type: dict
  sample: {}
going:
  description: Labels of ours that go from the Node, or from the feature file.
  returned: success
  type: list
  elements: str
  sample: ["nvidia.com/mig-1g.10gb.count"]
settled:
  description: Whether there is nothing to do for this module, so that after a look in check mode no real run is needed.
  returned: success
  type: bool
  sample: true
left:
  description: Labels that are somebody else's and were left as they are, each with its managers. A warning names them too.
  returned: success
  type: dict
  sample: {"nvidia.com/gpu.product": ["nfd-master"]}
rejected:
  description: Labels that were not written because this collection does not write labels of that name, each with the reason. A warning names them too.
  returned: success
  type: dict
  sample: {"node-role.kubernetes.io/control-plane": "it is not a label of nvidia devices"}
nfd:
  description: What was found of Node Feature Discovery. C(served) (its API), C(daemons) and C(knows_node); empty where nothing was asked.
  returned: success
  type: dict
  sample: {"served": false, "daemons": [], "knows_node": false}
error_code:
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: api-error
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

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._node_labels import (
    AUTO,
    WAYS,
    NodeLabels,
    Wanted,
    file_content,
    split_allowed,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.backend import BACKENDS
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError

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
    wanted = Wanted({})
    rejected: dict[str, str] = {}
    if params["state"] == "present":
        labels, refused = split_allowed(_texts(params["labels"]), params["vendors"])
        without_nfd, refused_without_nfd = split_allowed(_texts(params["labels_without_nfd"]), params["vendors"])
        wanted, rejected = Wanted(labels, without_nfd), {**refused, **refused_without_nfd}
    for name, reason in rejected.items():
        module.warn(
            f"The label {name[:200]!r} is not written on {params['node']}: {reason}. The node reports it, so examine the node."
        )
    kept = NodeLabels(connect(module), params["node"])
    done = kept.bring_about(wanted, _way(params), file_gone=params["file_gone"], dry=module.check_mode)
    plan = done.plan
    if plan is None:
        module.warn(f"There is no Node {params['node']}, so that nothing was labelled.")
    left = dict(plan.left) if plan is not None else {}
    for name, managers in left.items():
        module.warn(
            f"The label {name} of {params['node']} is left as it is: {', '.join(managers) or 'somebody'} has it."
        )
    return {
        "changed": done.changed,
        "settled": not done.changed,
        "exists": plan is not None,
        "way": plan.way if plan is not None else "",
        "labels": dict(plan.labels) if plan is not None else {},
        "file_labels": dict(plan.in_file) if plan is not None else {},
        "file_content": file_content(plan.in_file) if plan is not None else "",
        "had_file": done.had_file,
        "coming": done.coming(),
        "changing": {name: value for name, value in done.after.items() if done.before.get(name, value) != value},
        "going": done.going(),
        "left": {name: list(managers) for name, managers in left.items()},
        "rejected": rejected,
        "nfd": asdict(kept.discovery) if kept.discovery is not None else {},
        "diff": {"before": dict(done.before), "after": dict(done.after)},
    }


def _way(params: dict[str, Any]) -> str:
    # What is to go is nowhere to be written: nobody has to be asked where.
    return "api" if params["state"] == "absent" else str(params["way"])


def _texts(labels: dict[str, Any]) -> dict[str, str]:
    """Return what YAML has read as numbers and truth values as the texts that they were."""
    empty = sorted(str(name) for name, value in labels.items() if value is None)
    if empty:
        raise AcceleratorError(
            f"The labels {', '.join(empty)} have no value (null)",
            hint='Write "" for a label with an empty value, or leave the label out to have it removed.',
            code="invalid-label",
        )
    return {str(name): str(value).lower() if isinstance(value, bool) else str(value) for name, value in labels.items()}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
