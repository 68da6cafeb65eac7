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
  - Lists become their union, booleans are true if one of them is, and of numbers the largest counts.
  - Hosts that report facts with names of variables of this collection are left out. So are hosts whose variable or cluster cannot be evaluated, for
    example those outside of the limit that have a template with facts.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars, hosts, api, names, default
options:
  _input:
    description: The value of the host that writes the objects. Its type decides how the values are merged.
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

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.dra.accelerators.plugins.filter.foreign_facts import foreign_facts
from ansible_collections.dra.accelerators.plugins.filter.text_variables import UNKNOWN, evaluated
from ansible_collections.dra.accelerators.plugins.module_utils._clusters import cluster_of


def cluster_union(own: Any, hostvars: Any, hosts: Any, api: Any, names: Any, default: Any = None) -> Any:
    """Return the merged value. Raises AnsibleFilterError."""
    if not isinstance(api, Mapping) or not {"kubeconfig", "context"} <= api.keys():
        raise AnsibleFilterError("cluster_union: expected a mapping with kubeconfig and context as the cluster")
    cluster = cluster_of(api["kubeconfig"], api["context"])
    values = [own]
    for host in hosts:
        variables = hostvars[host]
        kubeconfig, context = (
            evaluated(variables, name) for name in ("accelerator_kubeconfig", "accelerator_kubeconfig_context")
        )
        if UNKNOWN in (kubeconfig, context):
            continue
        if cluster_of(kubeconfig or os.environ.get("KUBECONFIG"), context) != cluster:
            continue
        if foreign_facts(variables.get("ansible_facts") or {}):
            continue
        found = [evaluated(variables, name) for name in names if name in variables]
        first = [*found, *([] if default is None else [default])][:1]
        values += [value for value in first if value is not UNKNOWN]
    return merge(values)


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
