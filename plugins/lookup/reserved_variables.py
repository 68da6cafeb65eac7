# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: reserved_variables
version_added: 0.1.0
short_description: List extra variables that would override values of a playbook
description:
  - Extra variables (C(-e)) have the highest precedence. They also override values that a playbook passes to a role or to an imported playbook, such as
    the state C(absent) of a removal.
  - Returns one sentence for each extra variable with a reserved name. The playbooks of this collection fail where it returns one.
  - Internal variables of this collection, which begin with two underscores, options that its roles pass to each other,
    and variables that its playbooks set are always reserved.
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

_SET_BY_PLAYBOOKS = """
accelerator_api accelerator_api_words accelerator_begun accelerator_boot_written accelerator_changed_gpu
accelerator_changed_npu accelerator_claims accelerator_claims_asked accelerator_claims_leaders
accelerator_claims_left accelerator_cluster accelerator_cluster_asked accelerator_columns
accelerator_connection accelerator_controller_form accelerator_cordon accelerator_doors accelerator_drained
accelerator_drains_driver accelerator_driver_names accelerator_driver_plans accelerator_drivers_changed
accelerator_drivers_to_come accelerator_ended accelerator_exchanges accelerator_fallen accelerator_fleet
accelerator_fleet_planned accelerator_gathered accelerator_gone accelerator_has_evict accelerator_held
accelerator_here accelerator_idle accelerator_idle_names accelerator_image accelerator_images
accelerator_is_controller accelerator_kubeconfig_used accelerator_layout_entries accelerator_leaders
accelerator_leads accelerator_leaving accelerator_left accelerator_line accelerator_mark accelerator_marked
accelerator_may_evict accelerator_may_evict_unmanaged accelerator_moves accelerator_name accelerator_needs
accelerator_node accelerator_node_answer accelerator_node_asked accelerator_node_asked_again
accelerator_node_layout accelerator_not_begun accelerator_not_begun_words accelerator_not_let_go
accelerator_not_put_back accelerator_of_gone accelerator_open_doors accelerator_operation accelerator_ours
accelerator_parts accelerator_peers accelerator_plan accelerator_planned accelerator_pod accelerator_published
accelerator_published_asked accelerator_python accelerator_report_joined accelerator_role_evicts
accelerator_role_evicts_unmanaged accelerator_root accelerator_run accelerator_saved accelerator_settings_seen
accelerator_settled accelerator_steps accelerator_todo accelerator_users accelerator_vendors_of_fleet
accelerator_vendors_of_node accelerator_way accelerator_why accelerator_wrong
"""
#: Variables that tasks of the playbooks set, and those of their plays.
SET_BY_PLAYBOOKS = frozenset(_SET_BY_PLAYBOOKS.split())
#: What to set instead of some of them.
INSTEAD = {
    "accelerator_api": "accelerator_kubeconfig",
    "accelerator_driver_names": "dra_driver_names",
    "accelerator_kubeconfig_used": "accelerator_kubeconfig",
    "accelerator_name": "accelerator_node_name",
    "accelerator_node_layout": "accelerator_layouts",
}


def is_internal(name: str) -> bool:
    """Return whether a variable is one that only this collection sets."""
    return name in SET_BY_ROLES | SET_BY_PLAYBOOKS or (name.startswith("__") and name.lstrip("_").startswith(PREFIXES))


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
