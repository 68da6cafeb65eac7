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

_SET_BY_PLAYBOOKS = """
accelerator_answers accelerator_api accelerator_api_result accelerator_api_text accelerator_before_changes accelerator_blocks accelerator_boot_changed
accelerator_boot_layout_before accelerator_boot_written accelerator_changed accelerator_changed_gpu accelerator_changed_npu accelerator_checks_pod
accelerator_claims accelerator_claims_asked accelerator_claims_leaders accelerator_claims_left accelerator_cluster accelerator_cluster_asked
accelerator_cluster_nodes accelerator_columns accelerator_conflicts accelerator_connection accelerator_controller_api accelerator_controller_cluster
accelerator_controller_form accelerator_controller_forms accelerator_controller_leaders accelerator_controller_leads accelerator_controller_leaves
accelerator_controller_rest accelerator_cordon accelerator_count accelerator_deployment_hosts accelerator_device_names accelerator_drain
accelerator_drained accelerator_drains_driver accelerator_driver_enabled accelerator_driver_names accelerator_driver_plans accelerator_driver_roles
accelerator_drivers_changed accelerator_drivers_drained accelerator_drivers_to_come accelerator_evicted_pods accelerator_eviction_plan
accelerator_exchanges accelerator_existing_nodes accelerator_failed_hosts accelerator_failed_nodes accelerator_failure accelerator_failure_reason
accelerator_fleet accelerator_fleet_planned accelerator_gathered accelerator_gone accelerator_gone_answer accelerator_gone_cluster
accelerator_gone_hosts accelerator_gone_keys accelerator_gone_number accelerator_gone_objects accelerator_gone_owners accelerator_gone_published
accelerator_gone_results accelerator_gone_unknown accelerator_group accelerator_group_hosts accelerator_group_names accelerator_has_driver
accelerator_has_evict accelerator_healthy accelerator_held accelerator_here accelerator_host_api accelerator_idle accelerator_image
accelerator_image_files accelerator_image_host accelerator_image_need accelerator_images accelerator_imports_image accelerator_is_controller
accelerator_is_idle accelerator_layout_entries accelerator_leaders accelerator_leads accelerator_left accelerator_left_of_gone accelerator_left_out
accelerator_line accelerator_lines accelerator_links accelerator_made accelerator_mark accelerator_marked accelerator_marks accelerator_may_evict
accelerator_may_evict_unmanaged accelerator_migration accelerator_migration_api accelerator_migration_direction accelerator_migration_method
accelerator_migration_node accelerator_mode_counts accelerator_modes accelerator_name accelerator_names accelerator_needed_hosts accelerator_needs
accelerator_node accelerator_node_answer accelerator_node_asked accelerator_node_asked_again accelerator_node_layout accelerator_node_plan
accelerator_numbered accelerator_of_gone accelerator_operation accelerator_operation_number accelerator_own accelerator_own_keys accelerator_own_units
accelerator_parts accelerator_paths accelerator_peers accelerator_plan accelerator_plan_dest accelerator_plan_writes accelerator_planned
accelerator_planned_operations accelerator_planned_steps accelerator_plans accelerator_pod accelerator_pod_deleted accelerator_pods_of_claims
accelerator_profile_counts accelerator_progress accelerator_published accelerator_python accelerator_release_error accelerator_remaining_nodes
accelerator_remaining_text accelerator_report accelerator_report_data_used accelerator_report_joined accelerator_report_stem accelerator_reserved
accelerator_restore_error accelerator_role accelerator_role_evicts accelerator_role_evicts_unmanaged accelerator_root accelerator_rules_of_npus
accelerator_run accelerator_saved accelerator_settings_seen accelerator_settled accelerator_silent accelerator_slices accelerator_stale_operations
accelerator_steps accelerator_stray accelerator_texts accelerator_there accelerator_timeout accelerator_unreachable accelerator_user accelerator_users
accelerator_uuids accelerator_vendors_of_fleet accelerator_vendors_of_node accelerator_wanted accelerator_why
"""
#: Variables that tasks of the playbooks set, with ``vars`` too, and those of their plays.
SET_BY_PLAYBOOKS = frozenset(_SET_BY_PLAYBOOKS.split())
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
