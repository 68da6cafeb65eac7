#!/usr/bin/python

# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: host_answer
version_added: 0.1.0
short_description: Return a result that another host of the play has registered
description:
  - One host per cluster queries the cluster for all hosts and registers the result. Every other host uses this module to return its own part of
    that result.
  - With ansible-core before 2.19, values that are read through C(hostvars) lose the mark C(unsafe) and can be evaluated as templates. Values in the
    result of this module keep this mark.
  - Fails if the other host's task has failed, was skipped, or was not run. The error names this host and its error.
  - This is an action plugin. It runs on the controller and opens no connection.
author:
  - The dra.accelerators authors (@dra-accelerators)
extends_documentation_fragment:
  - dra.accelerators._attributes
  - dra.accelerators._attributes.info_module
attributes:
  platform:
    support: full
    platforms: posix
options:
  host:
    description: Name of the host in the inventory.
    type: str
    required: true
  name:
    description: Name of the variable that the host's task has registered.
    type: str
    required: true
  nodes:
    description:
      - Names of the Nodes to return. Keys of the result that are not in this list of rules are returned unchanged.
      - C(nodes), a mapping - only the keys of these Nodes.
      - C(claims), a list - only claims whose C(nodes) include one of these Nodes, and claims with an unpublished device in the pool of one of them.
      - C(plan), a mapping from M(dra.accelerators.repartition_plan) - only C(nodes), C(evicted), and C(idle), limited to these Nodes.
    type: list
    elements: str
  fields:
    description:
      - Fields of the result that the module returns. By default, it returns all fields.
      - With an empty list, the module returns no fields. It only verifies that the other host's task succeeded.
      - Select only the fields that you need, because every host that registers the result stores its own copy.
    type: list
    elements: str
  drivers:
    description: Names of DRA drivers. From a list C(claims), the module returns only claims with a device of one of these drivers on one of O(nodes).
    type: list
    elements: str
seealso:
  - module: dra.accelerators.cluster_info
  - plugin: dra.accelerators.cluster_leaders
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Read the node's part of the answer that another host has registered
  dra.accelerators.host_answer:
    host: gpu-node-1
    name: cluster_asked
    nodes: [gpu-node-2]
  register: cluster
"""

RETURN = r"""
nodes:
  description: An example of a key. All keys of the other host's result are returned, here those of M(dra.accelerators.cluster_info).
  returned: if the other result has this key
  type: dict
  sample: {gpu-node-2: {exists: true, ready: "True", slices: []}}
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule


def argument_spec() -> dict[str, dict[str, Any]]:
    """Return the module's options."""
    return {
        "host": {"type": "str", "required": True},
        "name": {"type": "str", "required": True},
        "nodes": {"type": "list", "elements": "str"},
        "fields": {"type": "list", "elements": "str"},
        "drivers": {"type": "list", "elements": "str"},
    }


def main() -> None:
    """Fail, because a module has no access to the results of other hosts."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    module.fail_json(msg="host_answer works only through its action plugin: use it as a task of a play.")


if __name__ == "__main__":
    main()
