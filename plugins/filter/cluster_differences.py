# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: cluster_differences
version_added: 0.1.0
short_description: List variables that must be the same on all hosts of a cluster and differ
description:
  - One host of a cluster writes the objects that all hosts of the cluster share. This filter compares variables of this host that cannot be merged
    with those of the other hosts of its cluster, also of those outside of the limit of the run.
  - Hosts that report facts with names of variables of this collection are left out. So are hosts whose variable or cluster cannot be evaluated, for
    example those outside of the limit that have a template with facts.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars, host, hosts, api, defaults, prefix
options:
  _input:
    description: The values of the host that writes the objects, by the name of the variable.
    type: dict
    required: true
  hostvars:
    description: The variables of all hosts.
    type: dict
    required: true
  host:
    description:
      - The host that writes the objects, C(inventory_hostname). If this host does not have a variable in the inventory, other hosts without the
        variable use the same value.
    type: str
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
  defaults:
    description: By variable, its value on a host that does not set it. Without a default, only the hosts that set the variable are compared.
    type: dict
    required: true
  prefix:
    description: A role, whose variables C(<prefix>_kubeconfig) and C(<prefix>_context) have priority, if a host has them.
    type: str
    default: ''
seealso:
  - plugin: dra.accelerators.cluster_union
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Reject different namespaces in one cluster
  ansible.builtin.assert:
    that: differences | length == 0
    fail_msg: "{{ differences }}"
  vars:
    defaults: {dra_driver_namespace: dra-accelerators}
    differences: >-
      {{ {'dra_driver_namespace': dra_driver_namespace}
         | dra.accelerators.cluster_differences(hostvars, inventory_hostname, groups['accelerator_nodes'], accelerator_api, defaults) }}
"""

RETURN = r"""
_value:
  description: A sentence for each variable that differs, in the order of the input.
  type: list
  elements: str
  sample: ['dra_driver_namespace is "team-a" here and "team-b" on gpu-node-3.']
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.cluster_hosts import cluster_of_access, cluster_of_host
from ansible_collections.dra.accelerators.plugins.filter.foreign_facts import foreign_facts
from ansible_collections.dra.accelerators.plugins.filter.text_variables import UNKNOWN, evaluated


def cluster_differences(
    own: Any, hostvars: Any, host: str, hosts: Any, api: Any, defaults: Any, prefix: str = ""
) -> list[str]:
    """Return a sentence for each variable that differs. Raises AnsibleFilterError."""
    if not isinstance(own, Mapping) or not isinstance(defaults, Mapping):
        raise AnsibleFilterError("cluster_differences: expected mappings of variables to values, and to defaults")
    cluster = cluster_of_access(api, "cluster_differences")
    known = {name: value for name, value in defaults.items() if name in hostvars[host]}
    different: dict[str, dict[str, list[str]]] = {}
    for each in hosts:
        variables = hostvars[each]
        if cluster_of_host(variables, prefix) != cluster or foreign_facts(variables.get("ansible_facts") or {}):
            continue
        for name, value in own.items():
            found = evaluated(variables, name) if name in variables else known.get(name, UNKNOWN)
            if found is not UNKNOWN and _text(found) != _text(value):
                different.setdefault(str(name), {}).setdefault(_text(found), []).append(str(each))
    return [
        f"{name} is {_text(own[name])} here"
        + "".join(f" and {text} on {', '.join(names)}" for text, names in values.items())
        + "."
        for name, values in sorted(different.items(), key=lambda each: list(own).index(each[0]))
    ]


def _text(value: Any) -> str:
    """Return a value as JSON. Extra variables and INI inventories have strings for numbers and booleans."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower()
    if isinstance(value, str) and value.isdigit():
        return str(int(value))
    return json.dumps(value, sort_keys=True, default=str)


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"cluster_differences": cluster_differences}
