# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: cluster_hosts
version_added: 0.1.0
short_description: Select the hosts that belong to a cluster
description:
  - Returns the hosts whose variables name the cluster, a kubeconfig and a context. Hosts outside of the limit of the run are included.
  - Hosts whose variables cannot be evaluated are also returned, for example those outside of the limit that have a template with facts.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars, api, prefix
options:
  _input:
    description: Names of hosts, for example C(groups['accelerator_controllers']).
    type: list
    elements: str
    required: true
  hostvars:
    description: The variables of all hosts. C(accelerator_kubeconfig) and C(accelerator_kubeconfig_context) define the cluster of a host.
    type: dict
    required: true
  api:
    description: The cluster, as a mapping with C(kubeconfig) and C(context).
    type: dict
    required: true
  prefix:
    description: A role, whose variables C(<prefix>_kubeconfig) and C(<prefix>_context) have priority, if a host has them.
    type: str
    default: ''
seealso:
  - plugin: dra.accelerators.cluster_leaders
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show the controllers of the cluster
  ansible.builtin.debug:
    msg: "{{ groups['accelerator_controllers'] | dra.accelerators.cluster_hosts(hostvars, {'kubeconfig': '', 'context': 'production'}) }}"
"""

RETURN = r"""
_value:
  description: The names of the hosts, in the order of the input.
  type: list
  elements: str
  sample: [controller-1, controller-2]
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.text_variables import UNKNOWN, evaluated
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.host_clusters import Cluster, cluster_of


def access_of_host(variables: Any, prefix: str = "") -> tuple[Any, Any] | None:
    """Return kubeconfig and context of a host by its variables in hostvars, or None if they cannot be evaluated."""
    found = []
    for name, default in (("kubeconfig", "accelerator_kubeconfig"), ("context", "accelerator_kubeconfig_context")):
        own = f"{prefix}_{name}"
        found.append(evaluated(variables, own if prefix and own in variables else default))
    if UNKNOWN in found:
        return None
    kubeconfig, context = found
    return kubeconfig or os.environ.get("KUBECONFIG"), context


def cluster_of_host(variables: Any, prefix: str = "") -> Cluster | None:
    """Return the cluster of a host by its variables in hostvars, or None if they cannot be evaluated."""
    access = access_of_host(variables, prefix)
    return None if access is None else cluster_of(*access)


def cluster_of_access(api: Any, name: str) -> Cluster:
    """Return the cluster of a mapping with kubeconfig and context, for the filter ``name``. Raises AnsibleFilterError."""
    if not isinstance(api, Mapping) or not {"kubeconfig", "context"} <= api.keys():
        raise AnsibleFilterError(f"{name}: expected a mapping with kubeconfig and context as the cluster")
    return cluster_of(api["kubeconfig"], api["context"])


def cluster_hosts(hosts: Any, hostvars: Any, api: Any, prefix: str = "") -> list[str]:
    """Return the hosts of a cluster, and those whose cluster is unknown. Raises AnsibleFilterError."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"cluster_hosts: found {type(hosts).__name__}, expected a list of hosts")
    cluster = cluster_of_access(api, "cluster_hosts")
    return [str(host) for host in hosts if cluster_of_host(hostvars[host], prefix) in (cluster, None)]


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"cluster_hosts": cluster_hosts}
