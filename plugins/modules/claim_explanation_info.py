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
  - Says of pods and ResourceClaims why the scheduler finds no devices for them now, node by node and request by request. Which selector, taint,
    counter, constraint or other claim rules devices out, how many are left, and what the nearest change is after which there would be enough.
  - It searches as the scheduler does, with the same devices in the same order, and evaluates selectors with a real CEL library. Each change that it
    names was tried with the same search.
  - It explains what is in a cluster, manifests that are not applied yet, and clusters that are in files.
notes:
  - Needs the Python package C(cel-expr-python), which needs Python 3.11 or newer, on the host that it runs on. That is mostly the controller,
    so delegate the task to it.
  - Needs the permissions to list C(nodes) and C(pods), and C(resourceslices), C(resourceclaims), C(resourceclaimtemplates), C(deviceclasses) and
    C(devicetaintrules) in the API group C(resource.k8s.io). With O(cluster_src) it asks no cluster.
  - What else keeps a pod from a node, such as processors, memory or other pods, is not looked at, except for the node's name, labels and taints.
  - Selectors with C(find) or C(findAll) need the Python package C(google-re2) as well. If it is missing, they are not evaluated.
  - Users write selectors, so each evaluation has 2 s of processor time and 512 MiB of memory. A selector that needs more is not evaluated.
requirements:
  - cel-expr-python
  - google-re2 (optional)
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.actiongroup
  - dra.accelerators._attributes.info_module
  - dra.accelerators._kubernetes
attributes:
  platform:
    support: full
    platforms: posix
options:
  pods:
    description:
      - Names of pods to explain with all their claims, as V(name) or V(namespace/name).
      - If none of O(pods), O(claims), O(src), and O(definition) is set, all pending pods with claims, and all claims without devices that no pod waits for.
    type: list
    elements: str
    default: []
  claims:
    description: Names of ResourceClaims to explain, in the same form. A claim that a pod waits for is explained with that pod.
    type: list
    elements: str
    default: []
  namespace:
    description: The namespace for names without one. If there are no names, only pending pods and claims of this namespace are explained.
    type: str
  src:
    description:
      - A file of manifests in YAML or JSON that are not applied yet. Their pods and claims are explained, and else their templates,
        as if everything in the file were in the cluster.
    type: path
  definition:
    description: Such manifests as YAML text with one or more documents, as a dictionary, or as a list of dictionaries.
    type: raw
  cluster_src:
    description:
      - Files that hold the cluster's objects in YAML or JSON, as C(kubectl get -o yaml) writes them. No API server is asked then.
    type: list
    elements: path
    default: []
  nodes_src:
    description:
      - A file with what M(dra.accelerators.accelerator_report) has answered on nodes, by their names, in YAML or JSON, by itself or under the key
        C(nodes). The playbook C(dra.accelerators.plan) writes one with C(accelerator_plan_keep_nodes).
      - With this file the nearest change can also be a partition that is not published anywhere yet. If it is not set, only partitions that some
        node publishes are considered.
    type: path
  text_nodes:
    description: The number of nodes that RV(text) explains request by request, the nearest ones first. The other return values contain all nodes.
    type: int
    default: 3
seealso:
  - module: dra.accelerators.claim_info
  - module: dra.accelerators.claim_config_info
"""

EXAMPLES = r"""
- name: Explain a pod that waits
  dra.accelerators.claim_explanation_info:
    pods: [training/worker-0]
  register: found
  delegate_to: localhost

- name: Say it
  ansible.builtin.debug:
    msg: "{{ found.text.splitlines() }}"

- name: See whether manifests would find devices before they are applied
  dra.accelerators.claim_explanation_info:
    src: manifests/training.yaml
  register: found
  failed_when: found.explanations | rejectattr('verdict', 'in', ['fits', 'allocated'])
  delegate_to: localhost

- name: Explain what waits, with what the nodes have said about their devices
  dra.accelerators.claim_explanation_info:
    nodes_src: nodes.json
  delegate_to: localhost

- name: Explain everything that waits in a cluster that somebody has sent as a file
  dra.accelerators.claim_explanation_info:
    cluster_src: [cluster.yaml]
  delegate_to: localhost
"""

RETURN = r"""
text:
  description: The explanations for people.
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
  description: One for each pod or claim.
  returned: success
  type: list
  elements: dict
  contains:
    kind:
      description: V(Pod) or V(ResourceClaim).
      type: str
      returned: success
      sample: Pod
    namespace:
      description: Its namespace.
      type: str
      returned: success
      sample: training
    name:
      description: Its name.
      type: str
      returned: success
      sample: worker-0
    verdict:
      description:
        - V(fits) where a node has devices for it now, V(no) where none has, V(error) where the scheduler gives it up with an error on every node,
          V(blocked) where something is missing before any node is asked, V(allocated) where it has its devices, and V(unknown) where that cannot be told here.
      type: str
      returned: success
      sample: "no"
    claims:
      description: Its claims.
      type: list
      elements: str
      returned: success
      sample: [training/worker-0-gpu-x7k2p]
    blockers:
      description: With V(blocked), what is missing, as sentences.
      type: list
      elements: str
      returned: success
      sample: []
    remarks:
      description: What else should be known, as sentences.
      type: list
      elements: str
      returned: success
      sample: []
    nodes:
      description: What the scheduler comes to on each node.
      type: list
      elements: dict
      returned: success
      contains:
        node:
          description: The node.
          type: str
          returned: success
          sample: gpu-1
        verdict:
          description: V(fits), V(no), V(error), V(unknown), or V(not-asked) where the pod cannot go there anyway.
          type: str
          returned: success
          sample: "no"
        message:
          description: The error, or why the node is not asked.
          type: str
          returned: success
          sample: ""
        requests:
          description:
            - By request, or alternative of a request, C(claim), C(request), C(device_class), how many are C(wanted) (V(all) for all), how many C(devices)
              there are, how many of them are C(free), whether that is C(enough), and C(obstacles).
            - Each obstacle has C(kind) (V(selector), V(selector-error), V(selector-unknown), V(capacity), V(operations), V(taint), V(claim), V(counter),
              V(compatibility) or V(share)), C(detail), C(count) and names of C(devices), C(claims) that are the reason, and C(taints).
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
          description: What rules out that the requests have their devices together, where each one has enough for itself.
          type: str
          returned: success
          sample: ""
        pools:
          description: Pools that nothing is taken from, each with the reason.
          type: list
          elements: str
          returned: success
          sample: []
        devices:
          description: With V(fits), the devices that the scheduler takes, with C(claim), C(request), C(driver), C(pool), C(device) and C(consumed).
          type: list
          elements: dict
          returned: success
          sample: []
    changes:
      description:
        - What could be done, the nearest first, each with C(kind) (V(tolerate), V(free-claims), V(repartition), V(ask-for-less), V(guard-attribute), V(wait) or
          V(nothing)), C(text), and what it is about, C(node), C(taints), C(claims) and C(device). C(moves) are those of the claims that have room on
          another node, each with that node.
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
  description: A stable word for the kind of the error.
  returned: failure
  type: str
  sample: missing-package
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
from ansible_collections.dra.accelerators.plugins.module_utils._claim_explanations import (
    Objects,
    add_documents,
    answers_in,
    ask,
    explanations,
)
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import (
    API_OPTIONS,
    API_REQUIRED_TOGETHER,
    connect,
)
from ansible_collections.dra.accelerators.plugins.module_utils._manifests import documents_of, read
from ansible_collections.dra.accelerators.plugins.module_utils._module import run
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
    said = [each.to_dict() for each in found]
    return {"changed": False, "explanations": said, "text": text(found, params["text_nodes"])}


def main() -> None:
    run(AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True, **CONSTRAINTS), work)


if __name__ == "__main__":
    main()
