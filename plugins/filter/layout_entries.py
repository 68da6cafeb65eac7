# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: layout_entries
version_added: 0.1.0
short_description: Find the layout entry of each host
description:
  - Returns for each host the position of the first entry in its list of layouts whose pattern matches the host.
  - Each pattern is resolved once for all hosts. In contrast, the lookup P(ansible.builtin.inventory_hostnames#lookup) reads the whole inventory
    for each host and each pattern.
author:
  - The dra.accelerators authors (@dra-accelerators)
positional: _input, hostvars, groups, name, own, host
options:
  _input:
    description: Names of hosts, for example C(ansible_play_hosts).
    type: list
    elements: str
    required: true
  hostvars:
    description: The variables of all hosts.
    type: dict
    required: true
  groups:
    description: The groups of the inventory, C(groups).
    type: dict
    required: true
  name:
    description:
      - The variable of each host with its list of layouts. Each entry has C(hosts), a host pattern.
      - Hosts without this variable are not part of the result.
    type: str
    default: accelerator_layouts
  own:
    description:
      - The value of the variable in the task that uses this filter, as O(host) has it.
      - C(hostvars) has no variables of plays and of C(import_playbook). If this value differs from that in C(hostvars), it comes from there, and
        counts for all hosts.
    type: list
    elements: dict
  host:
    description: The host of the task that uses this filter, C(inventory_hostname). Required with O(own).
    type: str
seealso:
  - plugin: ansible.builtin.inventory_hostnames
    plugin_type: lookup
"""

EXAMPLES = r"""
- name: Find the layout entry of each host
  ansible.builtin.set_fact:
    entries: >-
      {{ ansible_play_hosts
         | dra.accelerators.layout_entries(hostvars, groups, own=accelerator_layouts | default([]), host=inventory_hostname) }}
  run_once: true

- name: Show the layout of the host
  ansible.builtin.debug:
    msg: "{{ accelerator_layouts[entries[inventory_hostname]].layout }}"
  when: inventory_hostname in entries
"""

RETURN = r"""
_value:
  description: The position of the entry by host. Hosts without a matching entry are left out.
  type: dict
  sample: {gpu-node-1: 0, gpu-node-2: 3}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleError, AnsibleFilterError
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader


def layout_entries(
    hosts: Any, hostvars: Any, groups: Any, name: str = "accelerator_layouts", own: Any = None, host: str = ""
) -> dict[str, int]:
    """Return the position of the first entry that matches, by host. Raises AnsibleFilterError."""
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"layout_entries: found {type(hosts).__name__}, expected a list of hosts")
    manager = InventoryManager(DataLoader(), parse=False)
    for group, members in groups.items():
        manager.add_group(group)
        for member in members:
            manager.add_host(member, group=group)
    matches: dict[tuple[str, ...], frozenset[str]] = {}
    found = {}
    of_play = own is not None and own != (hostvars[host].get(name) or [])
    for each in hosts:
        for position, entry in enumerate((own if of_play else hostvars[each].get(name)) or ()):
            pattern = entry.get("hosts") if isinstance(entry, Mapping) else None
            if not pattern:
                raise AnsibleFilterError(
                    f"layout_entries: entry {position} of {name} of {each} has no hosts, expected a pattern"
                )
            key = (pattern,) if isinstance(pattern, str) else tuple(map(str, pattern))
            if key not in matches:
                matches[key] = _resolve(manager, list(key))
            if str(each) in matches[key]:
                found[str(each)] = position
                break
    return found


def _resolve(manager: InventoryManager, patterns: list[str]) -> frozenset[str]:
    """Return the names of the hosts that match the patterns. Invalid patterns match no host, as in the lookup inventory_hostnames."""
    try:
        return frozenset(host.name for host in manager.get_hosts(pattern=patterns))
    except AnsibleError:
        return frozenset()


class FilterModule:
    """The filter plugin."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by its name."""
        return {"layout_entries": layout_entries}
