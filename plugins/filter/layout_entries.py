# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: layout_entries
version_added: 0.1.0
short_description: Find the layout entry of each host
description:
  - Returns for each host the first entry in its list of layouts whose pattern matches the host.
  - Each pattern is resolved once for all hosts. In contrast, the lookup P(ansible.builtin.inventory_hostnames#lookup) reads the whole inventory
    for each host and each pattern.
  - Fails if no entry matches a host, and the inventory has no host for the pattern of an entry, because such a pattern is probably misspelled.
  - A template as the whole list is evaluated once for all hosts with the same values of the variables that it reads.
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
      - The value of the variable for O(host) in the task that uses this filter.
      - C(hostvars) does not contain variables of plays and of C(import_playbook). If this value differs from that in C(hostvars), the filter assumes
        such a variable and uses the value for all hosts.
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
    msg: "{{ entry.layout if 'layout' in entry else accelerator_layouts[entry.position].layout }}"
  vars:
    entry: "{{ entries[inventory_hostname] }}"
  when: inventory_hostname in entries
"""

RETURN = r"""
_value:
  description: By host, the C(position) of the entry. Its C(layout) is only included if the list is a template that was evaluated once for several hosts.
    Hosts without a matching entry are left out.
  type: dict
  sample: {gpu-node-1: {position: 0}, gpu-node-2: {position: 3}}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleError, AnsibleFilterError
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible_collections.dra.accelerators.plugins.filter.text_variables import has_templates, raw_variables
from jinja2 import Environment, TemplateError, nodes

#: Lookups whose results are the same for all hosts, if their arguments are.
_SAME_LOOKUPS = frozenset({"csvfile", "env", "file", "fileglob", "ini", "pipe", "unvault"})
#: Template functions, apart from variables, whose results are the same for all hosts.
_SAME_FUNCTIONS = frozenset({"dict", "lookup", "namespace", "now", "omit", "q", "query", "range"})
#: Variables that contain the variables of all hosts, or all variables of one host.
_OF_ALL_HOSTS = frozenset({"hostvars", "vars"})


def layout_entries(
    hosts: Any, hostvars: Any, groups: Any, name: str = "accelerator_layouts", own: Any = None, host: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the first entry that matches, by host.

    Raises AnsibleFilterError, also if a host has no entry and the pattern of one of its entries matches no host of the inventory, because such
    a pattern is probably misspelled, and the host would lose its layout.
    """
    if isinstance(hosts, str) or not isinstance(hosts, Sequence):
        raise AnsibleFilterError(f"layout_entries: found {type(hosts).__name__}, expected a list of hosts")
    manager = InventoryManager(DataLoader(), parse=False)
    for group, members in groups.items():
        manager.add_group(group)
        for member in members:
            manager.add_host(member, group=group)
    matches: dict[tuple[str, ...], frozenset[str]] = {}
    found: dict[str, dict[str, Any]] = {}
    lists = _Lists(hostvars, name)
    of_play = own is not None and own != (lists.of_host(host) or [])
    for each in hosts:
        without_hosts: list[str] = []
        for position, entry in enumerate((own if of_play else lists.of_host(str(each))) or ()):
            pattern = entry.get("hosts") if isinstance(entry, Mapping) else None
            if not pattern:
                raise AnsibleFilterError(
                    f"layout_entries: entry {position} of {name} of {each} has no hosts, expected a pattern"
                )
            key = (pattern,) if isinstance(pattern, str) else tuple(map(str, pattern))
            if key not in matches:
                matches[key] = _resolve(manager, list(key))
            if str(each) in matches[key]:
                found[str(each)] = {"position": position}
                if "layout" in entry and not of_play and lists.is_shared(str(each)):
                    found[str(each)]["layout"] = entry["layout"]
                break
            if not matches[key]:
                without_hosts.append(", ".join(key))
        else:
            if without_hosts:
                raise AnsibleFilterError(
                    f"layout_entries: no entry of {name} matches {each}, and the inventory has no host for the hosts "
                    f"{' and '.join(map(repr, without_hosts))}. Correct the pattern, or remove the entry"
                )
    return found


class _Lists:
    """The lists of the hosts. Only lists with templates are evaluated, because the time of an evaluation grows with the list.

    A template with the same result for several hosts is evaluated once.
    """

    def __init__(self, hostvars: Any, name: str) -> None:
        self._hostvars = hostvars
        self._name = name
        # By the identity of the list, which most hosts share; the reference keeps the identity valid.
        self._seen: dict[int, tuple[Any, bool]] = {}
        self._inputs = _Inputs()
        self._shared: dict[Any, Any] = {}
        self._of_hosts: dict[str, tuple[Any, bool]] = {}

    def of_host(self, host: str) -> Any:
        """Return the list of a host, None if it has none."""
        if host not in self._of_hosts:
            self._of_hosts[host] = self._list_of(host)
        return self._of_hosts[host][0]

    def is_shared(self, host: str) -> bool:
        """Return whether the list of a host is an evaluated template that does not depend on the host."""
        self.of_host(host)
        return self._of_hosts[host][1]

    def _list_of(self, host: str) -> tuple[Any, bool]:
        variables = raw_variables(self._hostvars, host)
        raw = variables.get(self._name)
        if id(raw) not in self._seen:
            self._seen[id(raw)] = raw, has_templates(raw)
        if not self._seen[id(raw)][1]:
            return raw, False
        key = self._inputs.key(raw, variables) if isinstance(raw, str) else None
        if key is None:
            return self._hostvars[host].get(self._name), False
        if key not in self._shared:
            self._shared[key] = self._hostvars[host].get(self._name)
        return self._shared[key], True


class _Inputs:
    """Find the variables that templates read, to compare their values between hosts. Nothing is evaluated."""

    def __init__(self) -> None:
        # It only parses templates.
        self._environment = Environment(extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"])  # noqa: S701
        self._names_of_text: dict[str, frozenset[str] | None] = {}
        # By the identity of lists and mappings; the reference keeps the identity valid.
        self._names_of_object: dict[int, tuple[Any, frozenset[str] | None]] = {}

    def key(self, raw: str, variables: Mapping[str, Any]) -> frozenset[tuple[str, Any]] | None:
        """Return the inputs of a template: equal keys mean equal results. None if the result can depend on more than variables."""
        found: dict[str, Any] = {}
        pending: list[tuple[str, Any]] = [("", raw)]
        while pending:
            name, value = pending.pop()
            is_plain = value is None or isinstance(value, (str, bool, int, float))
            found[name] = (type(value).__name__, value) if is_plain else id(value)
            names = self._names_in(value)
            if names is None or not names <= variables.keys() - _OF_ALL_HOSTS:
                return None
            pending += [(each, variables[each]) for each in names - found.keys()]
        return frozenset(found.items())

    def _names_in(self, value: Any) -> frozenset[str] | None:
        """Return the variables that a raw value reads, if it has templates. None if it can read others."""
        if isinstance(value, str):
            if value not in self._names_of_text:
                self._names_of_text[value] = self._read(value) if has_templates(value) else frozenset()
            return self._names_of_text[value]
        if id(value) not in self._names_of_object:
            is_mapping = isinstance(value, Mapping)
            items = [*value, *value.values()] if is_mapping else value if isinstance(value, Sequence) else []
            found = [self._names_in(item) for item in items]
            known = [names for names in found if names is not None]
            names = frozenset(name for each in known for name in each) if len(known) == len(found) else None
            self._names_of_object[id(value)] = value, names
        return self._names_of_object[id(value)][1]

    def _read(self, text: str) -> frozenset[str] | None:
        try:
            tree = self._environment.parse(text)
        except TemplateError:
            return None
        if any(tree.find(kind) for kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            return None
        for call in tree.find_all(nodes.Call):
            function = call.node.name if isinstance(call.node, nodes.Name) else ""
            if function in ("lookup", "query", "q"):
                plugin = call.args[0].value if call.args and isinstance(call.args[0], nodes.Const) else ""
                if str(plugin).removeprefix("ansible.builtin.") not in _SAME_LOOKUPS:
                    return None
        # Names that the template sets itself are among these. No host has them, so such a template is evaluated for each host.
        return frozenset(each.name for each in tree.find_all(nodes.Name) if each.ctx == "load") - _SAME_FUNCTIONS


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
