# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filter that finds the layout entry of each host."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible.inventory.manager import InventoryManager
from ansible_collections.dra.accelerators.plugins.filter.layout_entries import FilterModule

HOSTS = [f"node-{number}" for number in range(50)]
GROUPS = {"all": [*HOSTS, "other"], "accelerator_nodes": HOSTS, "even": HOSTS[::2], "ungrouped": ["other"]}


def layout_entries(*arguments: Any, **more: Any) -> dict[str, int]:
    """Return the positions of the entries."""
    found = FilterModule().filters()["layout_entries"](*arguments, **more)
    return {host: entry["position"] for host, entry in found.items()}


def entries(*patterns: Any) -> list[dict[str, Any]]:
    return [{"hosts": pattern, "layout": []} for pattern in patterns]


def test_first_matching_entry_of_each_host_is_found() -> None:
    own = entries(
        "other", "node-3", "even:!node-4", ["node-4", "node-5"], "accelerator_nodes[7]", "~node-1[13]", "node-4*"
    )
    hostvars = {host: {"accelerator_layouts": own} for host in HOSTS}
    hostvars["node-9"] = {"accelerator_layouts": entries("node-3", "all")}
    hostvars["node-11"] = {}
    found = layout_entries(HOSTS, hostvars, GROUPS)
    assert {host: position for host, position in found.items() if host not in GROUPS["even"]} == {
        "node-3": 1,
        "node-5": 3,
        "node-7": 4,
        "node-9": 1,
        "node-13": 5,
        "node-41": 6,
        "node-43": 6,
        "node-45": 6,
        "node-47": 6,
        "node-49": 6,
    }
    assert found["node-4"] == 3 and {found[host] for host in GROUPS["even"] if host != "node-4"} == {2}


def test_each_pattern_is_resolved_once_for_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pattern is resolved once for all hosts. The real function is called, and the calls are counted."""
    resolved, get_hosts = list[Any](), InventoryManager.get_hosts

    def counted(self: InventoryManager, pattern: Any = "all", **more: Any) -> Any:
        resolved.append(pattern)
        return get_hosts(self, pattern, **more)

    monkeypatch.setattr(InventoryManager, "get_hosts", counted)
    own = entries(*HOSTS)
    found = layout_entries(HOSTS, {host: {"accelerator_layouts": own} for host in HOSTS}, GROUPS)
    assert found == {host: position for position, host in enumerate(HOSTS)}
    assert resolved == [[host] for host in HOSTS]


def test_play_variable_list_applies_to_all_hosts() -> None:
    """Variables of a play are not in hostvars, but have precedence over the inventory: the list applies to all hosts."""
    hostvars: dict[str, Any] = {host: {} for host in HOSTS} | {"node-2": {"accelerator_layouts": entries("all")}}
    given = entries("node-1", "even")
    found = layout_entries(HOSTS[:3], hostvars, GROUPS, own=given, host="node-0")
    assert found == {"node-0": 1, "node-1": 0, "node-2": 1}
    assert layout_entries(HOSTS[:3], hostvars, GROUPS, own=[], host="node-2") == {}
    # Only the value of the task's host decides whether a play has set it.
    assert layout_entries(HOSTS[:3], hostvars, GROUPS, own=[], host="node-1") == {"node-2": 0}
    assert layout_entries(HOSTS[:3], hostvars, GROUPS, own=entries("all"), host="node-2") == {"node-2": 0}


def test_entry_without_hosts_is_rejected() -> None:
    with pytest.raises(
        AnsibleFilterError, match="entry 1 of accelerator_layouts of node-0 has no hosts, expected a pattern"
    ):
        layout_entries(
            HOSTS, {host: {"accelerator_layouts": [*entries("x"), {"layout": []}]} for host in HOSTS}, GROUPS
        )
    with pytest.raises(AnsibleFilterError, match="found str, expected a list of hosts"):
        layout_entries("node-0", {}, GROUPS)


def test_pattern_without_hosts_is_rejected_if_a_host_has_no_entry() -> None:
    hostvars = {host: {"accelerator_layouts": entries("node-1", "gpu-nodex", ["rack-1", "rack-2"])} for host in HOSTS}
    with pytest.raises(
        AnsibleFilterError,
        match="no entry of accelerator_layouts matches node-0, and the inventory has no host for the hosts 'gpu-nodex' and 'rack-1, rack-2'",
    ):
        layout_entries(HOSTS, hostvars, GROUPS)


def test_pattern_without_hosts_is_accepted_if_each_host_has_an_entry() -> None:
    """For example, the entry of a node that has left the inventory."""
    hostvars = {host: {"accelerator_layouts": entries("former-node", "all")} for host in HOSTS}
    assert layout_entries(HOSTS, hostvars, GROUPS) == dict.fromkeys(HOSTS, 1)
