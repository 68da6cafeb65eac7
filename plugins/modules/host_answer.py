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
  - One host of each cluster queries the cluster for all its hosts. With this module each other host returns its own part of the answer, and can
    register this part.
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
      - Names of Nodes. From a mapping C(nodes) in the result, the module returns only these keys. From a list C(claims), it returns only claims
        whose C(nodes) contain one of these names, or that have an unpublished device in a pool with one of these names. From a mapping C(plan) of
        M(dra.accelerators.repartition_plan), it returns only C(nodes), C(evicted), and C(idle), each with the entries of these names. All other keys
        are returned unchanged.
    type: list
    elements: str
  fields:
    description:
      - Fields of the result that the module returns. By default, it returns all fields.
      - With an empty list, it only fails if the other host's task did not succeed. Each host keeps what it registers, so a large answer is kept once
        for each host.
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
