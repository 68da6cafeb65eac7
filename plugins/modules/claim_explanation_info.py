#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: claim_explanation_info
version_added: 0.1.0
short_description: Explain why a claim has no devices
description:
  - Explains why the scheduler currently finds no devices for pods and ResourceClaims, by node and request. The module reports which selector, taint,
    counter, constraint, or other claim excludes devices, the number of remaining devices, and the nearest change that would make the claim
    schedulable.
  - The module searches like the scheduler, with the same devices in the same order, and evaluates selectors with a real CEL library. It verifies each
    proposed change with the same search.
  - The module explains objects of a cluster, manifests that are not applied yet, and objects of clusters that are saved in files.
notes:
  - The module needs the Python package C(cel-expr-python), which needs Python 3.11 or newer, on the host where it runs. This host is usually the
    Ansible controller, so delegate the task to it.
  - The module needs the permissions to list C(nodes) and C(pods), and C(resourceslices), C(resourceclaims), C(resourceclaimtemplates),
    C(deviceclasses), and C(devicetaintrules) in the API group C(resource.k8s.io). With O(cluster_src), it accesses no cluster.
  - The module considers the name, labels, and taints of a node, but not other conditions that can prevent a pod from running there, for example CPU,
    memory, or other pods.
  - Selectors with C(find) or C(findAll) also need the Python package C(google-re2). If it is missing, the module does not evaluate them.
  - Because users write selectors, each evaluation is limited to 2 s of CPU time and 512 MiB of memory. The module does not evaluate selectors that
    need more.
requirements:
  - cel-expr-python
  - google-re2 (optional)
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup_k8s
  - dra.accelerators._attributes.info_module
  - dra.accelerators._kubernetes
attributes:
  platform:
    support: full
    platforms: posix
options:
  pods:
    description:
      - The names of pods to explain with all their claims, as V(name) or V(namespace/name).
      - If O(pods), O(claims), O(src), and O(definition) are not set, the module explains all pending pods with claims, and all claims without devices
        for which no pod waits.
    type: list
    elements: str
    default: []
  claims:
    description:
      - The names of ResourceClaims to explain, in the same format. If a pod waits for a claim, the module explains the claim with that pod.
    type: list
    elements: str
    default: []
  namespace:
    description: The namespace for names without one. If there are no names, the module explains only pending pods and claims of this namespace.
    type: str
  src:
    description:
      - A file with manifests in YAML or JSON that are not applied yet. The module explains their pods and claims as if all objects in the file were in
        the cluster. If there are no pods and claims, it explains their templates.
    type: path
  definition:
    description: The same manifests as a YAML string with one or more documents, as a dictionary, or as a list of dictionaries.
    type: raw
  cluster_src:
    description:
      - Files with the cluster's objects in YAML or JSON, in the format of C(kubectl get -o yaml). If set, the module does not access the API server.
    type: list
    elements: path
    default: []
  nodes_src:
    description:
      - A YAML or JSON file with the reports of M(dra.accelerators.accelerator_report) from the nodes, by node name, at the top level or under the key
        C(nodes). The playbook C(dra.accelerators.plan) writes such a file with C(accelerator_plan_keep_nodes).
      - With this file, the nearest change can also be a partition that no node publishes yet. If it is not set, the module considers only published
        partitions.
    type: path
  text_nodes:
    description: The number of nodes whose requests RV(text) explains, the nearest nodes first. The other return values contain all nodes.
    type: int
    default: 3
seealso:
  - module: dra.accelerators.claim_info
  - module: dra.accelerators.claim_config_info
"""

EXAMPLES = r"""
- name: Explain a pending pod
  dra.accelerators.claim_explanation_info:
    pods: [training/worker-0]
  register: found
  delegate_to: localhost

- name: Show the explanation
  ansible.builtin.debug:
    msg: "{{ found.text.splitlines() }}"

- name: Check whether devices are available for manifests that are not applied yet
  dra.accelerators.claim_explanation_info:
    src: manifests/training.yaml
  register: found
  failed_when: found.explanations | rejectattr('verdict', 'in', ['fits', 'allocated'])
  delegate_to: localhost

- name: Explain all waiting pods and claims, with the reports of the nodes about their devices
  dra.accelerators.claim_explanation_info:
    nodes_src: nodes.json
  delegate_to: localhost

- name: Explain all waiting pods and claims of a cluster that is saved in a file
  dra.accelerators.claim_explanation_info:
    cluster_src: [cluster.yaml]
  delegate_to: localhost
"""

RETURN = r"""
text:
  description: The explanations as text.
  returned: success
  type: str
  sample: |-
    ResourceClaim default/two: no node has devices for it now.
      node gpu-1:
        request gpu of default/two (class gpu.nvidia.com) wants 2, 1 of 2 devices is left
          1 ruled out by the claim default/other that has it: gpu-1/gpu-0
      Nearest change:
        - it fits when default/other ends, or is moved to node gpu-2, which has room for it (node gpu-1).
explanations:
  description: The explanations, one for each pod or claim.
  returned: success
  type: list
  elements: dict
  contains:
    kind:
      description: The kind of the object, V(Pod) or V(ResourceClaim).
      type: str
      returned: success
      sample: Pod
    namespace:
      description: The namespace of the object.
      type: str
      returned: success
      sample: training
    name:
      description: The name of the object.
      type: str
      returned: success
      sample: worker-0
    verdict:
      description:
        - V(fits) if a node has the devices now, and V(no) if no node has them.
        - V(error) if the scheduler aborts with an error on every node.
        - V(blocked) if a prerequisite is missing before the scheduler checks any node.
        - V(allocated) if the devices are already allocated.
        - V(unknown) if the module cannot determine the result.
      type: str
      returned: success
      sample: "no"
    claims:
      description: The claims of the object.
      type: list
      elements: str
      returned: success
      sample: [training/worker-0-gpu-x7k2p]
    blockers:
      description: With V(blocked), the missing prerequisites, as sentences.
      type: list
      elements: str
      returned: success
      sample: []
    remarks:
      description: Additional information, as sentences.
      type: list
      elements: str
      returned: success
      sample: []
    nodes:
      description: The result of the scheduler on each node.
      type: list
      elements: dict
      returned: success
      contains:
        node:
          description: The name of the node.
          type: str
          returned: success
          sample: gpu-1
        verdict:
          description:
            - The result on the node, V(fits), V(no), V(error), V(unknown), or V(not-asked). V(not-asked) means that the pod cannot run on the node for
              other reasons.
          type: str
          returned: success
          sample: "no"
        message:
          description: The error, or the reason why the pod cannot run on the node.
          type: str
          returned: success
          sample: ""
        requests:
          description:
            - The requests and the alternatives of requests, each with C(claim), C(request), C(device_class), the number of C(wanted) devices (V(all) for
              all devices), the number of existing C(devices), the number of C(free) devices, whether this number is C(enough), and C(obstacles).
            - Each obstacle has C(kind) (V(selector), V(selector-error), V(selector-unknown), V(capacity), V(operations), V(taint), V(claim), V(counter),
              V(compatibility), or V(share)), C(detail), C(count), the names of C(devices), the C(claims) that cause it, and C(taints).
          type: list
          elements: dict
          returned: success
          sample:
            - claim: training/worker-0-gpu-x7k2p
              request: gpu
              device_class: gpu.nvidia.com
              wanted: 2
              devices: 2
              free: 1
              enough: false
              obstacles:
                - kind: claim
                  detail: the claim default/other that has it
                  count: 1
                  devices: [gpu-1/gpu-0]
                  claims: [default/other]
                  taints: []
        together:
          description: The reason why the requests cannot have their devices at the same time, if each request alone has enough devices.
          type: str
          returned: success
          sample: ""
        pools:
          description: The pools that the scheduler does not use, each with the reason.
          type: list
          elements: str
          returned: success
          sample: []
        devices:
          description:
            - With V(fits), the devices that the scheduler selects, with C(claim), C(request), C(driver), C(pool), C(device), and C(consumed).
          type: list
          elements: dict
          returned: success
          sample: []
    changes:
      description:
        - The possible changes, the nearest first. Each has C(kind) (V(tolerate), V(free-claims), V(repartition), V(ask-for-less), V(guard-attribute),
          V(wait), or V(nothing)), C(text), and the affected C(node), C(taints), C(claims), and C(device). C(moves) maps claims that fit on another node
          to this node.
      type: list
      elements: dict
      returned: success
      sample:
        - kind: free-claims
          text: it fits when default/other ends, or is moved to node gpu-2, which has room for it
          node: gpu-1
          taints: []
          claims: [default/other]
          device: ""
          moves: {default/other: gpu-2}
error_code:
  description: A stable error code.
  returned: failure
  type: str
  sample: missing-package
status:
  description: The HTTP status with which the API server rejected a request. It is 0 if the module did not reach the API server.
  returned: failure of a request
  type: int
  sample: 403
reason:
  description: The reason that the API server returned for the rejected request.
  returned: failure of a request
  type: str
  sample: Forbidden
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.manifest_files import documents_of, read
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
from ansible_collections.dra.accelerators.plugins.module_utils._scheduling.explain_sources import (
    Objects,
    add_documents,
    answers_in,
    ask,
    explanations,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.allocation.text import text

CONSTRAINTS: dict[str, Any] = {
    "required_together": API_REQUIRED_TOGETHER,
    "mutually_exclusive": [("src", "definition")],
}


def argument_spec() -> dict[str, Any]:
    return {
        **API_OPTIONS,
        "pods": {"type": "list", "elements": "str", "default": []},
        "claims": {"type": "list", "elements": "str", "default": []},
        "namespace": {"type": "str"},
        "src": {"type": "path"},
        "definition": {"type": "raw"},
        "cluster_src": {"type": "list", "elements": "path", "default": []},
        "nodes_src": {"type": "path"},
        "text_nodes": {"type": "int", "default": 3},
    }


def work(module: AnsibleModule) -> dict[str, Any]:
    params, objects = module.params, Objects()
    namespace = params["namespace"] or "default"
    for path in params["cluster_src"]:
        add_documents(objects, documents_of(read(path), path, module.warn), "default")
    if not params["cluster_src"]:
        ask(connect(module), objects)
    manifests: list[tuple[str, str, str]] = []
    if params["src"]:
        manifests = add_documents(objects, documents_of(read(params["src"]), params["src"], module.warn), namespace)
    elif params["definition"] is not None:
        manifests = add_documents(objects, documents_of(params["definition"], "definition"), namespace)
    found = explanations(
        objects,
        pods=params["pods"],
        claims=params["claims"],
        manifests=manifests,
        namespace=params["namespace"] or "",
        nodes=answers_in(params["nodes_src"]) if params["nodes_src"] else None,
    )
    return {
        "changed": False,
        "explanations": [each.to_dict() for each in found],
        "text": text(found, params["text_nodes"]),
    }


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
