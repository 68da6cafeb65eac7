# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: cluster_leaders
version_added: 0.1.0
short_description: Choose one host for each cluster
description:
  - Groups hosts by their cluster (a kubeconfig and a context), and returns for each host the first host of its cluster.
  - Run a task that queries or changes a cluster only for this first host. The other hosts of the cluster read the result from C(hostvars). In contrast,
    C(run_once) queries the cluster of one host for all hosts, including hosts of other clusters.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars, name, step
options:
  _input:
    description: Names of hosts, for example C(ansible_play_batch).
    type: list
    elements: str
    required: true
  hostvars:
    description: The variables of all hosts.
    type: dict
    required: true
  name:
    description:
      - The variable of each host with its C(kubeconfig) and its C(context), both strings. Empty strings mean C(~/.kube/config) and the
        current context of the file.
      - Hosts without this variable are not part of the result.
    type: str
    default: accelerator_api
  step:
    description: If not empty, only hosts whose variable O(name) has this value under C(step) are part of the result.
    type: str
    default: ''
seealso:
  - module: dra.accelerators.cluster_info
"""

EXAMPLES = r"""
- name: Set the cluster of each host
  ansible.builtin.set_fact:
    accelerator_api: {kubeconfig: "{{ accelerator_kubeconfig }}", context: "{{ accelerator_kubeconfig_context | default('') }}"}

- name: Choose one host for each cluster
  ansible.builtin.set_fact:
    leaders: "{{ ansible_play_batch | dra.accelerators.cluster_leaders(hostvars) }}"
  run_once: true

- name: Query each cluster once
  dra.accelerators.cluster_info:
    kubeconfig: "{{ accelerator_api.kubeconfig | default(omit, true) }}"
    context: "{{ accelerator_api.context | default(omit, true) }}"
    nodes: "{{ leaders | dict2items | selectattr('value', 'equalto', inventory_hostname) | map(attribute='key') | list }}"
  register: answer
  delegate_to: localhost
  when: leaders[inventory_hostname] == inventory_hostname

- name: Show the node's part of the answer
  ansible.builtin.debug:
    msg: "{{ hostvars[leaders[inventory_hostname]].answer.nodes[inventory_hostname] }}"
"""

RETURN = r"""
_value:
  description: By host, the first host of the same cluster.
  type: dict
  sample: {gpu-node-1: gpu-node-1, gpu-node-2: gpu-node-1, other-node-1: other-node-1}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.host_clusters import cluster_of


def cluster_leaders(hosts: Any, hostvars: Any, name: str = "accelerator_api", step: str = "") -> dict[str, str]:
    """Return the first host of each host's cluster. Raises AnsibleFilterError."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"cluster_leaders: found {type(hosts).__name__}, expected a list of hosts")
    leaders: dict[tuple[str, str], str] = {}
    found = {}
    for host in hosts:
        api = hostvars[host].get(name)
        if api is None:
            continue
        if not isinstance(api, Mapping) or not {"kubeconfig", "context"} <= api.keys():
            raise AnsibleFilterError(f"cluster_leaders: {name} of {host} has no kubeconfig and context")
        if step and api.get("step") != step:
            continue
        found[str(host)] = leaders.setdefault(cluster_of(api["kubeconfig"], api["context"]), str(host))
    return found


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"cluster_leaders": cluster_leaders}
