# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: reserved_variables
version_added: 0.1.0
short_description: List extra variables that would override values of a playbook
description:
  - Extra variables (C(-e)) take precedence over all other variables. They also override values that a playbook passes to a role or to an imported
    playbook, such as the state C(absent) of a removal.
  - Returns one sentence for each extra variable with a reserved name. The playbooks of this collection fail if it returns any.
  - Internal variables of this collection, which begin with two underscores, options that its roles pass to each other, facts that its roles set, and
    variables that its playbooks set are always reserved.
author:
  - The dra.accelerators authors (@dra-accelerators)
options:
  _terms:
    description:
      - One mapping. Each key is a reserved name. Each value is the name of the variable to set instead, or an empty string if no such variable exists.
    type: list
    elements: dict
    required: true
notes:
  - Reads the command line of C(ansible-playbook). AWX and ansible-runner also pass their extra variables on this command line.
seealso:
  - plugin: dra.accelerators.foreign_facts
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Reject extra variables that this playbook sets
  ansible.builtin.assert:
    that: refused | length == 0
    fail_msg: "{{ refused }}"
  vars:
    refused: "{{ query('dra.accelerators.reserved_variables', {'dra_driver_state': '', 'dra_driver_layout': 'accelerator_layouts'}) }}"
  run_once: true
"""

RETURN = r"""
_list:
  description: A sentence for each refused variable, sorted by name.
  type: list
  elements: str
  sample: ["dra_driver_layout is an extra variable (-e), but this playbook sets it. Remove it and set accelerator_layouts."]
"""

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase
from ansible.utils.vars import load_extra_vars
from ansible_collections.dra.accelerators.plugins.filter.foreign_facts import PREFIXES
from ansible_collections.dra.accelerators.plugins.module_utils._playbooks.variables import SET_BY_PLAYBOOKS

#: Options of roles that other roles of this collection set.
SET_BY_ROLES = frozenset(
    {
        "machine_restart_boot_time_command",
        "machine_restart_command",
        "machine_restart_consent",
        "machine_restart_reason",
        "machine_restart_timeout",
        "machine_restart_variable",
        "offline_names",
        "offline_versions",
    }
)
#: Facts that the roles set.
FACTS_OF_ROLES = frozenset(
    {"device_plugin_migration_found", "driver_image_reference", "offline_content", "offline_host", "offline_needs"}
)

#: The replacement for some of these variables.
INSTEAD = {
    "accelerator_api": "accelerator_kubeconfig",
    "accelerator_driver_names": "dra_driver_names",
    "accelerator_migration": "device_plugin_migration_direction",
    "accelerator_name": "accelerator_node_name",
    "accelerator_node_layout": "accelerator_layouts",
    "accelerator_plan_dest": "accelerator_plan_file",
    "accelerator_plan_writes": "accelerator_plan_write",
    "accelerator_report_data_used": "accelerator_report_data",
    "accelerator_report_stem": "accelerator_report_file",
    "ansible_become": "it in the inventory, or accelerator_become",
}


#: As an extra variable, it makes tasks on the Ansible controller run as root, because it overrides the value of these tasks.
BECOME = "ansible_become"


def is_internal(name: str) -> bool:
    """Return whether only this collection may set a variable."""
    return name in SET_BY_ROLES | FACTS_OF_ROLES | SET_BY_PLAYBOOKS | {BECOME} or (
        name.startswith("__") and name.lstrip("_").startswith(PREFIXES)
    )


def refusals(extra: Mapping[str, Any], reserved: Mapping[str, str]) -> list[str]:
    """Return a sentence for each extra variable that is internal or in ``reserved`` (name: variable to set instead, or empty)."""
    found = []
    for name in sorted(map(str, extra)):
        if name not in reserved and not is_internal(name):
            continue
        instead = reserved.get(name) or INSTEAD.get(name)
        remedy = f"Remove it and set {instead}." if instead else "Remove it."
        found.append(f"{name} is an extra variable (-e), but this playbook sets it. {remedy}")
    return found


class LookupModule(LookupBase):  # type: ignore[misc]
    """The lookup plugin."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[str]:
        """Return the refusals for the extra variables of this run. Raises AnsibleError."""
        self.set_options(var_options=variables, direct=kwargs)
        if len(terms) != 1 or not isinstance(terms[0], Mapping):
            raise AnsibleError(f"reserved_variables: found {terms!r}, expected one mapping of names")
        return refusals(load_extra_vars(self._loader), terms[0])
