# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Playbooks reject inventories without a node, with a node twice, or with several clusters where one is expected."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.dra.accelerators.plugins.filter.cluster_union import cluster_union
from ansible_collections.dra.accelerators.plugins.filter.node_name_conflicts import ROLES, node_name_conflicts
from cluster_playbooks import ROOT, ClusterServer, Json, group, run_playbook, two_clusters
from playing import play as play_tasks

#: The message of each playbook for an inventory without hosts for it.
NODES = "The group accelerator_nodes of the inventory has no hosts"
EMPTY = {
    **dict.fromkeys(("site", "remove", "repartition", "upgrade", "report", "plan", "device_plugin_migration"), NODES),
    "driver_form": NODES,
    "bundle": "The groups accelerator_nodes and accelerator_controllers of the inventory have no hosts",
    "controller": "The group accelerator_controllers of the inventory has no hosts, and dra_controller_deploy_as is service",
    "monitoring": "The group accelerator_monitoring of the inventory has no hosts",
}


@pytest.mark.parametrize("playbook", list(EMPTY))
def test_empty_group_fails(tmp_path: Path, playbook: str) -> None:
    done = run_playbook(tmp_path, ROOT / f"playbooks/{playbook}.yml", {"acelerator_nodes": group(["a1"])})
    assert done.returncode != 0, done.stdout
    assert EMPTY[playbook] in done.stdout and "acelerator_nodes" in done.stdout, done.stdout


@pytest.mark.parametrize("playbook", list(EMPTY))
def test_limit_without_hosts_of_the_group_fails(tmp_path: Path, playbook: str) -> None:
    groups = {
        name: group(["a1"]) for name in ("accelerator_nodes", "accelerator_controllers", "accelerator_monitoring")
    }
    groups["web"] = group(["w1"])
    done = run_playbook(tmp_path, ROOT / f"playbooks/{playbook}.yml", groups, "--limit", "w1")
    assert done.returncode != 0 and "The limit w1 contains no host of the group" in done.stdout, done.stdout


def test_bundle_is_not_written_without_the_needs_of_each_host(tmp_path: Path) -> None:
    """A host without platform data stops the run: the first host that has not failed would write an incomplete bundle."""
    hosts = group(["a1", "a2"])
    hosts["hosts"]["a2"] = {"accelerator_platform": {"distribution": "debian", "release": "13", "machine": "x86_64"}}
    variables = {"accelerator_bundle_dest": str(tmp_path / "fleet.bundle")}
    playbook = ROOT / "playbooks/bundle.yml"
    done = run_playbook(tmp_path, playbook, {"accelerator_nodes": hosts}, "--check", "-e", json.dumps(variables))
    assert done.returncode != 0 and "a1 has no accelerator_platform" in done.stdout, done.stdout
    assert "Determine the needs of each host" not in done.stdout, done.stdout


def test_each_playbook_checks_its_groups() -> None:
    others = {"check_inventory": "is the check", "why": "runs on localhost"}
    assert {path.stem for path in (ROOT / "playbooks").glob("*.yml")} == EMPTY.keys() | others.keys()


@pytest.mark.parametrize("is_extra", [True, False])
def test_controller_as_a_deployment_needs_no_group(tmp_path: Path, is_extra: bool) -> None:
    """The form can be in the fleet file (-e), or be a variable of all hosts: the run needs no group."""
    plays = yaml.safe_load((ROOT / "playbooks/controller.yml").read_text("utf-8"))
    plays[0]["ansible.builtin.import_playbook"] = str(ROOT / "playbooks/check_inventory.yml")
    names = [each["name"] for each in plays[-1]["tasks"]]
    checked = plays[-1]["tasks"][: names.index("Use the offline bundle")]
    plays[-1]["tasks"] = [*checked, {"ansible.builtin.debug": {"msg": "runs on {{ inventory_hostname }}"}}]
    (tmp_path / "tasks").symlink_to(ROOT / "playbooks/tasks")
    (tmp_path / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False), encoding="utf-8")
    (tmp_path / "group_vars").mkdir()
    form = {} if is_extra else {"dra_controller_deploy_as": "deployment"}
    (tmp_path / "group_vars/all.yml").write_text(yaml.safe_dump(form), encoding="utf-8")
    words = ("-e", "dra_controller_deploy_as=deployment") if is_extra else ()
    done = run_playbook(tmp_path, tmp_path / "play.yml", {"web": group(["a1"])}, *words)
    assert done.returncode == 0 and "runs on localhost" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("limit", [(), ("--limit", "b1")])
def test_same_node_name_in_one_cluster_fails(tmp_path: Path, limit: tuple[str, ...]) -> None:
    """Two hosts with the same Node fail, also if the run is limited to one of them."""
    hosts = group(["a1", "b1", "c1"], accelerator_kubeconfig=str(tmp_path / "kubeconfig"))
    hosts["hosts"] = {name: {"accelerator_node_name": "gpu-1"} for name in ("a1", "b1")} | {"c1": {}}
    done = run_playbook(tmp_path, ROOT / "playbooks/site.yml", {"accelerator_nodes": hosts}, *limit)
    assert done.returncode != 0 and "Prepare the nodes" not in done.stdout, done.stdout
    assert f"Hosts a1, b1 have the same Node gpu-1 of the cluster {tmp_path}/kubeconfig." in done.stdout


def test_same_node_name_in_an_option_of_a_role_is_a_conflict() -> None:
    """Covers each role with an option for the host's Node name. The name of a controller belongs to another group."""
    options = {
        name: path.parents[1].name
        for path in ROOT.glob("roles/*/defaults/main.yml")
        for name in yaml.safe_load(path.read_text("utf-8"))
        if name.endswith("_node_name") and not name.startswith("dra_controller")
    }
    assert set(options.values()) == set(ROLES)
    for option, role in options.items():
        hosts: Json = {"a": {option: "gpu-1"}, "b": {option: "gpu-1"}, "c": {}}
        (sentence,) = node_name_conflicts(list(hosts), hosts)
        assert sentence.startswith("Hosts a, b have the same Node gpu-1 of the cluster "), role
        assert node_name_conflicts(["a", "c"], {**hosts, "c": {"accelerator_node_name": "gpu-1"}}), role
        # A different cluster, and different names for the role of hosts with one name for the playbooks.
        hosts["b"][f"{role}_context"] = "other"
        assert not node_name_conflicts(list(hosts), hosts), role
        named: Json = {name: {"accelerator_node_name": "gpu-1", option: f"gpu-{name}"} for name in "ab"}
        assert len(node_name_conflicts(list(named), named)) == 1, role


def test_node_name_that_is_an_integer_in_the_inventory_is_text(tmp_path: Path) -> None:
    """In an INI inventory, ``accelerator_node_name=12`` is an integer. Each expression of the collection converts it to a string."""
    own = re.compile(r"[\w']*accelerator_node_name[\w'\])]* \|.*")
    expressions = {}
    for path in (*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/[dtv]*/*.yml")):
        for line in path.read_text("utf-8").splitlines():
            if own.search(line) and not line.lstrip().startswith("#") and '"{{' in line:
                expressions[f"{path.relative_to(ROOT)}: {line.strip()}"] = line.partition('"')[2].rstrip('"')
    assert len(expressions) >= 13, expressions
    reported = {place: "{{ (" + each.strip("{} ") + ") is string }}" for place, each in expressions.items()}
    tell = {"ansible.builtin.debug": {"msg": "{{ reported | to_json | b64encode }}"}}
    play_vars = {"reported": reported, "__dra_controller_peer": "a"}
    played = play_tasks(tmp_path, [{**tell, "vars": play_vars}], {"a": {"accelerator_node_name": 12}})
    assert {place for place, is_text in played.messages["a"].items() if not is_text} == set(), played.output


@pytest.mark.parametrize("variable", ["accelerator_node_name", "accelerator_kubeconfig_context"])
def test_hosts_whose_name_or_cluster_is_unknown_are_no_conflict(tmp_path: Path, variable: str) -> None:
    """Unknown names or clusters are no conflict, such as templates with facts of hosts outside of the limit. Other hosts are compared."""
    hosts = group(["a1", "b1", "c1", "d1"], accelerator_kubeconfig="/k", accelerator_node_name="gpu-1")
    hosts["vars"][variable] = "{{ known }}"
    passes = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert passes.returncode == 0, passes.stdout + passes.stderr
    hosts["hosts"] |= {name: {"known": "gpu-1"} for name in ("a1", "b1")}
    fails = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert fails.returncode != 0 and "Hosts a1, b1 have the same Node gpu-1" in fails.stdout, fails.stdout


def test_union_leaves_out_hosts_whose_value_or_cluster_is_unknown(tmp_path: Path) -> None:
    hosts = {
        "a": {"accelerator_vendors": ["ascend"]},
        "b": {"accelerator_vendors": "{{ nowhere }}"},
        "c": {"accelerator_vendors": ["one", "{{ nowhere }}"]},
        "d": {"accelerator_vendors": ["other"], "accelerator_kubeconfig": "{{ nowhere }}"},
        "e": {},
    }
    words = "dra.accelerators.cluster_union(hostvars, groups['accelerator_nodes'], api, ['accelerator_vendors'], ['nvidia'])"
    show = {"ansible.builtin.debug": {"msg": f"{{{{ [] | {words} | to_json | b64encode }}}}"}}
    api = {"kubeconfig": os.environ.get("KUBECONFIG", ""), "context": ""}
    played = play_tasks(tmp_path, [{**show, "vars": {"api": api}, "run_once": True}], hosts)
    assert played.messages == {"a": ["ascend", "nvidia"]}, played.output


def test_templates_that_older_versions_return_are_unknown() -> None:
    """ansible-core 2.18 returns a template that it cannot evaluate: its value counts as unknown."""
    hostvars = {name: {"accelerator_node_name": "{{ nowhere }}"} for name in "ab"} | {"c": {}}
    assert not node_name_conflicts(list(hostvars), hostvars)
    api = {"kubeconfig": os.environ.get("KUBECONFIG", ""), "context": ""}
    vendors = {"a": {"vendors": ["one", "{{ nowhere }}"]}, "b": {"vendors": "{{ nowhere }}"}, "c": {"vendors": ["x"]}}
    assert cluster_union([], vendors, list(vendors), api, ["vendors"]) == ["x"]


def test_same_node_name_in_two_clusters_passes(tmp_path: Path) -> None:
    hosts = group(
        ["a1", "b1", "c1"], accelerator_kubeconfig=str(tmp_path / "kubeconfig"), accelerator_node_name="gpu-1"
    )
    hosts["hosts"]["b1"] = {"accelerator_kubeconfig": str(tmp_path / "other")}
    hosts["hosts"]["c1"] = {"accelerator_kubeconfig_context": "second"}
    done = run_playbook(tmp_path, ROOT / "playbooks/check_inventory.yml", {"accelerator_nodes": hosts})
    assert done.returncode == 0, done.stdout


def test_report_of_two_clusters_is_refused(tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]) -> None:
    file = {"accelerator_report_file": str(tmp_path / "out.md")}
    groups = two_clusters(tmp_path, clusters)
    done = run_playbook(tmp_path, ROOT / "playbooks/report.yml", groups, "-e", json.dumps(file))
    assert done.returncode != 0 and "belong to 2 clusters" in done.stdout and "--limit" in done.stdout, done.stdout
    assert not (tmp_path / "out.md").exists()


def test_plan_of_two_clusters_is_refused(tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]) -> None:
    groups = two_clusters(tmp_path, clusters)
    done = run_playbook(tmp_path, ROOT / "playbooks/plan.yml", groups)
    assert done.returncode != 0 and "belong to 2 clusters" in done.stdout and "--limit" in done.stdout, done.stdout
