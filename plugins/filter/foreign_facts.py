# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: foreign_facts
version_added: 0.1.0
short_description: List facts of a host that have names of this collection's variables
description:
  - Every result of a module can contain facts. Unless C(inject_facts_as_vars) is V(false), Ansible makes each fact a variable, which takes precedence over
    the inventory and over defaults of roles.
  - So a compromised host can replace variables such as C(dra_driver_node_name), and use the operator's permissions for another Node. Roles of this
    collection fail if this filter returns a name.
  - With C(inject_facts_as_vars=false), no fact becomes a variable, so the filter returns an empty list.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input
options:
  _input:
    description: The facts of the host, C(ansible_facts).
    type: dict
    required: true
seealso:
  - plugin: dra.accelerators.vendor_facts
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Fail if a host reports facts with names of variables
  ansible.builtin.assert:
    that: ansible_facts | dra.accelerators.foreign_facts | length == 0
    fail_msg: "{{ inventory_hostname }} reports {{ ansible_facts | dra.accelerators.foreign_facts | join(', ') }}"
"""

RETURN = r"""
_value:
  description: The names, sorted.
  type: list
  elements: str
  sample: [dra_driver_node_name]
"""

from collections.abc import Callable, Mapping
from typing import Any

from ansible import constants
from ansible.errors import AnsibleFilterError

#: Variables of the playbooks, and of each role with and without leading underscores. A test compares them with the roles.
PREFIXES = (
    "accelerator_",
    "ascend_driver_",
    "ascend_runtime_",
    "ascend_vnpu_",
    "container_runtime_",
    "device_classes_",
    "device_plugin_migration_",
    "dra_controller_",
    "dra_driver_",
    "driver_image_",
    "machine_restart_",
    "monitoring_",
    "node_features_",
    "nvidia_container_toolkit_",
    "nvidia_driver_",
    "nvidia_fabric_manager_",
    "nvidia_mig_",
    "nvidia_settings_",
    "offline_",
    "preflight_",
    "python_environment_",
)
#: Facts that modules of this collection return.
OWN_FACTS = frozenset({"accelerator_report"})
#: The prefix of a fact's name as a variable.
_ANSIBLE = "ansible_"


def foreign_facts(facts: Any) -> list[str]:
    """Return the names of facts that Ansible uses as variables of this collection. Raises AnsibleFilterError."""
    if not isinstance(facts, Mapping):
        raise AnsibleFilterError(f"foreign_facts: found {type(facts).__name__}, expected the facts of a host")
    if not constants.INJECT_FACTS_AS_VARS:
        return []
    names = {str(name): str(name).removeprefix(_ANSIBLE).lstrip("_") for name in facts}
    return sorted(name for name, bare in names.items() if bare.startswith(PREFIXES) and name not in OWN_FACTS)


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"foreign_facts": foreign_facts}
