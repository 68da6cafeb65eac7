# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: node_name_conflicts
version_added: 0.1.0
short_description: Find inventory hosts that use the same Node name
description:
  - Returns a sentence for each Node of a cluster that is assigned to more than one host of the inventory, by C(accelerator_node_name) or by the
    inventory name. A cluster is a kubeconfig and a context, so the same node name in two clusters is not a conflict.
  - The options of a role, such as C(dra_driver_node_name), C(dra_driver_kubeconfig), and C(dra_driver_context), override the variables
    C(accelerator_node_name), C(accelerator_kubeconfig), and C(accelerator_kubeconfig_context). The filter checks the C(accelerator_*) variables
    alone, and then each role with such options separately.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars
options:
  _input:
    description: Names of hosts, for example C(groups['accelerator_nodes']).
    type: list
    elements: str
    required: true
  hostvars:
    description:
      - The variables of all hosts. The filter reads C(accelerator_node_name), C(accelerator_kubeconfig),
        C(accelerator_kubeconfig_context), and the options of roles with the same meaning.
    type: dict
    required: true
notes:
  - Hosts whose variables cannot be evaluated are left out, for example those outside of the limit whose name is a template with facts.
  - Hosts without C(accelerator_kubeconfig) use the environment variable E(KUBECONFIG).
seealso:
  - plugin: dra.accelerators.cluster_leaders
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Reject hosts with the same node name
  ansible.builtin.assert:
    that: groups['accelerator_nodes'] | dra.accelerators.node_name_conflicts(hostvars) | length == 0
    fail_msg: "{{ groups['accelerator_nodes'] | dra.accelerators.node_name_conflicts(hostvars) }}"
  run_once: true
"""

RETURN = r"""
_value:
  description:
    - The sentences, without duplicates. Conflicts of the C(accelerator_*) variables are first, followed by those of each role.
    - Within each of these groups, they are sorted by cluster and Node.
  type: list
  elements: str
  sample: ["Hosts a, b have the same Node gpu-node-1 of the cluster /home/admin/.kube/config."]
"""

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.cluster_hosts import cluster_of_host
from ansible_collections.dra.accelerators.plugins.filter.text_variables import UNKNOWN, evaluated
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.host_clusters import Member, name_conflicts

#: Roles that act on the Node of a host. Their options override the variables accelerator_*.
ROLES = ("ascend_driver", "device_plugin_migration", "dra_driver", "node_features", "nvidia_driver", "preflight")
_OPTIONS = ("node_name", "kubeconfig", "context")


def node_name_conflicts(hosts: Any, hostvars: Any) -> list[str]:
    """Return a sentence for each conflict. Raises AnsibleFilterError."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"node_name_conflicts: found {type(hosts).__name__}, expected a list of hosts")
    roles = [role for role in ROLES if any(f"{role}_{each}" in hostvars[host] for host in hosts for each in _OPTIONS)]
    sentences = [_conflicts(hosts, hostvars, role) for role in ("", *roles)]
    return list(dict.fromkeys(each for found in sentences for each in found))


def _conflicts(hosts: Sequence[Any], hostvars: Any, role: str) -> list[str]:
    """Return the conflicts for the options of one role. An empty ``role`` means only the shared variables accelerator_*."""
    members = []
    for host in hosts:
        variables = hostvars[host]
        role_option = f"{role}_node_name"
        node = evaluated(variables, role_option if role and role_option in variables else "accelerator_node_name")
        cluster = cluster_of_host(variables, role)
        if node is UNKNOWN or cluster is None:
            continue
        members.append(Member(str(host), str(node or host), cluster))
    return name_conflicts(members)


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"node_name_conflicts": node_name_conflicts}
