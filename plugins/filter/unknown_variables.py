# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: unknown_variables
version_added: 0.1.0
short_description: List variables that no playbook of this collection reads
description:
  - Ansible ignores a variable with a misspelled name, and the default applies without a message.
  - Returns one sentence for each variable whose name begins with C(accelerator_), C(dra_controller_), or C(dra_driver_), and that no playbook and no
    role knows, with the most similar known name. The playbooks of this collection fail if the filter returns a sentence.
  - Other roles of this collection have prefixes that variables of other collections can have too. Their names are not checked.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars
options:
  _input:
    description: Names of hosts, for example C(groups['accelerator_nodes']).
    type: list
    elements: str
    required: true
  hostvars:
    description: The variables of all hosts.
    type: dict
    required: true
seealso:
  - plugin: dra.accelerators.text_variables
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Reject misspelled variables
  ansible.builtin.assert:
    that: groups['accelerator_nodes'] | dra.accelerators.unknown_variables(hostvars) | length == 0
    fail_msg: "{{ groups['accelerator_nodes'] | dra.accelerators.unknown_variables(hostvars) }}"
  run_once: true
"""

RETURN = r"""
_value:
  description: The sentences, sorted by variable.
  type: list
  elements: str
  sample: ["The variable accelerator_vendor (of a, b) is unknown. Did you mean accelerator_vendors?"]
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.text_variables import raw_variables
from ansible_collections.dra.accelerators.plugins.lookup.reserved_variables import FACTS_OF_ROLES, SET_BY_ROLES
from ansible_collections.dra.accelerators.plugins.module_utils._playbooks.variables import (
    ROLE_PREFIXES,
    nearest,
    unknown,
)

ROLES = Path(__file__).resolve().parents[2] / "roles"
#: The number of hosts that a sentence names.
NAMED_HOSTS = 3


@cache
def role_options() -> frozenset[str]:
    """Return the options of the roles with a checked prefix, from their argument specs, and the variables that roles set."""
    found: set[str] = set()
    for prefix in ROLE_PREFIXES:
        text = (ROLES / prefix.rstrip("_") / "meta/argument_specs.yml").read_text(encoding="utf-8")
        for entry in yaml.safe_load(text)["argument_specs"].values():
            found |= entry.get("options", {}).keys()
    return frozenset(found) | SET_BY_ROLES | FACTS_OF_ROLES


def sentence(name: str, hosts: Sequence[str]) -> str:
    """Return the sentence about an unknown variable of hosts."""
    named = ", ".join(hosts[:NAMED_HOSTS]) + (f", and {len(hosts) - NAMED_HOSTS} more" * (len(hosts) > NAMED_HOSTS))
    similar = nearest(name, role_options())
    role = next((each.rstrip("_") for each in ROLE_PREFIXES if name.startswith(each)), "")
    lists = f"The README of the role {role} lists its options." if role else "docs/variables.md lists all variables."
    hint = f"Did you mean {similar}?" if similar else lists
    return f"The variable {name} (of {named}) is unknown. {hint}"


def unknown_variables(hosts: Any, hostvars: Any) -> list[str]:
    """Return a sentence for each unknown variable. Raises AnsibleFilterError."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"unknown_variables: found {type(hosts).__name__}, expected a list of hosts")
    found: dict[str, list[str]] = {}
    for host in hosts:
        for name in unknown((str(key) for key in raw_variables(hostvars, host)), role_options()):
            found.setdefault(name, []).append(str(host))
    return [sentence(name, sorted(found[name])) for name in sorted(found)]


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"unknown_variables": unknown_variables}
