# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: node_answers
version_added: 0.1.0
short_description: Collect the answers of the hosts of a play, by node name
description:
  - Returns the facts that a module returned for each host in this run, from the registered result. In contrast, C(ansible_facts) can contain values of
    an earlier run, from a fact cache.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars, asked, name
options:
  _input:
    description: Names of hosts, for example C(groups['accelerator_nodes']).
    type: list
    elements: str
    required: true
  hostvars:
    description: The variables of all hosts.
    type: dict
    required: true
  asked:
    description:
      - The hosts of the run, C(ansible_play_hosts_all). Hosts outside O(asked), for example because of C(--limit), were not queried. Hosts of other
        clusters (C(accelerator_kubeconfig), C(accelerator_kubeconfig_context)) are not part of the result, because their nodes can have equal names.
    type: list
    elements: str
    required: true
  name:
    description: The registered variable of each host. Its C(ansible_facts.accelerator_report) is the answer of the host.
    type: str
    default: accelerator_node_answer
seealso:
  - module: dra.accelerators.accelerator_report
"""

EXAMPLES = r"""
- name: Query each node
  dra.accelerators.accelerator_report:
  register: accelerator_node_answer

- name: Merge the answers
  dra.accelerators.accelerator_report:
    nodes: "{{ answers.nodes }}"
    not_asked: "{{ answers.not_asked }}"
  vars:
    answers: "{{ groups['accelerator_nodes'] | dra.accelerators.node_answers(hostvars, ansible_play_hosts_all) }}"
  run_once: true
  delegate_to: localhost
  delegate_facts: true
"""

RETURN = r"""
_value:
  description:
    - C(nodes) has the answer of each host by the name of its node, and an empty dictionary for a host without an answer. C(not_asked) lists the names of
      the nodes outside O(asked), which are also in C(nodes). C(hosts) has the host of each node.
  type: dict
  sample: {nodes: {gpu-node-1: {}}, not_asked: [gpu-node-1], hosts: {gpu-node-1: host-1}}
"""

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.cluster_hosts import cluster_of_host
from ansible_collections.dra.accelerators.plugins.filter.text_variables import UNKNOWN, evaluated


def node_answers(hosts: Any, hostvars: Any, asked: Any, name: str = "accelerator_node_answer") -> dict[str, Any]:
    """Return the answers of hosts by the names of their nodes. Raises AnsibleFilterError."""
    for found in (hosts, asked):
        if isinstance(found, str) or not isinstance(found, Sequence):
            raise AnsibleFilterError(f"node_answers: found {type(found).__name__}, expected a list of hosts")
    in_run = set(asked)
    clusters = {cluster_of_host(hostvars[host]) for host in hosts if host in in_run} - {None}
    nodes: dict[str, Any] = {}
    host_of: dict[str, str] = {}
    not_asked = []
    for host in hosts:
        variables = hostvars[host]
        name_of_node = evaluated(variables, "accelerator_node_name") or host
        if host not in in_run and (name_of_node is UNKNOWN or cluster_of_host(variables) not in clusters):
            continue
        if name_of_node is UNKNOWN:
            raise AnsibleFilterError(
                f"node_answers: accelerator_node_name of {host} cannot be evaluated. If it is a template with facts, collect facts first, or"
                " set it to the name of the Node"
            )
        node = str(name_of_node)
        result = variables.get(name) if host in in_run else None
        facts = result.get("ansible_facts") if result else None
        nodes[node] = (facts or {}).get("accelerator_report") or {}
        host_of[node] = str(host)
        if host not in in_run:
            not_asked.append(node)
    return {"nodes": nodes, "not_asked": not_asked, "hosts": host_of}


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"node_answers": node_answers}
