# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The filters for all hosts do not evaluate a list of the fleet for each host, because the cost grows with the length of the list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.vars.hostvars import HostVars, HostVarsVars
from ansible.vars.manager import VariableManager
from ansible_collections.dra.accelerators.plugins.filter.layout_entries import layout_entries
from ansible_collections.dra.accelerators.plugins.filter.text_variables import text_variables

ROOT = Path(__file__).resolve().parents[3]
HOSTS = [f"node-{number}" for number in range(20)]
LAYOUTS = [{"hosts": host, "layout": [{"match": {"index": [0]}, "mode": "dynamic"}]} for host in HOSTS]


@pytest.fixture(name="evaluations")
def fixture_evaluations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the variables that Ansible evaluates. The real method is called."""
    seen, evaluate = list[str](), HostVarsVars.__getitem__

    def counted(self: HostVarsVars, name: str) -> Any:
        seen.append(name)
        return evaluate(self, name)

    monkeypatch.setattr(HostVarsVars, "__getitem__", counted)
    return seen


def hostvars_of(directory: Path, variables: dict[str, Any]) -> tuple[HostVars, dict[str, list[str]]]:
    """Return the variables of the hosts of an inventory whose group has these variables, and its groups."""
    content = {"accelerator_nodes": {"hosts": dict.fromkeys(HOSTS), "vars": variables}}
    (directory / "hosts.yml").write_text(yaml.safe_dump(content), encoding="utf-8")
    loader = DataLoader()
    inventory = InventoryManager(loader, sources=[str(directory / "hosts.yml")])
    manager = VariableManager(loader=loader, inventory=inventory)
    return HostVars(inventory=inventory, variable_manager=manager, loader=loader), inventory.get_groups_dict()


def test_text_variables_lists_are_not_evaluated(tmp_path: Path, evaluations: list[str]) -> None:
    variables = {"accelerator_layouts": LAYOUTS, "accelerator_proxy": {"http": "{{ here }}"}}
    hostvars, _groups = hostvars_of(tmp_path, {**variables, "accelerator_vendors": "{{ 'nvidia' }}", "here": "x"})
    (sentence,) = text_variables(HOSTS, hostvars)
    assert sentence.startswith("accelerator_vendors is text for node-0, node-1, ")
    assert evaluations == ["accelerator_vendors"] * len(HOSTS)


def test_layout_entries_list_without_templates_is_not_evaluated(tmp_path: Path, evaluations: list[str]) -> None:
    hostvars, groups = hostvars_of(tmp_path, {"accelerator_layouts": LAYOUTS})
    found = layout_entries(HOSTS, hostvars, groups, own=LAYOUTS, host=HOSTS[0])
    assert found == {host: {"position": position} for position, host in enumerate(HOSTS)}
    assert not evaluations


OF_HOST_3 = {"hosts": "node-3", "layout": [{"match": {}, "mode": "whole"}]}
SHARED = {
    "variable": {"accelerator_layouts": "{{ [first] + others }}", "first": OF_HOST_3, "others": LAYOUTS},
    "variables with templates": {
        "accelerator_layouts": "{{ [first] + {'a': others}['a'] | selectattr('hosts') }}",
        "first": {**OF_HOST_3, "layout": "{{ rules }}"},
        "rules": OF_HOST_3["layout"],
        "others": "{{ all_others }}",
        "all_others": LAYOUTS,
    },
    "file": {"accelerator_layouts": "{{ lookup('file', fleet_file) | from_json }}"},
}


@pytest.mark.parametrize("variables", SHARED.values(), ids=SHARED)
def test_layout_entries_template_without_variables_of_hosts_is_evaluated_once(
    tmp_path: Path, evaluations: list[str], variables: dict[str, Any]
) -> None:
    (tmp_path / "fleet.json").write_text(json.dumps([OF_HOST_3, *LAYOUTS]), encoding="utf-8")
    file = {"fleet_file": str(tmp_path / "fleet.json")}
    hostvars, groups = hostvars_of(tmp_path, {**variables, **file})
    found = layout_entries(HOSTS, hostvars, groups)
    assert evaluations == ["accelerator_layouts"]
    expected: dict[str, Any] = {
        host: {"position": position, "layout": LAYOUTS[position - 1]["layout"]}
        for position, host in enumerate(HOSTS, 1)
    }
    assert found == {**expected, "node-3": {"position": 0, "layout": OF_HOST_3["layout"]}}


#: Templates whose list can differ between hosts, with a variable ``own`` of the different hosts.
OF_EACH_HOST = [
    "{{ [{'hosts': 'all', 'layout': [inventory_hostname]}] }}",
    "{{ [{'hosts': 'all', 'layout': [own | default(inventory_hostname)]}] }}",
    "{{ [{'hosts': 'all', 'layout': [between]}] }}",
    "{{ [{'hosts': 'all', 'layout': [lookup('ansible.builtin.vars', 'inventory_hostname')]}] }}",
    "{{ [{'hosts': 'all', 'layout': [container.name]}] }}",
]


@pytest.mark.parametrize("layouts", OF_EACH_HOST)
def test_layout_entries_template_with_variables_of_hosts_is_evaluated_for_each(tmp_path: Path, layouts: str) -> None:
    variables = {"accelerator_layouts": layouts, "between": "{{ container.name }}"}
    variables["container"] = {"name": "{{ inventory_hostname }}"}
    hostvars, groups = hostvars_of(tmp_path, variables)
    for host, entry in layout_entries(HOSTS, hostvars, groups).items():
        assert entry.get("layout", hostvars[host]["accelerator_layouts"][entry["position"]]["layout"]) == [host]


def test_layout_entries_list_with_templates_in_items_is_evaluated(tmp_path: Path) -> None:
    hostvars, groups = hostvars_of(tmp_path, {"accelerator_layouts": [{"hosts": "{{ 'node-1' }}", "layout": []}]})
    assert layout_entries(HOSTS, hostvars, groups) == {"node-1": {"position": 0}}


def evaluated_per_host(tasks: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the expressions of the tasks that run on each host, including those in blocks."""
    for task in tasks:
        if task.get("run_once"):
            continue
        parts = ("block", "rescue", "always")
        yield str({key: value for key, value in task.items() if key not in parts})
        for part in parts:
            yield from evaluated_per_host(task.get(part, []))


def test_repartition_evaluates_no_list_of_all_hosts_per_host() -> None:
    """With the whole plan or the variables of all hosts, the cost grows with the square of the number of hosts."""
    plays = yaml.safe_load((ROOT / "playbooks/repartition.yml").read_text("utf-8"))
    (play,) = (each for each in plays if each["name"] == "Repartition the devices")
    operation = yaml.safe_load((ROOT / "playbooks/tasks/repartition_operation.yml").read_text("utf-8"))
    expressions, names = [*evaluated_per_host(play["tasks"]), *evaluated_per_host(operation)], set[str]()
    while expressions:
        used = {word for each in expressions for word in re.findall(r"\w+", each)}
        assert used.isdisjoint({"hostvars", "ansible_play_hosts_all", "accelerator_leaders", "accelerator_idle"})
        expressions = [str(play["vars"][name]) for name in used & play["vars"].keys() - names]
        names |= used & play["vars"].keys()
    assert "accelerator_node_plan" in names


@pytest.mark.parametrize("path", sorted(ROOT.glob("playbooks/**/*.yml")), ids=lambda path: path.name)
def test_playbook_chooses_hosts_of_clusters_once(path: Path) -> None:
    """The filter reads the variables of all hosts: evaluated per host, the cost grows with the square of the number of hosts."""
    document = yaml.safe_load(path.read_text("utf-8"))
    tasks = [task for play in document for task in (play.get("tasks", []) if "hosts" in play else [play])]
    assert not [each for each in evaluated_per_host(tasks) if "cluster_leaders(" in each]
