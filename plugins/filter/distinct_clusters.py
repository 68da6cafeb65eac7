# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: distinct_clusters
version_added: 0.1.0
short_description: List the clusters of hosts
description:
  - Returns each cluster, a kubeconfig and a context, that the variables of the hosts name. Hosts outside of the limit of the run are included.
  - Fails for a host whose variables cannot be evaluated, because its cluster is unknown.
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
    description: The variables of all hosts. C(accelerator_kubeconfig) and C(accelerator_kubeconfig_context) define the cluster of a host.
    type: dict
    required: true
seealso:
  - plugin: dra.accelerators.cluster_hosts
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Query each cluster of the inventory
  dra.accelerators.cluster_info:
    kubeconfig: "{{ item.kubeconfig | default(omit, true) }}"
    context: "{{ item.context | default(omit, true) }}"
    nodes: [gpu-node-9]
  loop: "{{ groups['accelerator_nodes'] | dra.accelerators.distinct_clusters(hostvars) }}"
  delegate_to: localhost
"""

RETURN = r"""
_value:
  description: For each cluster its first C(host), and C(kubeconfig) and C(context), which are empty for the defaults of kubectl.
  type: list
  elements: dict
  sample: [{host: gpu-node-1, kubeconfig: /home/admin/.kube/config, context: production}]
"""

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.cluster_hosts import access_of_host
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.host_clusters import Cluster, cluster_of


def distinct_clusters(hosts: Any, hostvars: Any) -> list[dict[str, str]]:
    """Return the access to each cluster. Raises AnsibleFilterError."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"distinct_clusters: found {type(hosts).__name__}, expected a list of hosts")
    found: dict[Cluster, dict[str, str]] = {}
    for host in hosts:
        access = access_of_host(hostvars[host])
        if access is None:
            raise AnsibleFilterError(
                f"distinct_clusters: accelerator_kubeconfig or accelerator_kubeconfig_context of {host} cannot be evaluated, so its cluster is unknown"
            )
        kubeconfig, context = (str(each or "") for each in access)
        found.setdefault(cluster_of(*access), {"host": str(host), "kubeconfig": kubeconfig, "context": context})
    return list(found.values())


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"distinct_clusters": distinct_clusters}
