# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks upgrade and repartition read every node of the inventory before the first change."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from cluster_playbooks import ANSWER_MODULE, ROOT, ClusterServer, failures, group, run_playbook, two_clusters


def test_plan_of_the_upgrade_lists_the_claims_of_each_cluster_once(
    tmp_path: Path, clusters: tuple[ClusterServer, ClusterServer]
) -> None:
    for node, server in zip(("a1", "a2", "b2"), (clusters[0], clusters[0], clusters[1])):
        server.use(node)
    (tmp_path / "library").mkdir()
    (tmp_path / "library/answer.py").write_text(ANSWER_MODULE, encoding="utf-8")
    plays = yaml.safe_load((ROOT / "playbooks/upgrade.yml").read_text("utf-8"))
    (plan,) = (each for each in plays if each["name"] == "Plan the upgrade")
    names = [task["name"] for task in plan["tasks"]]
    first = names.index("Find each node's name and its cluster")
    last = names.index("Find the pods to evict")
    ask = plan["tasks"][last]
    held = {"answer": {"answer": {"held": "{{ given.held_claims }}", "driver": "{{ given.drivers }}"}}}
    show = {**held, "vars": {**ask["vars"], "given": ask["dra.accelerators.device_drain"]}, "register": "shown"}
    show |= {"loop": ["nvidia_driver"], "loop_control": ask["loop_control"]}
    tell = {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} {{ shown.results[0].held | join(',') }}."}}
    document = {**plan, "tasks": [*plan["tasks"][first:last], show, tell]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([document], sort_keys=False), encoding="utf-8")
    done = run_playbook(tmp_path, tmp_path / "play.yml", two_clusters(tmp_path, clusters))
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(re.findall(r'"msg": "(\S+ \S*)\."', done.stdout)) == {
        "a1 default/claim-on-a1",
        "a2 default/claim-on-a2",
        "b1 ",
        "b2 default/claim-on-b2",
    }
    for server in clusters:
        assert server.paths.count("/apis/resource.k8s.io/v1/resourceclaims") == 1


def test_repartition_with_an_unreachable_node_changes_no_node(tmp_path: Path) -> None:
    """A node is unreachable: no node is changed, because the plan would not know which of its devices pods use."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n", encoding="utf-8")
    (tmp_path / "ssh").chmod(0o755)
    hosts = group(["a1", "a2"], accelerator_kubeconfig=str(tmp_path / "kubeconfig"))
    hosts["hosts"]["a2"] = {"ansible_connection": "ssh", "ansible_ssh_executable": str(tmp_path / "ssh")}
    done = run_playbook(tmp_path, ROOT / "playbooks/repartition.yml", {"accelerator_nodes": hosts})
    assert done.returncode != 0 and "Find each node's name" not in done.stdout, done.stdout
    assert "Cannot connect to a2, so no node was changed." in failures(done.stdout)["a1"], done.stdout
    assert "--limit 'accelerator_nodes,!a2'" in failures(done.stdout)["a1"], done.stdout
