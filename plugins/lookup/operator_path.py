# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: operator_path
version_added: 0.1.0
short_description: Return a path on the Ansible controller, unless a fact of the host could have chosen it
description:
  - Returns the path unchanged. Fails while the host reports facts with names of this collection's variables, because such a fact could have replaced the
    variable that names the path. A compromised host could otherwise read files of the controller.
  - Ansible evaluates this lookup where the path is used. No later answer of the host can replace the path.
author:
  - The dra.accelerators authors (@dra-accelerators)
options:
  _terms:
    description: One path.
    type: list
    elements: str
    required: true
seealso:
  - plugin: dra.accelerators.foreign_facts
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Copy a file of the operator's choice
  ansible.builtin.copy:
    src: "{{ lookup('dra.accelerators.operator_path', nvidia_driver_repository_key) }}"
    dest: /etc/example.asc
    mode: "0644"
"""

RETURN = r"""
_list:
  description: The path.
  type: list
  elements: str
  sample: [/srv/keys/nvidia.asc]
"""

from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.lookup import LookupBase
from ansible_collections.dra.accelerators.plugins.filter.foreign_facts import foreign_facts


class LookupModule(LookupBase):  # type: ignore[misc]
    """The lookup plugin."""

    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
        """Return the path. Raises AnsibleError if facts of the host have the names of variables."""
        self.set_options(var_options=variables, direct=kwargs)
        if len(terms) != 1:
            raise AnsibleError(f"operator_path: found {terms!r}, expected one path")
        variables = variables or {}
        if names := foreign_facts(variables.get("ansible_facts") or {}):
            raise AnsibleError(
                f"{variables.get('inventory_hostname')} reports facts with names of variables, which Ansible would use in place of the operator's: "
                f"{', '.join(names)}. Examine the host. Set inject_facts_as_vars to false in ansible.cfg."
            )
        return terms
