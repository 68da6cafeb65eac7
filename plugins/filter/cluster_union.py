# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: cluster_union
version_added: 0.1.0
short_description: Merge a variable of all hosts of one cluster
description:
  - Objects that all nodes of a cluster share must serve each of them. This filter merges the value of the host that writes them with the values of
    the other hosts of its cluster, also of those outside of the limit of the run.
  - The result is the union of lists, true if one of the booleans is true, or the largest of the numbers.
  - Hosts that report facts with names of variables of this collection are left out. So are hosts whose variable or cluster cannot be evaluated, for
    example those outside of the limit that have a template with facts.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars, hosts, api, names, default, vendor
options:
  _input:
    description: The value of the host that writes the objects. Its type determines how the filter merges the values.
    type: raw
    required: true
  hostvars:
    description: The variables of all hosts. C(accelerator_kubeconfig) and C(accelerator_kubeconfig_context) define the cluster of a host.
    type: dict
    required: true
  hosts:
    description: Names of hosts, for example C(groups['accelerator_nodes']).
    type: list
    elements: str
    required: true
  api:
    description: The cluster, as a mapping with C(kubeconfig) and C(context).
    type: dict
    required: true
  names:
    description: Names of variables. The filter uses the first variable that a host has.
    type: list
    elements: str
    required: true
  default:
    description: The value of a host that has none of these variables. Without it such a host is left out.
    type: raw
  vendor:
    description:
      - If not empty, hosts without devices of this vendor are left out. The vendors of a host are C(device_classes_vendors), or else
        C(accelerator_vendors), or else V(nvidia).
    type: str
    default: ''
seealso:
  - plugin: dra.accelerators.cluster_leaders
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Show the vendors of all hosts of the cluster
  ansible.builtin.debug:
    msg: >-
      {{ accelerator_vendors | dra.accelerators.cluster_union(hostvars, groups['accelerator_nodes'], accelerator_api, ['accelerator_vendors']) }}
"""

RETURN = r"""
_value:
  description: The merged value. Lists keep the order of the hosts.
  type: raw
  sample: [nvidia, ascend]
"""

from collections.abc import Callable, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.dra.accelerators.plugins.filter.cluster_hosts import cluster_of_access, cluster_of_host
from ansible_collections.dra.accelerators.plugins.filter.foreign_facts import foreign_facts
from ansible_collections.dra.accelerators.plugins.filter.text_variables import UNKNOWN, evaluated

_VENDORS = ("device_classes_vendors", "accelerator_vendors")


def cluster_union(
    own: Any, hostvars: Any, hosts: Any, api: Any, names: Any, default: Any = None, vendor: str = ""
) -> Any:
    """Return the merged value. Raises AnsibleFilterError."""
    cluster = cluster_of_access(api, "cluster_union")
    values = [own]
    for host in hosts:
        variables = hostvars[host]
        if cluster_of_host(variables) != cluster:
            continue
        if foreign_facts(variables.get("ansible_facts") or {}):
            continue
        if vendor and vendor not in _vendors_of(variables):
            continue
        found = [evaluated(variables, name) for name in names if name in variables]
        first = [*found, *([] if default is None else [default])][:1]
        values += [value for value in first if value is not UNKNOWN]
    return merge(values)


def _vendors_of(variables: Any) -> Sequence[Any]:
    """Return the vendors whose devices a host publishes; none if they are unknown."""
    found = [evaluated(variables, name) for name in _VENDORS if name in variables]
    vendors = [*found, ["nvidia"]][0]
    return vendors if isinstance(vendors, Sequence) and not isinstance(vendors, str) else ()


def merge(values: Sequence[Any]) -> Any:
    """Return the union of lists, whether one boolean is true, or the largest number; the first value decides. Raises AnsibleFilterError."""
    first = values[0]
    try:
        if isinstance(first, bool):
            return any(boolean(value) for value in values)
        if isinstance(first, int):
            return max(int(value) for value in values)
    except (TypeError, ValueError) as error:
        raise AnsibleFilterError(f"cluster_union: {error}") from error
    if isinstance(first, str) or not isinstance(first, Sequence):
        raise AnsibleFilterError(
            f"cluster_union: found {type(first).__name__}, expected a list, a boolean, or an integer"
        )
    merged: list[Any] = []
    for value in values:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise AnsibleFilterError(f"cluster_union: a host has {value!r}, expected a list")
        merged += [each for each in value if each not in merged]
    return merged


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"cluster_union": cluster_union}
